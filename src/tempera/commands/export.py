"""`tempera-export`: lay the pictures of runs out as the scorer of a benchmark expects them."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from tempera.config.instantiate import from_options, instantiate
from tempera.data.layouts import Layout
from tempera.errors import TemperaError
from tempera.evaluation.import_pictures import Folders, runs_at
from tempera.evaluation.score import Pictured
from tempera.evaluation.summary import pictured
from tempera.runtime.files import writable_directory


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/export.yaml says what each is."""

    runs: str | list[str]
    output: str
    outputs: str
    captions: str | None
    grid: int


def main(cfg: DictConfig) -> list[Path]:
    """Lay each run out, tell what scores it, and return the folders."""
    options, layout = read_options(cfg)
    directories = list(_directories(options))
    destinations = [Path(options.output, directory.resolve().name) for directory in directories]
    for destination in destinations:
        if destination.exists() or destinations.count(destination) > 1:
            raise TemperaError(
                f"{destination} already exists, or two runs would be written there: delete it, or "
                "give another directory with output=DIR.",
                option="output",
            )
    for directory, destination in zip(directories, destinations, strict=True):
        own = pictured(directory)
        own.check()
        _lay_out(own, layout, destination)
        print(f"{len(own.prompts)} pictures of {directory} are in {destination}")
        if commands := layout.commands(own.prompts, own.picture, destination.resolve()):
            print("to score them, in the scorer's own environment:")
            print(*(f"  {line}" for line in commands), sep="\n")
    return destinations


def read_options(cfg: DictConfig) -> tuple[Options, Layout]:
    """What this command reads itself.

    Raises:
        TemperaError: an option is missing or not possible.
    """
    if "runs" not in cfg:
        raise TemperaError("give runs=DIR: a run, or a folder of pictures", option="runs")
    if cfg.get("layout") is None:
        raise TemperaError("give layout=: dpg, folder, geneval, geneval2 or hpsv2", option="layout")
    layout: Layout = instantiate(cfg.layout)
    return from_options(cfg, Options), layout


def _directories(options: Options) -> Iterator[Path]:
    """The run directories, also those that are made of folders of pictures."""
    sources = [options.runs] if isinstance(options.runs, str) else options.runs
    folders = Folders(options.outputs, options.captions, options.grid, None)
    for source in map(Path, sources):
        yield from runs_at(source) or [folders.run_of(source)]


def _lay_out(own: Pictured, layout: Layout, destination: Path) -> None:
    """Write a run's pictures: all of them, or nothing."""
    parent = writable_directory(destination.parent)
    with TemporaryDirectory(dir=parent, prefix=f".{destination.name}-") as temporary:
        made = Path(temporary, destination.name)
        made.mkdir()
        try:
            layout.write(own.prompts, own.picture, made)
        except TemperaError as problem:
            if problem.option == "path":  # what also reads the prompts of an evaluation names it
                problem.option = "layout.path"
            raise
        shutil.move(made, destination)
