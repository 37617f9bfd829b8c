"""A Hydra callback for sweeps that reproduce a paper's table: prints its numbers beside ours."""

import shlex
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tempera.reporting.paper_tables import beside, show
from tempera.runtime.installation import command


class BesidePaper(Callback):
    """After a sweep whose preset names a `paper`, print the paper's numbers beside those of the
    runs in the sweep's directory. Used in `hydra.callbacks`.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read all finished runs in the directory, including those of earlier sweeps."""
        if not config.get("paper"):
            return
        from tempera.reporting.collect import collect, find_runs

        rows, damaged = collect(find_runs([config.hydra.sweep.dir])[0])
        show(beside(rows))
        for problem in damaged:
            print(f"left out: {problem}")
        print(f"pictures and plots: {command('report')} {shlex.quote(config.hydra.sweep.dir)}")
