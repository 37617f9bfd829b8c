"""evidence.md: what a speed-up costs on one machine, on one page that can be committed.

Beside it lie evidence.png, the same prompts under each method, and evidence.json, its numbers.
"""

import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tempera.errors import TemperaError
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import Run, labels
from tempera.reporting.report import sections_of
from tempera.reporting.tables import escaped, long, markdown_of
from tempera.runtime.files import write_json, write_text
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.installation import command

PICTURES = 6
"""Prompts in evidence.png, the first ones."""


class EvidencePage(Callback):
    """Write the page when a sweep ends, in its directory. Used in `hydra.callbacks`."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read all finished runs in the directory, including those of earlier sweeps."""
        directory = Path(str(config.hydra.sweep.dir))
        try:
            runs, damaged = collect(find_runs([directory])[0])
        except TemperaError:  # no run finished: the sweep has said why
            return
        for problem in damaged:
            print(f"left out: {problem}")
        print(f"evidence: {write(directory, runs)}")


def write(directory: Path, runs: Sequence[Run]) -> Path:
    """Write evidence.md, evidence.png and evidence.json, and return the first one's path."""
    sections = sections_of(runs)
    _draw(directory / "evidence.png", runs)
    write_json(directory / "evidence.json", long(sections).to_dict("records"))
    first = runs[0]
    parts = [
        f"# Evidence: {escaped(first.model or '')}",
        f"{first.images} prompts, decoded on {escaped(first.machine)}, begun "
        f"{first.started}, by tempera {first.version}. The command that ended last:",
        f"```sh\n{_command()}\n```",
        "![The same prompts under each method](evidence.png)",
    ]
    for section in sections:
        parts += [f"## {escaped(section.title)}", markdown_of(section)]
    path = directory / "evidence.md"
    write_text(path, "\n\n".join(parts) + "\n")
    return path


def _command() -> str:
    """The command line that this process was started with."""
    return f"{command('eval')} {shlex.join(sys.argv[1:])}"


def _draw(path: Path, runs: Sequence[Run]) -> None:
    from matplotlib.figure import Figure  # takes a second to import

    from tempera.reporting import figures

    prompts = dict(list(runs[0].texts.items())[:PICTURES])
    figure = Figure(
        figsize=(1.5 * len(prompts) + 1.8, 1.5 * len(runs) + 0.6), layout="constrained", dpi=120
    )
    panels = figure.subplots(len(runs), len(prompts), squeeze=False)
    for panel, text in zip(panels[0], prompts.values(), strict=True):
        panel.set_title(textwrap.fill(text, 22, max_lines=3, placeholder="…"), size=7)
    for row, run, label in zip(panels, runs, labels(runs), strict=True):
        for panel, name in zip(row, prompts, strict=True):
            picture = read_picture(picture_path(Path(run.directory), name), run.made_by)
            panel.imshow(picture.transpose(1, 2, 0))
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        length = run.value("accepted_length")
        tokens = "" if math.isnan(length) else f"\n{length:.2f} tokens per round"
        row[0].set_ylabel(textwrap.fill(label, 20) + tokens, size=7, rotation=0, ha="right")
    figures.save(path, figure)
