"""What a stage of the build leaves behind: its progress while it runs, and how it was made."""

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, write_json

log = logging.getLogger(__name__)

LogMetrics = Callable[[dict[str, float], int], None]
"""Takes the values of a step and its number."""

RECORD = "training.json"


class StageRun:
    """A stage while it runs, as a context.

    Its progress goes to `output`/<name>_run/progress.jsonl, with the seconds of all runs so far.
    When it succeeds, training.json beside its weights tells command, commit, seed, settings,
    seconds, metrics and hashes.

    Attributes:
        directory: where its weights belong.
        written: all directories that it writes; `beside` names those beside its own.
        run: its run directory, for checkpoints.
        metrics: what it measured at its end.
    """

    def __init__(
        self,
        output: Path,
        name: str,
        settings: Any,
        log_metrics: LogMetrics,
        beside: tuple[str, ...] = (),
    ) -> None:
        self.directory, self.run = output / name, output / f"{name}_run"
        self.written = [self.directory, *(output / other for other in beside)]
        self.settings, self.metrics = settings, dict[str, float]()
        self._log_metrics, self._progress = log_metrics, self.run / "progress.jsonl"
        self._before = self._start = 0.0

    def __enter__(self) -> Self:
        """Begin, or resume."""
        log.info("building %s", self.directory)
        self.run.mkdir(parents=True, exist_ok=True)
        if self._progress.is_file():
            last = self._progress.read_text(encoding="utf-8").splitlines()[-1]
            self._before = float(json.loads(last)["seconds"])
        self._start = time.perf_counter()
        return self

    @property
    def seconds(self) -> float:
        """Of this run and of those that were interrupted, each as far as its last report."""
        return round(self._before + time.perf_counter() - self._start, 1)

    def report(self, values: dict[str, float], step: int) -> None:
        """Log a step's values."""
        told = {name: round(value, 4) for name, value in values.items()}
        with self._progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "seconds": self.seconds} | told) + "\n")
        self._log_metrics(values, step)

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        """Write the record of a stage that succeeded."""
        if kind is not None:
            return
        weights = sorted(path for place in self.written for path in place.rglob("*.safetensors"))
        record = {
            "command": self._command(),
            "commit": commit(),
            "seed": self.settings.seed,
            "seconds": self.seconds,
            "machine": machine(),
            "settings": asdict(self.settings),
            "metrics": self.metrics,
            "sha256": {os.path.relpath(path, self.directory): sha256(path) for path in weights},
        }
        write_json(self.directory / RECORD, record)
        log.info("built %s in %d s: %s", self.directory, self.seconds, self.metrics)

    def _command(self) -> str:
        """The command line, with DIR for the directory of all stages: where they were built is no
        part of the recipe, and records are published.
        """
        place = str(self.directory.parent)
        arguments = [argument.replace(place, "DIR") for argument in sys.argv[1:]]
        return " ".join([Path(sys.argv[0]).name, *arguments])


def is_built(directory: Path, settings: Any) -> bool:
    """Whether a stage with these settings left its record here, and its weights are unchanged."""
    if not (directory / RECORD).is_file():
        return False
    record: Any = read_json(directory / RECORD)
    kept = {name: directory / name for name in record["sha256"]}
    return record["settings"] == _plain(settings) and all(
        file.is_file() and sha256(file) == record["sha256"][name] for name, file in kept.items()
    )


def kept_record(directory: Path, settings: Any) -> dict[str, Any]:
    """The record of a stage that was built here with these settings.

    Raises:
        TemperaError: there is none, or its settings are others.
    """
    if not (directory / RECORD).is_file():
        raise TemperaError(f"{directory} holds no record of a stage: build it first.")
    record: dict[str, Any] = read_json(directory / RECORD)
    now = _plain(settings)
    differing = [name for name in now if record["settings"].get(name) != now[name]]
    if differing or record["settings"].keys() != now.keys():
        raise TemperaError(
            f"{directory} was built with other settings ({', '.join(differing) or 'other names'}): "
            "give those that its record has."
        )
    return record


def _plain(settings: Any) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain


def machine() -> str:
    """What a training's bits depend on beside its code and settings: processor, vector
    instructions, threads, torch.
    """
    told, path = platform.machine(), Path("/proc/cpuinfo")
    if path.is_file():
        names = re.findall(r"^model name\s*: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        told = ", ".join([told, *names[:1]])
    threads, units = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{told}, {units}, {threads} threads, torch {torch.__version__}"


def commit() -> str:
    """Of the code that runs, marked where files differ from it; `none` outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(
            [*git, "--abbrev=40", "--exclude=*"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return told.stdout.strip()


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
