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
from tempera.reporting.paper_tables import paper_sections
from tempera.reporting.report import results_section
from tempera.reporting.tables import Cell, Section, escaped, long, markdown, table, texts
from tempera.runtime.files import write_json, write_text
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.installation import command

PICTURES = 6
"""Prompts in evidence.png, the first ones."""
GIB = 2**30


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
    sections = [speed_section(runs), results_section(runs), *paper_sections(runs)]
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
        parts += [f"## {escaped(section.title)}", escaped(section.text), markdown(texts(section))]
        parts += [f"> {escaped(note)}" for note in section.notes]
    path = directory / "evidence.md"
    write_text(path, "\n\n".join(filter(None, parts)) + "\n")
    return path


def speed_section(runs: Sequence[Run]) -> Section:
    """Tokens per round, seconds of an image at batch 1, and memory."""
    columns: dict[str, list[Cell]] = {
        "tokens per round": [run.metrics.get("accepted_length", {}) for run in runs],
        "seconds an image": [_seconds(run) for run in runs],
        "speed-up": [run.metrics.get("speedup", {}) for run in runs],
        "peak memory, GiB": [_memory(run) for run in runs],
    }
    formats = dict.fromkeys(columns, ".2f")
    text = (
        "Seconds are those of one image at batch 1, in turn with plain autoregression, without "
        "text encoder and image decoder. Memory is allocated on a GPU, resident on a CPU; there "
        "it is the process's, which runs all rows."
    )
    return Section("Speed", table(labels(runs), columns), formats, text)


def _seconds(run: Run) -> Cell:
    """Of the method; plain autoregression's stand beside every method's."""
    return run.metrics.get("latency_ar" if run.plain else "latency", {})


def _memory(run: Run) -> Cell:
    return {} if run.memory is None else {"value": run.memory / GIB}


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
