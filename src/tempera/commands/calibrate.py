"""`tempera-calibrate`: measure how the target scores a draft's proposals, for `schedule=calibrated`
and `schedule=optimal`.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import check_value, from_options, instantiate
from tempera.errors import TemperaError
from tempera.evaluation.calibration import save_statistics
from tempera.rules.optimal_prices import reachable_by_price
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> dict[str, float]:
    """Write the statistics; return the expected lengths of exact decoding and of the most relaxed
    schedule.
    """
    build.check_tokens(cfg)
    if cfg.model.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"`{command('calibrate')}` measures drafts of discrete tokens, for "
            "schedule=calibrated and schedule=optimal; methods for continuous tokens have no "
            "schedule."
        )
    for name, kind in (("seed", int), ("batch_size", int), ("statistics", Path)):
        check_value(cfg, name, cfg[name], kind)
    if "tree" not in cfg or not build.build_tree(cfg).nodes:
        raise TemperaError(
            "a schedule is calibrated on chains or static trees of a draft network: give "
            "method=coolsd, eagle, uniform_rsd or optimal_rsd",
            option="method",
        )
    build.check_draft(cfg)
    measured_with = instantiate(cfg.measured_with)
    prompts, path = instantiate(cfg.data), Path(str(cfg.statistics))
    target: Any = build.build_target(cfg)
    target.fuse()
    found = from_options(
        cfg,
        "tempera.evaluation.calibration.record",
        target=target,
        drafter=build.build_drafter(cfg, target),
        prompts=prompts,
        device=build.parse_device(cfg.device),
    )
    save_statistics(path, found, measured_with)
    rounds = found.rounds
    low, high = reachable_by_price(rounds)
    print(f"{len(rounds.weights)} rounds of {rounds.tree.nodes} drafts in {path}")
    print(
        f"next: {command('eval')} method=optimal_rsd schedule=optimal "
        f"expected_length={(low + high) / 2:.1f}   ({low:.2f} to {high:.2f})"
    )
    return {"rounds": len(rounds.weights), "shortest": low, "longest": high}
