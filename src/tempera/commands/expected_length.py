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
from tempera.config.instantiate import check_values, instantiate, takes
from tempera.config.tuned import option_name
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Rule
from tempera.errors import TemperaError
from tempera.evaluation import calibration, length_search
from tempera.evaluation.length_search import FreeParameter, LengthOf, LengthSearch, MatchedLength
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
    if cfg.get("free_parameter") is None:
        raise TemperaError(
            "expected_length= has nothing to set in this method: leave it out, or choose a relaxed "
            "method, such as coolsd, uniform_rsd, optimal_rsd, lantern, lanternpp or gsd"
        )
    most = build.build_tree(cfg).max_depth + 1 if takes(cfg.drafter, "tree") else math.inf
    if not 1 <= cfg.expected_length <= most:
        raise TemperaError(
            f"expected_length={cfg.expected_length:g} is not possible: a round of this draft emits "
            f"1 to {most} tokens"
        )
    check_values(cfg.free_parameter)
    option = cfg.free_parameter.option
    if given := [one for one in overrides if option_name(one) == option]:
        raise TemperaError(
            f"{given[0]} does not go with expected_length=, which finds {option}: leave one out"
        )


def check_prompts(cfg: DictConfig, prompts: Sequence[Prompt]) -> None:
    """Raise TemperaError if evaluation and calibration share prompts."""
    if cfg.expected_length is None:
        return
    if shared := {prompt.id for prompt in prompts} & {prompt.id for prompt in _prompts(cfg)}:
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
    text = json.dumps(_found(cfg, target, directory)) if processes.is_main else "null"
    notes: dict[str, Any] = json.loads(processes.from_main(text))
    if processes.is_main:
        print(
            f"expected_length={cfg.expected_length:g}: {notes['option']}={notes['value']:g} "
            f"accepts {notes['length']:.3f} tokens a round on {notes['prompts']} calibration "
            "prompts"
        )
    return _with(cfg, notes["option"], notes["value"]), {MATCHED: notes}


def _found(cfg: DictConfig, target: Any, directory: Path) -> dict[str, Any]:
    """What run.json records, searched for in a new directory."""
    options: LengthSearch = instantiate(cfg.matching)
    names = ("prompts", "offset", "seed", "tolerance")
    wanted = {"length": cfg.expected_length, **{name: getattr(options, name) for name in names}}
    path = directory / "run.json"
    if not path.is_file():
        finder = _Finder(cfg, target, options)
        return {**asdict(finder.search()), "prompts": len(finder.prompts), "search": wanted}
    known = read_json(path).get(MATCHED)
    if not isinstance(known, dict) or known.get("search") != wanted:
        raise TemperaError(
            f"{directory} holds a run whose length was not matched, or under other conditions: "
            "choose another directory (hydra.run.dir=DIR), or the same settings to continue it"
        )
    return known


class _Finder:
    """What a search needs, and the identity of everything that its result depends on."""

    def __init__(self, cfg: DictConfig, target: Any, options: LengthSearch) -> None:
        self.cfg, self.target, self.options = cfg, target, options
        self.parameter: FreeParameter = instantiate(cfg.free_parameter)
        self.device = build.parse_device(cfg.device)
        self.drafter: Any = build.build_drafter(cfg, target)
        self.prompts = _prompts(cfg)
        self.pilot = self.prompts[: self.options.pilot]
        self.solved = self.parameter.least is None  # the option is a predicted length itself
        if self.solved:
            rounds = self._recorded(Path(str(cfg.statistics))).rounds
            if rounds.tree.is_chain and self.drafter.depth <= rounds.tree.nodes:
                rounds = rounds.first_depths(self.drafter.depth)
            low, high = reachable_by_price(rounds)
            self.parameter = replace(self.parameter, least=low, most=high)
        assert self.parameter.least is not None and self.parameter.most is not None
        self.reference = self._rule(math.sqrt(self.parameter.least * self.parameter.most))

    def search(self) -> MatchedLength:
        """The match, with a pilot if nothing else predicts lengths."""
        wanted, predict = float(self.cfg.expected_length), self._prediction()
        whole = self._lengths(self.prompts)
        if predict is None and len(self.pilot) < len(self.prompts):
            # the standard error of few prompts is larger by this factor
            loose = self.options.tolerance * math.sqrt(len(self.prompts) / len(self.pilot))
            few = self._lengths(self.pilot)
            return length_search.search_with_pilot(
                wanted, self.parameter, self.options, whole, few, loose
            )
        return length_search.search(wanted, self.parameter, self.options, whole, predict)

    def identity(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the accepted length of a value on these prompts depends on."""
        tree, drafter = self.drafter.tree, OmegaConf.to_container(self.cfg.drafter, resolve=True)
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
            "seed": self.options.seed,
        }

    def _rule(self, value: float) -> Rule:
        """The method's rule at a value of the parameter."""
        cfg = _with(self.cfg, self.parameter.option, value)
        return build.build_rule(cfg, self.drafter.depth if "schedule" in cfg else 0)

    def _lengths(self, prompts: Sequence[Prompt]) -> LengthOf:
        """The accepted length on these prompts, by value."""

        def measured(value: float) -> float:
            method = Method(self.drafter, self._rule(value))
            where = self.options.seed, self.device, build.batch_size(self.cfg)
            return length_search.accepted_length(self.target, method, prompts, *where)

        return length_search.kept(
            self.options.directory / _digest(self.identity(prompts)), measured
        )

    def _prediction(self) -> LengthOf | None:
        """The predicted length by value: of a solved schedule, or of recorded rounds."""
        if self.solved:
            return float
        tree, rule = self.drafter.tree, self.reference
        known = isinstance(rule, Priced) or (isinstance(rule, Relaxed) and tree and tree.is_chain)
        if not known or tree is None or not tree.nodes:
            return None
        rounds = {**self.identity(self.pilot), "drafter": None, "rule": None, "option": None}
        found = self._recorded(self.options.directory / f"rounds-{_digest(rounds)}.safetensors")

        def predict(value: float) -> float:
            length = length_search.predicted_length(self._rule(value), found)
            assert length is not None
            return length

        return predict

    def _recorded(self, path: Path) -> calibration.Statistics:
        """The statistics in a file; measured first if there is none."""
        if not path.is_file():
            where = self.options.seed, self.device, build.batch_size(self.cfg)
            found = calibration.record(self.target, self.drafter, self.pilot, *where)
            notes = calibration.conditions(**self.cfg.schedule.measured_with) if self.solved else {}
            calibration.save_statistics(path, found, notes)
        return calibration.load_statistics(path)[0]


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
