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
from tempera.runtime.image_files import Picture, picture_path, read_picture
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
    from tempera.reporting import figures  # matplotlib takes a second to import

    prompts = list(runs[0].texts.items())[:PICTURES]
    rows = {}
    for run, label in zip(runs, labels(runs), strict=True):
        length = run.value("accepted_length")
        tokens = "" if math.isnan(length) else f"\n{length:.2f} tokens per round"
        rows[textwrap.fill(label, 20) + tokens] = [_picture(run, *prompt) for prompt in prompts]
    figures.comparison(path, [text for _, text in prompts], rows)


def _picture(run: Run, name: str, text: str) -> Picture | None:
    """A run's picture of a prompt; None if it drew another text under this id, or none."""
    if run.texts.get(name) != text:
        return None
    return read_picture(picture_path(Path(run.directory), name), run.made_by)
