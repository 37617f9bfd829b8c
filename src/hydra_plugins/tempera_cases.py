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

What stands on the command line is added to every case, and wins where both give an option. All jobs
go to the launcher together.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


@dataclass
class CasesConf:
    """`hydra.sweeper` under `override /hydra/sweeper: cases`; see Hydra's basic sweeper for the
    others.
    """

    _target_: str = "hydra_plugins.tempera_cases.CaseSweeper"
    cases: list[str] = field(default_factory=list)
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


class CaseSweeper(BasicSweeper):
    """Hydra's basic sweeper, on each case in turn."""

    def __init__(
        self,
        cases: Sequence[str],
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.cases = cases

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs of all cases, with `overrides` after each case's own, in batches of at most
        `max_batch_size`.
        """
        jobs = []
        for case in self.cases or [""]:
            own = OverridesParser.create().parse_overrides(shlex.split(case))
            given = {override.get_key_element() for override in overrides}
            kept = [override for override in own if override.get_key_element() not in given]
            jobs += BasicSweeper.split_arguments([*kept, *overrides], None)[0]
        distinct = [job for place, job in enumerate(jobs) if job not in jobs[:place]]
        return list(BasicSweeper.split_overrides_to_chunks(distinct, max_batch_size))


ConfigStore.instance().store(
    group="hydra/sweeper", name="cases", node=CasesConf, provider="tempera"
)
