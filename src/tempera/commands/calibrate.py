"""`tempera-calibrate`: measure how the target scores a draft's proposals, for `schedule=calibrated`
and `schedule=optimal`.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import instantiate, parsed
from tempera.evaluation import calibration
from tempera.rules.optimal_prices import reachable_by_price
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> dict[str, float]:
    """Write the statistics; return the expected lengths of exact decoding and of the most relaxed
    schedule.
    """
    build.check_tokens(cfg)
    build.check_discrete(cfg, f"`{command('calibrate')}` measures drafts of discrete tokens")
    calibration.check_tree(build.build_tree(cfg))
    build.check_draft(cfg)
    path = Path(str(cfg.statistics))
    calibration.check_place(path)
    parsed(cfg.tracking)
    measured_with, prompts = instantiate(cfg.measured_with), instantiate(cfg.data)
    target: Any = build.build_target(cfg)
    target.pack()
    drafter, device = build.build_drafter(cfg, target), build.parse_device(cfg.device)
    found = calibration.record(target, drafter, prompts, cfg.seed, device, cfg.batch_size)
    calibration.save_statistics(path, found, measured_with)
    rounds = found.rounds
    low, high = reachable_by_price(rounds)
    print(f"{len(rounds.weights)} rounds of {rounds.tree.nodes} drafted tokens: {path}")
    print(
        f"next: {command('eval')} method=optimal_rsd schedule=optimal "
        f"expected_length={(low + high) / 2:.1f}   (possible: {low:.2f} to {high:.2f})"
    )
    values = {"rounds": len(rounds.weights), "shortest": low, "longest": high}
    build.track(cfg, path.with_suffix(""), "calibrate", values, files=[path])
    return values
