"""`expected_length=` of `tempera-eval`: finds the value of the method's free parameter, or reads
the one that the run directory records.
"""

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tempera.config import build
from tempera.config.instantiate import check_value, check_values, instantiate, takes
from tempera.config.tuned import option_name
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Rule
from tempera.errors import TemperaError
from tempera.evaluation.calibration import (
    Statistics,
    conditions,
    load_statistics,
    record,
    save_statistics,
)
from tempera.evaluation.length_search import (
    FreeParameter,
    LengthOf,
    LengthSearch,
    MatchedLength,
    Measurements,
    accepted_length,
    predicted_length,
    search,
    search_with_pilot,
)
from tempera.evaluation.pipeline import Method
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import reachable_by_price
from tempera.rules.standard import Relaxed
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_json

MATCHED = "matched"
"""Where run.json and metrics.json (under `about`) record what was found."""


def check_options(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise TemperaError for wrong options of a search, a length that is not possible, or a method
    without a free parameter or with one that the command line sets.
    """
    check_values(cfg.matching)
    if cfg.expected_length is None:
        return
    check_value(cfg, "expected_length", cfg.expected_length, float)
    if cfg.get("free_parameter") is None:
        raise TemperaError(
            "expected_length= has nothing to set in this method: leave it out, or choose a relaxed "
            "method, such as coolsd, uniform_rsd, optimal_rsd, lantern, lanternpp or gsd"
        )
    if not cfg.expected_length >= 1:
        raise TemperaError(
            f"expected_length={cfg.expected_length:g} is not possible: a round "
            "emits at least 1 token; give more"
        )
    most = build.build_tree(cfg).max_depth + 1
    if takes(cfg.drafter, "tree") and cfg.expected_length > most:
        raise TemperaError(
            f"expected_length={cfg.expected_length:g} is not possible: rounds of this "
            f"draft emit at most {most} tokens; give less, or a deeper draft"
        )
    check_values(cfg.free_parameter)
    option = cfg.free_parameter.option
    for given in overrides:
        if option_name(given) == option:
            raise TemperaError(
                f"{given} does not go with expected_length=, which finds {option}: leave one out"
            )


def check_prompts(cfg: DictConfig, prompts: Sequence[Prompt]) -> None:
    """Raise TemperaError if evaluation and calibration share prompts."""
    if cfg.expected_length is None:
        return
    shared = {prompt.id for prompt in prompts} & {prompt.id for prompt in _prompts(cfg)}
    if shared:
        raise TemperaError(
            f"the prompts that calibrate expected_length= include {len(shared)} of this "
            "evaluation's: skip those with matching.offset="
        )


def matched(
    cfg: DictConfig, target: Any, directory: Path, processes: Processes
) -> tuple[DictConfig, dict[str, Any]]:
    """The configuration with the free parameter set, and what to record about it in run.json; the
    configuration itself, and nothing, if no length is wanted.

    Args:
        cfg: the configuration.
        target: the target, made fast for decoding.
        directory: the run directory, whose recorded value is used again.
        processes: of the run; the main one searches.

    Raises:
        TemperaError: the length is out of reach, or the directory's value was found under other
            conditions.
    """
    if cfg.expected_length is None:
        return cfg, {}
    parameter: FreeParameter = instantiate(cfg.free_parameter)
    text = "null"
    if processes.is_main:
        finder = _Finder(cfg, target, parameter)
        known = _recorded(directory, finder.digest)
        text = json.dumps(known or finder.notes(finder.found()))
    notes: dict[str, Any] = json.loads(processes.from_main(text))
    if processes.is_main:
        print(
            f"expected_length={cfg.expected_length:g}: {notes['option']}={notes['value']:g} "
            f"accepts {notes['length']:.3f} tokens a round on {notes['prompts']} calibration "
            "prompts"
        )
    return _with(cfg, notes["option"], notes["value"]), {MATCHED: notes}


def _recorded(directory: Path, digest: str) -> dict[str, Any] | None:
    """What run.json records; None in a new directory."""
    path = directory / "run.json"
    if not path.is_file():
        return None
    known = read_json(path).get(MATCHED)
    if not isinstance(known, dict) or known.get("search") != digest:
        raise TemperaError(
            f"{directory} holds a run whose length was not matched, or under other conditions: "
            "choose another directory (hydra.run.dir=DIR), or the same settings to continue it"
        )
    return known


class _Finder:
    """A search, and the identity of everything that its result depends on."""

    def __init__(self, cfg: DictConfig, target: Any, parameter: FreeParameter) -> None:
        self.cfg, self.target = cfg, target
        self.options: LengthSearch = instantiate(cfg.matching)
        self.parameter = parameter
        self.device = build.parse_device(cfg.device)
        self.drafter: Any = build.build_drafter(cfg, target)
        self.prompts = _prompts(cfg)
        self.pilot = self.prompts[: self.options.pilot]
        self.statistics: Statistics | None = None
        if self.parameter.scale == "length":
            self.statistics = self._recorded_rounds(Path(str(cfg.statistics)))
            low, high = self._reach(self.statistics)
            self.parameter = replace(self.parameter, least=low, most=high)
        assert self.parameter.least is not None and self.parameter.most is not None
        first = self.parameter.between(self.parameter.least, self.parameter.most, 0.5)
        self.reference = self.rule(first)
        wanted = {"wanted": float(cfg.expected_length), "tolerance": self.options.tolerance}
        self.digest = _digest(self._identity(self.prompts) | wanted)

    def rule(self, value: float) -> Rule:
        """The method's rule at a value of the parameter."""
        cfg = _with(self.cfg, self.parameter.option, value)
        return build.build_rule(cfg, self.drafter.depth if "schedule" in cfg else 0)

    def found(self) -> MatchedLength:
        """Search, with a pilot if nothing else predicts lengths."""
        wanted, prediction = float(self.cfg.expected_length), self._prediction()
        whole, limits = self._lengths(self.prompts), (self.options.tolerance, self.options.trials)
        if prediction is None and len(self.pilot) < len(self.prompts):
            # the standard error of few prompts is larger by this factor
            loose = self.options.tolerance * math.sqrt(len(self.prompts) / len(self.pilot))
            few = self._lengths(self.pilot)
            return search_with_pilot(wanted, self.parameter, few, whole, loose, *limits)
        return search(wanted, self.parameter, whole, prediction, *limits)

    def notes(self, match: MatchedLength) -> dict[str, Any]:
        """What run.json records."""
        return {
            **asdict(match),
            "trials": [list(one) for one in match.trials],
            "prompts": len(self.prompts),
            "tolerance": self.options.tolerance,
            "search": self.digest,
        }

    def _lengths(self, prompts: Sequence[Prompt]) -> Measurements:
        """The accepted length on these prompts, by value."""

        def measured(value: float) -> float:
            return accepted_length(
                self.target,
                Method(self.drafter, self.rule(value)),
                prompts,
                self.options.seed,
                self.device,
                self.cfg.batch_size,
            )

        place = self.options.directory / _digest(self._identity(prompts))
        return Measurements(place, measured)

    def _prediction(self) -> LengthOf | None:
        """The predicted length by value, if recorded rounds give it."""
        if self.parameter.scale == "length":
            return float
        tree = self.drafter.tree
        if not isinstance(self.reference, Relaxed | Priced) or tree is None or not tree.nodes:
            return None
        known = self._identity(self.pilot)
        parts = ("target", "draft", "tree", "sampling", "prompts", "seed", "dtype")
        name = _digest({part: known[part] for part in parts})
        found = self._recorded_rounds(self.options.directory / f"rounds-{name}.safetensors")
        if predicted_length(self.reference, found) is None:
            return None

        def predict(value: float) -> float:
            length = predicted_length(self.rule(value), found)
            assert length is not None
            return length

        return predict

    def _recorded_rounds(self, path: Path) -> Statistics:
        """The statistics in a file; measured first if there is none."""
        if not path.is_file():
            found = record(
                self.target,
                self.drafter,
                self.pilot,
                self.options.seed,
                self.device,
                self.cfg.batch_size,
            )
            solved = self.parameter.scale == "length"
            save_statistics(
                path, found, conditions(**self.cfg.schedule.measured_with) if solved else {}
            )
        return load_statistics(path)[0]

    def _reach(self, found: Statistics) -> tuple[float, float]:
        """The lengths that a schedule can be solved for."""
        rounds, depth = found.rounds, self.drafter.depth
        if rounds.tree.is_chain and depth <= rounds.tree.nodes:
            rounds = rounds.first_depths(depth)
        return reachable_by_price(rounds)

    def _identity(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the accepted length of a value on these prompts depends on."""
        tree, options = self.drafter.tree, self.options
        drafter = OmegaConf.to_container(self.cfg.drafter, resolve=True)
        assert isinstance(drafter, dict)
        return {
            "target": self.target.identity,
            "draft": self.drafter.identity,
            "drafter": {name: drafter[name] for name in sorted(drafter) if name != "path"},
            "tree": None if tree is None else tree.parents.tolist(),
            "rule": repr(self.reference),
            "option": self.parameter.option,
            "sampling": repr(build.build_sampling(self.cfg)),
            "dtype": str(build.parse_dtype(self.cfg.dtype, self.device)),
            "prompts": [[prompt.id, prompt.text] for prompt in prompts],
            "seed": options.seed,
        }


def _prompts(cfg: DictConfig) -> list[Prompt]:
    """The calibration prompts."""
    other = copy.deepcopy(cfg)
    other.limit, other.offset = cfg.matching.prompts, cfg.matching.offset
    return list(instantiate(other.data))


def _with(cfg: DictConfig, option: str, value: float) -> DictConfig:
    """The configuration with another value of the free parameter."""
    other = copy.deepcopy(cfg)
    OmegaConf.update(other, option, value)
    return other


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
