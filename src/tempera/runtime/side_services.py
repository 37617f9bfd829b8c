"""Trackers, uploads, reports and pictures serve a run, and never end it: what they are to show is
on disk before they begin.
"""

import logging
from contextlib import AbstractContextManager
from types import TracebackType

from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.files import reason

log = logging.getLogger("tempera")


class side_service(AbstractContextManager[None, bool]):
    """Whatever fails inside the `with` block is told in one sentence, and its traceback goes to the
    run's log file.

    Args:
        failed: what is not done if it fails, and what to do, with `{why}` for the reason.
    """

    def __init__(self, failed: str) -> None:
        self.failed = failed

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(problem, Exception):
            return False
        log.error("a side service failed", exc_info=problem)
        why = str(problem) if isinstance(problem, TemperaError) else reason(problem)
        print(self.failed.replace("{why}", why.rstrip(".")))
        return True
