"""`tempera-calibrate`: measure how the target scores a draft's proposals, for `schedule=calibrated`
and `schedule=optimal`.
"""

import shlex
from pathlib import Path

from omegaconf import DictConfig

from tempera.config.compose import option_name, typed
from tempera.config.instantiate import instantiate
from tempera.config.options import Role, role_of
from tempera.config.parts import Parts
from tempera.config.resolvers import drafter_of
from tempera.config.tracking import Tracking
from tempera.evaluation import calibration
from tempera.rules.optimal_prices import reachable_by_price
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> None:
    """Write the statistics, and print what they make possible."""
    what = f"`{command('calibrate')}` measures drafts of discrete tokens"
    parts = Parts.of(cfg, discrete=what)
    calibration.check_tree(parts.tree)
    parts.check_draft()
    path = Path(str(cfg.statistics))
    calibration.check_place(path)
    tracking = Tracking.of(cfg, "calibrate")
    measured_with = calibration.conditions(**parts.measured_with)
    prompts = list(instantiate(cfg.data))
    target = parts.discrete_target()
    target.pack()
    drafter = parts.drafter(target)
    found = calibration.record(
        target, drafter, prompts, cfg.seed, parts.place.device, parts.batch_size
    )
    calibration.save_statistics(path, found, measured_with)
    rounds = found.rounds
    low, high = reachable_by_price(rounds)
    count = len(rounds.weights)
    print(f"{count} rounds of {rounds.tree.nodes} drafted tokens: {path}")
    print(
        f"next: {command('eval')} {_next(cfg, (low + high) / 2)}   "
        f"(possible: {low:.2f} to {high:.2f})"
    )
    values = {"rounds": count, "shortest": low, "longest": high}
    tracking.record(path.with_suffix(""), values, files=[path])


def _next(cfg: DictConfig, length: float) -> str:
    """The options of an evaluation of a length that uses the statistics."""
    kept = [
        option
        for option in typed(cfg)
        if (name := option_name(option)) not in ("method", "drafter")
        and Role.OWN not in role_of(name, "calibrate")
    ]
    drafter = drafter_of(cfg.drafter._target_)
    options = ["method=optimal_rsd", f"drafter={drafter}", "schedule=optimal", *kept]
    return shlex.join([*options, f"expected_length={length:.1f}"])
