"""`expected_length=` of `tempera-eval`: finds the value of the method's free parameter, or reads
the one that the run directory records.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.config import build
from tempera.config.build import AnyTarget
from tempera.config.compose import option_name, with_options
from tempera.config.instantiate import instantiate, part
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Rule, Target
from tempera.errors import TemperaError
from tempera.evaluation import calibration, length_search
from tempera.evaluation.length_search import FreeParameter, LengthSearch
from tempera.evaluation.pipeline import Method
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_json

MATCHED = "matched"
"""Where run.json and metrics.json (under `about`) record what was found."""
RECORDED = 16
"""Calibration prompts that measure the draft for a schedule that is solved for a length."""


@dataclass(frozen=True)
class Wanted:
    """A length that a method may be able to have.

    Attributes:
        length: tokens per round.
        parameter: what is varied.
        search: how it is searched for.
    """

    length: float
    parameter: FreeParameter
    search: LengthSearch

    @property
    def recorded(self) -> dict[str, Any]:
        """What must be the same for a value to be used again."""
        return {"length": self.length, **asdict(self.search)}


def check_options(cfg: DictConfig, overrides: Sequence[str]) -> Wanted | None:
    """What `expected_length=` wants; None if it is not given.

    Raises:
        TemperaError: an option of the search is wrong, the length is not possible, or the method
            has no free parameter or one that the command line sets.
    """
    if cfg.expected_length is None:
        idle = [option for option in overrides if option.startswith("matching.")]
        if idle and not _in_a_sweep():
            raise TemperaError(
                f"{idle[0]} is for the search of expected_length=, which is not given: leave it out"
            )
        return None
    search: LengthSearch = instantiate(cfg.matching)
    if cfg.get("free_parameter") is None:
        raise TemperaError(
            "expected_length= has nothing to set in this method: leave it out, or choose a relaxed "
            "method, such as coolsd, uniform_rsd, optimal_rsd, lantern, lanternpp or gsd"
        )
    has_tree = part(cfg.drafter).takes("tree")
    most = build.build_tree(cfg).max_depth + 1 if has_tree else math.inf
    if not 1 <= cfg.expected_length <= most:
        raise TemperaError(
            f"expected_length={cfg.expected_length:g} is not possible: a round of this draft emits "
            f"1 to {most} tokens"
        )
    parameter: FreeParameter = instantiate(cfg.free_parameter)
    setting = [option for option in overrides if option_name(option) == parameter.option]
    if setting:
        raise TemperaError(
            f"{setting[0]} does not go with expected_length=, which finds {parameter.option}: "
            "leave one out"
        )
    return Wanted(float(cfg.expected_length), parameter, search)


def _in_a_sweep() -> bool:
    """Whether this is a job of a sweep, whose options may be for others."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_prompts(cfg: DictConfig, prompts: Sequence[Prompt]) -> None:
    """Raise TemperaError if evaluation and calibration share prompts."""
    if shared := {prompt.id for prompt in prompts} & {prompt.id for prompt in _prompts(cfg)}:
        raise TemperaError(
            f"the prompts that calibrate expected_length= include {len(shared)} of this "
            "evaluation's: skip those with matching.offset="
        )


def matched(
    cfg: DictConfig,
    wanted: Wanted,
    target: AnyTarget,
    device: torch.device,
    directory: Path,
    processes: Processes,
) -> tuple[DictConfig, dict[str, Any]]:
    """The configuration with the free parameter set, and what to record about it in run.json.

    Args:
        cfg: the configuration.
        wanted: the length.
        target: the target, made fast for decoding.
        device: of the target.
        directory: the run directory, whose recorded value is used again.
        processes: of the run; the main one searches.

    Raises:
        TemperaError: the length is out of reach, or the directory's value was found under other
            conditions.
    """
    text = "null"
    if processes.is_main:
        text = json.dumps(_found(cfg, wanted, target, device, directory))
    notes: dict[str, Any] = json.loads(processes.from_main(text))
    if processes.is_main:
        print(
            f"expected_length={wanted.length:g}: {notes['option']}={notes['value']:g} "
            f"accepts {notes['length']:.3f} tokens per round on {notes['prompts']} calibration "
            "prompts"
        )
    return with_options(cfg, {notes["option"]: notes["value"]}), {MATCHED: notes}


def _found(
    cfg: DictConfig, wanted: Wanted, target: AnyTarget, device: torch.device, directory: Path
) -> dict[str, Any]:
    """What run.json records, searched for in a new directory."""
    path = directory / "run.json"
    if not path.is_file():
        return {**_searched(cfg, wanted, target, device), "search": wanted.recorded}
    recorded = read_json(path).get(MATCHED)
    if not isinstance(recorded, dict) or recorded.get("search") != wanted.recorded:
        raise TemperaError(
            f"{directory} holds a run whose length was not matched, or under other conditions: "
            "choose another directory (hydra.run.dir=DIR), or the same settings to continue it"
        )
    return recorded


def _searched(
    cfg: DictConfig, wanted: Wanted, target: AnyTarget, device: torch.device
) -> dict[str, Any]:
    """The value of the free parameter, with its length on the calibration prompts."""
    parameter = wanted.parameter
    prompts = _prompts(cfg)
    batch_size = build.batch_size(cfg)
    drafter = build.build_drafter(cfg, target)
    seed = wanted.search.seed

    def measure(value: float) -> float:
        rule = build.build_rule(with_options(cfg, {parameter.option: value}))
        method = Method(drafter, cast(Rule, rule))
        setting = f"{parameter.option}={value:g}"
        return length_search.accepted_length(
            target, method, prompts, seed, device, batch_size, setting
        )

    if parameter.least is None or parameter.most is None:
        path = Path(str(cfg.statistics))
        if not path.is_file():
            found = calibration.record(
                cast(Target, target), drafter, prompts[:RECORDED], seed, device, batch_size
            )
            notes = calibration.conditions(**build.measured_with(cfg))
            calibration.save_statistics(path, found, notes)
        statistics = calibration.load_statistics(path)[0].first_depths(drafter.depth)
        low, high = statistics.reach(cfg.get("ceiling"))
        ends = math.ceil(1000 * low) / 1000, math.floor(1000 * high) / 1000
    else:
        ends = parameter.least, parameter.most
    value, length = length_search.search(
        wanted.length, parameter.option, ends, wanted.search.tolerance, measure
    )
    return {"option": parameter.option, "value": value, "length": length, "prompts": len(prompts)}


def _prompts(cfg: DictConfig) -> list[Prompt]:
    """The calibration prompts."""
    other = with_options(cfg, {"limit": cfg.matching.prompts, "offset": cfg.matching.offset})
    return list(instantiate(other.data))
