"""`tempera-calibrate`: measure how the target scores a draft's proposals, for `schedule=calibrated`
and `schedule=optimal`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.config.resolvers import drafter_of
from tempera.config.tracking import Tracking
from tempera.data.prompts import Prompt
from tempera.evaluation import calibration
from tempera.evaluation.calibration import Statistics
from tempera.rules.optimal_prices import reachable_by_price
from tempera.runtime.installation import command
from tempera.runtime.processor import parse_device


@dataclass(frozen=True)
class Checked:
    """A calibration whose options are right, before weights are read.

    Attributes:
        path: of the file of statistics.
        measured_with: what they depend on.
        prompts: whose drafts are measured.
        tracking: where the result goes.
        drafter: what drafts.
    """

    path: Path
    measured_with: Mapping[str, Any]
    prompts: list[Prompt]
    tracking: Tracking
    drafter: str


def main(cfg: DictConfig) -> None:
    """Write the statistics, and print what they make possible."""
    checked = _check(cfg)
    target = build.build_discrete_target(cfg)
    target.pack()
    drafter = build.build_drafter(cfg, target)
    device = parse_device(cfg.device)
    found = calibration.record(target, drafter, checked.prompts, cfg.seed, device, cfg.batch_size)
    calibration.save_statistics(checked.path, found, checked.measured_with)
    _show(found, checked)


def _check(cfg: DictConfig) -> Checked:
    build.check_tokens(cfg)
    build.check_discrete(cfg, f"`{command('calibrate')}` measures drafts of discrete tokens")
    calibration.check_tree(build.build_tree(cfg))
    build.check_draft(cfg)
    path = Path(str(cfg.statistics))
    calibration.check_place(path)
    tracking = Tracking.of(cfg, "calibrate")
    prompts = list(instantiate(cfg.data))
    drafter = drafter_of(cfg.drafter._target_)
    return Checked(path, instantiate(cfg.measured_with), prompts, tracking, drafter)


def _show(found: Statistics, checked: Checked) -> None:
    """Print what was measured and which lengths are possible, and send it to the tracker."""
    rounds = found.rounds
    low, high = reachable_by_price(rounds)
    count = len(rounds.weights)
    print(f"{count} rounds of {rounds.tree.nodes} drafted tokens: {checked.path}")
    print(
        f"next: {command('eval')} method=optimal_rsd drafter={checked.drafter} schedule=optimal "
        f"expected_length={(low + high) / 2:.1f}   (possible: {low:.2f} to {high:.2f})"
    )
    values = {"rounds": count, "shortest": low, "longest": high}
    checked.tracking.record(checked.path.with_suffix(""), values, files=[checked.path])
