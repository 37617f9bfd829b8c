"""A Hydra sweeper for tables: `hydra.sweeper.cases` is a list of command lines, and a sweep runs
every point of every one of them.

Hydra's own sweeper runs one product of options, but the rows of a paper's table are different
methods, each with options of its own:

    defaults:
      - override /hydra/sweeper: cases
    hydra:
      sweeper:
        cases:
          - method=ar
          - method=coolsd delta=1.1,2

or `hydra.sweeper.table` names a table of the papers, whose rows are the cases.

What stands on the command line is added to every case, and wins where both give an option, but
`method=` chooses among the cases: those with another method are left out. All jobs go to the
launcher together. A job that fails does not stop the others; at the end those that failed are
listed with their commands.
"""

import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from tqdm import tqdm

if TYPE_CHECKING:
    from tempera.errors import TemperaError


@dataclass
class CasesConf:
    """`hydra.sweeper` under `override /hydra/sweeper: cases`; see Hydra's basic sweeper for the
    others.
    """

    _target_: str = "hydra_plugins.tempera_cases.CaseSweeper"
    cases: list[str] = field(default_factory=list)
    table: str | None = None
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


MOST = 2000
"""Jobs of a sweep: all are composed and checked before the first one runs."""


class CaseSweeper(BasicSweeper):
    """Hydra's basic sweeper, on each case in turn."""

    def __init__(
        self,
        cases: Sequence[str],
        table: str | None = None,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.cases, self.table = cases, table

    def sweep(self, arguments: list[str]) -> Any:
        """Hydra's sweep; after Ctrl-C, of jobs side by side too, it says which command goes on.

        Raises:
            TemperaError: some jobs failed; it lists them, after the others have run.
        """
        try:
            batches = super().sweep(arguments)
        except KeyboardInterrupt as problem:
            from tempera.config.cli import goes_on

            directory = str(self.config.hydra.sweep.dir) if self.config else "."
            raise KeyboardInterrupt(str(problem) or goes_on("hydra.sweep.dir", directory)) from None
        jobs = [job for batch in batches for job in batch]
        self._tell_failures(jobs)
        return batches

    def _tell_failures(self, jobs: Sequence[JobReturn]) -> None:
        """Show the results of the others, and raise TemperaError for jobs that failed."""
        from tempera.config.cli import Failed, command_line
        from tempera.errors import TemperaError
        from tempera.runtime.installation import FLAGS

        failed = [job for job in jobs if isinstance(job.return_value, Failed)]
        if not failed:
            return
        if self.hydra_context and self.config is not None and len(failed) < len(jobs):
            self.hydra_context.callbacks.on_multirun_end(config=self.config, config_name=None)
        for job in failed:
            assert job.hydra_cfg is not None
            directory = str(job.hydra_cfg.hydra.runtime.output_dir)
            command = command_line(
                [*FLAGS.get(), *(job.overrides or ())], "hydra.run.dir", directory
            )
            print(f"failed: {command}\n  {job.return_value.sentence}", file=sys.stderr)
        raise TemperaError(f"{len(failed)} of {len(jobs)} jobs failed: see above")

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing is left to do: `split_arguments` has composed and checked all jobs."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs of all cases, with `overrides` after each case's own, in batches of at most
        `max_batch_size`.
        """
        cases = self._cases(overrides)
        parsed = [OverridesParser.create().parse_overrides(shlex.split(case)) for case in cases]
        if cases:
            parsed, overrides = _with_methods(parsed, overrides)
        jobs: list[list[str]] = []
        for own in parsed or [[]]:
            _check_number([*own, *overrides])
            given = {override.get_key_element() for override in overrides} - {"model"}
            remaining = [override for override in own if override.get_key_element() not in given]
            named = {override.get_key_element() for override in remaining}
            left = [one for one in overrides if one.get_key_element() not in named]
            jobs += BasicSweeper.split_arguments([*remaining, *left], None)[0]
        distinct = self._checked([job for at, job in enumerate(jobs) if job not in jobs[:at]])
        return list(BasicSweeper.split_overrides_to_chunks(distinct, max_batch_size))

    def _checked(self, jobs: list[list[str]]) -> list[list[str]]:
        """The jobs, if all are possible; otherwise refuse the sweep, before the first one runs."""
        if self.hydra_context is None or self.config is None:
            return jobs
        from tempera.commands.scripts import check, check_files
        from tempera.config.compose import in_one_sentence
        from tempera.config.instantiate import part
        from tempera.config.old_names import check_names
        from tempera.config.parts import check_draft, check_job
        from tempera.errors import TemperaError

        wrong: dict[str, TemperaError] = {}
        lacking: dict[str, TemperaError] = {}
        cfgs = []
        script = str(self.config.hydra.job.config_name)
        shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
        for job in tqdm(jobs, desc="checking", leave=False, disable=len(jobs) < 20):
            problems = wrong
            try:
                with in_one_sentence(script, job):
                    cfg = self.hydra_context.config_loader.load_sweep_config(self.config, job)
                check_names(script, cfg)
                _check_same_sweep(self.config, cfg)
                check_job(cfg)
                with _configured(cfg):
                    check(script, cfg)
                problems = lacking
                if "_target_" in (cfg.get("drafter") or {}) and not cfg.get("dry_run"):
                    check_draft(part(cfg.drafter), cfg.model.name)
                cfgs.append(cfg)
            except TemperaError as problem:
                own = [option for option in job if option not in shared]
                problems[" ".join(own)] = problem
        if problems := wrong or lacking:
            raise _refused(problems, len(jobs))
        check_files(script, cfgs)
        return jobs

    def _cases(self, overrides: list[Override]) -> Sequence[str]:
        """The cases; those of a paper's table depend on the model."""
        if self.table is None:
            return self.cases
        from tempera.reporting.paper_results import cases

        given = [one for one in overrides if one.get_key_element() == "model"]
        if not given:
            return cases(self.table, self.config.model.name if self.config else "shapes")
        names = list(given[0].sweep_string_iterator()) if given[0].is_sweep_override() else None
        if names is None:
            return cases(self.table, str(given[0].value()))
        return [f"{case} model={name}" for name in names for case in cases(self.table, name)]


@contextmanager
def _configured(cfg: DictConfig) -> Iterator[None]:
    """In the `with` block Hydra's own options are those of a job, which has no directory yet."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    with flag_override(cfg, ["struct", "readonly"], False):
        cfg.hydra.runtime.output_dir = cfg.hydra.sweep.dir
    hydra.set_config(cfg)
    try:
        yield
    finally:
        hydra.cfg = before


def _check_same_sweep(sweep: DictConfig, job: DictConfig) -> None:
    """Raise TemperaError for a job whose options say how a sweep runs, in another way than this
    sweep: Hydra has chosen sweeper, launcher and callbacks before it composes a job.
    """
    from tempera.errors import TemperaError

    for part in ("sweeper", "launcher", "callbacks"):
        given, own = (
            OmegaConf.to_container(cfg.hydra[part], resolve=False) for cfg in (sweep, job)
        )
        if own != given:
            raise TemperaError(
                f"the jobs of a sweep share one hydra.{part}, but these options give several: "
                "give one such preset or launcher per command"
            )


def _refused(problems: "Mapping[str, TemperaError]", number: int) -> "TemperaError":
    """Why none of a number of jobs begins, given what is wrong with some, each reason once."""
    from tempera.config.messages import sentence
    from tempera.errors import TemperaError

    jobs: dict[str, list[str]] = {}
    for job, problem in problems.items():
        jobs.setdefault(str(sentence(problem, "", [])), []).append(job)
    reasons = [
        f"{first}{f' and {len(others)} more' if others else ''}: {reason}"
        for reason, (first, *others) in jobs.items()
    ]
    lacking = [isinstance(problem.__cause__, HydraException) for problem in problems.values()]
    if len(problems) == number and (len(jobs) == 1 or all(lacking)):
        return next(iter(problems.values()))
    if any(lacking):
        reasons.append(
            "if an option does not fit all jobs, list the jobs as cases, as in "
            """'hydra.sweeper.cases=["method=ar","method=coolsd delta=2"]'"""
        )
    return TemperaError(
        f"{len(problems)} of {number} jobs cannot run, so none was started:", details=reasons
    )


def _values(override: Override) -> list[str]:
    """The values of an option, at most one more than a sweep may have."""
    if override.is_sweep_override():
        return list(itertools.islice(override.sweep_string_iterator(), MOST + 1))
    return [override.get_value_element_as_str()]


def _with_methods(
    cases: list[list[Override]], overrides: list[Override]
) -> tuple[list[list[Override]], list[Override]]:
    """The cases of the methods that the command line gives, and its other options. Of a case with
    several methods these are left; cases without a method take it as any other option.
    """
    from tempera.errors import TemperaError

    given = [override for override in overrides if override.get_key_element() == "method"]
    if not given:
        return cases, overrides
    wanted = _values(given[-1])
    remaining: list[list[Override]] = []
    found: list[str] = []
    for case in cases:
        for index, option in enumerate(case):
            if option.get_key_element() != "method":
                continue
            methods = _values(option)
            found += methods
            if left := [method for method in methods if method in wanted]:
                narrowed = OverridesParser.create().parse_override(f"method={','.join(left)}")
                remaining.append([*case[:index], narrowed, *case[index + 1 :]])
    if not found:
        return cases, overrides
    if not remaining:
        raise TemperaError(
            f"no case of this preset has method={','.join(wanted)}: give one of "
            f"{', '.join(dict.fromkeys(found))}, or leave experiment= out",
            option="method",
        )
    return remaining, [override for override in overrides if override.get_key_element() != "method"]


def _check_number(overrides: list[Override]) -> None:
    """Raise TemperaError for a sweep of too many jobs."""
    from tempera.errors import TemperaError

    number = math.prod(len(_values(override)) for override in overrides)
    if number > MOST:
        raise TemperaError(f"a sweep has at most {MOST:,} jobs: give fewer values")


ConfigStore.instance().store(
    group="hydra/sweeper", name="cases", node=CasesConf, provider="tempera"
)
