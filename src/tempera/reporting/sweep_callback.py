"""A Hydra callback: a sweep ends with the table of its runs."""

import shlex
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tempera.errors import TemperaError
from tempera.runtime.files import directories_with
from tempera.runtime.installation import command


class SweepTable(Callback):
    """Print the runs in a sweep's directory, and the paper's numbers beside them if the sweep's
    preset names a `paper`. Used in `hydra.callbacks`.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note what earlier sweeps left."""
        self.before = _results_in(config.hydra.sweep.dir)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read all finished runs in the directory, including those of earlier sweeps."""
        from tempera.reporting.baseline import compare
        from tempera.reporting.collect import collect, find_runs
        from tempera.reporting.finished_run import labels
        from tempera.reporting.paper_tables import paper_sections
        from tempera.reporting.report import cautions, verdict_section
        from tempera.reporting.tables import show, texts

        try:
            runs, _ = collect(find_runs([config.hydra.sweep.dir])[0])
        except TemperaError:  # no run finished: the sweep has said why
            return
        compare(runs)
        section = verdict_section(runs)
        show(texts(section, interval=False))
        print(section.text)
        for caution in cautions(runs):
            print(caution)
        files = _results_in(config.hydra.sweep.dir).items() & self.before.items()
        earlier = [run for run in runs if Path(run.directory) in dict(files)]
        if earlier:
            names = ", ".join(labels(runs, earlier))
            print(f"from earlier sweeps in this directory: {names}")
        for section in paper_sections(runs):
            show(texts(section), section.title)
            print("\n".join(section.notes))
        directory = shlex.quote(f"runs={config.hydra.sweep.dir}")
        print(f"pictures and plots: {command('report')} {directory}")


def _results_in(directory: str) -> dict[Path, int]:
    """The directories of finished runs, each with the number of its file, which a run that ends
    replaces, whatever the clock says.
    """
    runs = directories_with(Path(directory), "metrics.json")
    return {run: (run / "metrics.json").stat().st_ino for run in runs}
