"""`tempera-calibrate`: measure how the target scores a draft's proposals, for `schedule=calibrated`
and `schedule=optimal`.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.compose import option_name, typed
from tempera.config.instantiate import instantiate
from tempera.config.options import Role, role_of
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
        shared: options of the user's that are an evaluation's, too.
    """

    path: Path
    measured_with: Mapping[str, Any]
    prompts: list[Prompt]
    tracking: Tracking
    drafter: str
    shared: Sequence[str] = ()


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
    measured_with = calibration.conditions(**build.measured_with(cfg))
    shared = [
        option
        for option in typed(cfg)
        if (name := option_name(option)) not in ("method", "drafter")
        and Role.OWN not in role_of(name, "calibrate")
    ]
    return Checked(path, measured_with, prompts, tracking, drafter, shared)


def _show(found: Statistics, checked: Checked) -> None:
    """Print what was measured and which lengths are possible, and send it to the tracker."""
    rounds = found.rounds
    low, high = reachable_by_price(rounds)
    count = len(rounds.weights)
    print(f"{count} rounds of {rounds.tree.nodes} drafted tokens: {checked.path}")
    options = ["method=optimal_rsd", f"drafter={checked.drafter}", "schedule=optimal"]
    options += [*checked.shared, f"expected_length={(low + high) / 2:.1f}"]
    print(f"next: {command('eval')} {shlex.join(options)}   (possible: {low:.2f} to {high:.2f})")
    values = {"rounds": count, "shortest": low, "longest": high}
    checked.tracking.record(checked.path.with_suffix(""), values, files=[checked.path])
