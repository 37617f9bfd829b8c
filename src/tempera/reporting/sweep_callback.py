"""Hydra's callback of a sweep that reproduces a paper's table: the paper's figures beside ours."""

import shlex
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tempera.reporting.paper_tables import beside, show
from tempera.runtime.installation import command


class BesidePaper(Callback):
    """At the end of a sweep with a `paper`, print the paper's figures beside those of the sweep's
    directory. For hydra.callbacks.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read all finished runs in the directory, those of earlier sweeps as well."""
        if not config.get("paper"):
            return
        from tempera.reporting.collect import collect, find_runs

        rows, damaged = collect(find_runs([config.hydra.sweep.dir])[0])
        show(beside(rows))
        for problem in damaged:
            print(f"left out: {problem}")
        print(f"pictures and plots: {command('report')} {shlex.quote(config.hydra.sweep.dir)}")
