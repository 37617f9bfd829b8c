"""`tempera-calibrate`: p/q along the chains that a draft proposes, for `schedule=calibrated`."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import check_value, from_options, instantiate
from tempera.errors import TemperaError
from tempera.evaluation.calibration import load_statistics, save_statistics
from tempera.rules.optimal_schedule import reachable
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> dict[str, float]:
    """Write the statistics; return the expected lengths of exact decoding and of the most relaxed
    schedule.
    """
    build.check_tokens(cfg)
    if cfg.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"`{command('calibrate')}` measures drafts of discrete tokens, for "
            "schedule=calibrated; methods of continuous ones have no schedule."
        )
    for name, kind in (("seed", int), ("batch_size", int), ("statistics", Path)):
        check_value(cfg, name, cfg[name], kind)
    measured_with = instantiate(cfg.measured_with)
    prompts, path = instantiate(cfg.data), Path(str(cfg.statistics))
    target: Any = build.build_target(cfg)
    target.fuse()
    ratios = from_options(
        cfg,
        "tempera.evaluation.calibration.record",
        target=target,
        drafter=build.build_drafter(cfg, target),
        prompts=prompts,
        device=build.parse_device(cfg.device),
    )
    save_statistics(path, ratios, measured_with)
    low, high = reachable(load_statistics(path)[0])
    print(f"{len(ratios)} chains of {ratios.shape[1]} drafts in {path}")
    print(
        f"now: {command('eval')} method=coolsd schedule=calibrated "
        f"expected_length={(low + high) / 2:.1f}   ({low:.2f} to {high:.2f})"
    )
    return {"chains": len(ratios), "shortest": low, "longest": high}
