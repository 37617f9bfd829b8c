"""The runs that commands send to W&B, in place of its server."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest


class SentRun:
    """A run as W&B got it.

    Attributes:
        about: the arguments of `wandb.init`.
        summary: its final numbers.
        tables: columns and rows, by name.
        files: the names of the files of each artifact, by its kind.
        finished: whether it was closed.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about, self.dir, self.id = about, f"{about['dir']}/wandb/run/files", about["id"]
        self.summary: dict[str, Any] = {}
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self.files: dict[str, list[str]] = {}
        self.finished = False
        self.define_metric = Mock()

    def log(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name.startswith("tables/"):
                self.tables[name.removeprefix("tables/")] = value.columns, value.data

    def log_artifact(self, artifact: Any) -> None:
        self.files[artifact.type] = sorted(artifact.manifest.entries)

    def finish(self) -> None:
        self.finished = True


def keep_sent_runs(monkeypatch: pytest.MonkeyPatch, directory: Path) -> dict[str, SentRun]:
    """From now on, the last run of each stage (`job_type`); W&B copies files to `directory`."""
    runs: dict[str, SentRun] = {}

    def start(**about: Any) -> SentRun:
        runs[about["job_type"]] = SentRun(about)
        return runs[about["job_type"]]

    monkeypatch.setattr("wandb.init", start)
    monkeypatch.setenv("WANDB_DATA_DIR", str(directory))
    return runs
