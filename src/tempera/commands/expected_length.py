"""`expected_length=` of `tempera-eval`: finds the value of the method's free parameter, or reads
the one that the run directory records.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.config.compose import option_name, typed
from tempera.config.instantiate import Part, instantiate, part
from tempera.config.parts import AnyTarget, Parts
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Rule, Target
from tempera.decoding.trees import Tree
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
        data: makes the calibration prompts.
    """

    length: float
    parameter: FreeParameter
    search: LengthSearch
    data: Part[list[Prompt]]

    @classmethod
    def of(cls, cfg: DictConfig) -> "Wanted | None":
        """What `expected_length=` wants; None if it is not given.

        Raises:
            TemperaError: an option of the search is wrong, or there is no search; the length is not
                possible, or the method has no free parameter or one that the command line sets.
        """
        search: LengthSearch = instantiate(cfg.matching)
        if cfg.expected_length is None:
            _check_idle(typed(cfg))
            return None
        if cfg.get("free_parameter") is None:
            raise TemperaError(
                "this method has no parameter that expected_length= could set: leave it out, "
                "choose a relaxed method, such as coolsd, uniform_rsd, optimal_rsd, lantern, "
                "lanternpp or gsd, or set `free_parameter` for a rule of your own"
            )
        has_tree = part(cfg.drafter).takes("tree")
        tree: Tree | None = instantiate(cfg.tree) if has_tree and "tree" in cfg else None
        most = tree.max_depth + 1 if tree else math.inf
        if not 1 <= cfg.expected_length <= most:
            raise TemperaError(
                f"expected_length={cfg.expected_length:g} is not valid: a round of this draft "
                f"emits 1 to {most} tokens"
            )
        parameter: FreeParameter = instantiate(cfg.free_parameter)
        setting = [option for option in typed(cfg) if option_name(option) == parameter.option]
        if setting:
            raise TemperaError(
                f"{setting[0]} cannot be combined with expected_length=, which finds "
                f"{parameter.option}: leave one of them out"
            )
        data: Part[list[Prompt]] = part(cfg.data)
        amounts = {"limit": search.prompts, "offset": search.offset}
        data = data.having(**{name: amounts[name] for name in amounts if name in data.options})
        return cls(float(cfg.expected_length), parameter, search, data)

    @property
    def recorded(self) -> dict[str, Any]:
        """What must be the same for a value to be used again."""
        return {"length": self.length, **asdict(self.search)}

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemperaError if evaluation and calibration share prompts."""
        if shared := {prompt.id for prompt in prompts} & {one.id for one in self.data.make()}:
            raise TemperaError(
                f"{len(shared)} calibration prompts of expected_length= are also in this "
                "evaluation: give a matching.offset= that skips them"
            )

    def found(
        self, parts: Parts, target: AnyTarget, directory: Path, processes: Processes
    ) -> dict[str, Any]:
        """The `option`, its `value`, and the `length` on how many calibration `prompts`: what
        run.json records.

        Args:
            parts: model and method.
            target: the target, made fast for decoding.
            directory: the run directory, whose recorded value is used again.
            processes: of the run; the main one searches.

        Raises:
            TemperaError: the length is out of reach, or the directory's value was found under other
                conditions.
        """
        notes: dict[str, Any] = {}
        if processes.is_main:
            notes = self._recorded_or_searched(parts, target, directory)
        notes = processes.from_main(notes)
        if processes.is_main:
            print(
                f"expected_length={self.length:g}: {notes['option']}={notes['value']:g} accepts "
                f"{notes['length']:.3f} tokens per round on {notes['prompts']} calibration prompts"
            )
        return notes

    def _recorded_or_searched(
        self, parts: Parts, target: AnyTarget, directory: Path
    ) -> dict[str, Any]:
        """What run.json records, searched for in a new directory."""
        path = directory / "run.json"
        if not path.is_file():
            return {**self._searched(parts, target), "search": self.recorded}
        recorded = read_json(path).get(MATCHED)
        if not isinstance(recorded, dict) or recorded.get("search") != self.recorded:
            raise TemperaError(
                f"{directory} holds a run without expected_length=, or with other settings: "
                "choose another directory (hydra.run.dir=DIR), or give the same settings to "
                "resume it"
            )
        return recorded

    def _searched(self, parts: Parts, target: AnyTarget) -> dict[str, Any]:
        """The value of the free parameter, with its length on the calibration prompts."""
        option = self.parameter.option
        prompts = list(self.data.make())
        drafter = parts.drafter(target)
        device = parts.placement.device
        seed = self.search.seed

        def measure(value: float) -> float:
            rule = parts.with_option(option, value).rule()
            method = Method(drafter, cast(Rule, rule))
            return length_search.accepted_length(
                target, method, prompts, seed, device, parts.batch_size, f"{option}={value:g}"
            )

        if self.parameter.least is None or self.parameter.most is None:
            assert parts.schedule_part is not None
            solver = parts.schedule_part.options
            path = Path(str(solver["statistics"]))
            tree = calibration.checked_tree(drafter.tree)
            if not calibration.is_measured(path, tree, parts.measured_with):
                statistics = calibration.record(
                    cast(Target, target),
                    drafter,
                    prompts[:RECORDED],
                    seed,
                    device,
                    parts.batch_size,
                )
                notes = calibration.conditions(**parts.measured_with)
                calibration.save_statistics(path, statistics, notes)
            statistics = calibration.load_statistics(path)[0].first_depths(drafter.depth)
            low, high = statistics.reach(solver.get("ceiling"))
            ends = math.ceil(1000 * low) / 1000, math.floor(1000 * high) / 1000
        else:
            ends = self.parameter.least, self.parameter.most
        value, length = length_search.search(
            self.length, option, ends, self.search.tolerance, measure
        )
        return {"option": option, "value": value, "length": length, "prompts": len(prompts)}


def _check_idle(options: Sequence[str]) -> None:
    """Raise TemperaError for options of a search that is not made; in a sweep they may be for other
    jobs.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    if idle := [option for option in options if option.startswith("matching.")]:
        raise TemperaError(
            f"{idle[0]} only affects the search for expected_length=, which is not given: leave "
            "it out"
        )
