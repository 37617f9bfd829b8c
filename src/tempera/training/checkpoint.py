"""Checkpoints of a training: what accelerate saves of it, in a directory that appears whole under
its name, with the hashes of its files.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import (
    check_same,
    create_json,
    fingerprint,
    read_json,
    reason,
    regular_file,
    sha256_file,
    unwritable,
    write_json,
)

FORMAT = 3
"""Raise it where a training that an earlier version began cannot go on to the same weights."""
RECORD = "training.json"
PREFIX = "checkpoint-"
"""What the name of a checkpoint's directory starts with; the number of steps follows."""
CHECKPOINT_MANIFEST = "checkpoint.json"
"""What a checkpoint holds beside the files that accelerate writes."""
NETWORK, EXTRA = "network.safetensors", "extra.safetensors"
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class TrainingProgress:
    """Counters of a training run.

    Attributes:
        step: optimiser steps taken.
        seconds: time spent, over all restarts.
        best: validation metrics of the best checkpoint so far, with its step.
        latest: the latest validation metrics.
    """

    step: Annotated[int, Field(ge=0)] = 0
    seconds: Amount = 0.0
    best: dict[str, Amount] = field(default_factory=dict)
    latest: dict[str, Amount] = field(default_factory=dict)


@dataclass
class CheckpointManifest:
    """What `checkpoint.json` says of the checkpoint that it lies in.

    Attributes:
        made_by: what `fix_record` returned for the training.
        progress: the counters when it was saved.
        files: sha256 of each other file.
    """

    made_by: str
    progress: TrainingProgress
    files: dict[str, str]


class Checkpoints:
    """The latest checkpoint of a training: `directory/checkpoint-STEP`, with network, optimisers,
    schedules and random generators as `Accelerator.save_state` writes them. The network is stored
    under its own names, whatever the number of processes.

    Args:
        directory: of the training; all processes see it.
        accelerator: has prepared the network and its optimisers, and nothing else.
        network: the network, as it was before it was prepared.
        extra: other tensors that steps change in place, such as those of a moving average.
    """

    def __init__(
        self,
        directory: Path,
        accelerator: Accelerator,
        network: nn.Module,
        extra: Mapping[str, Tensor],
    ) -> None:
        self.directory = directory
        self.accelerator = accelerator
        self.network = network
        self.extra = extra
        accelerator.register_save_state_pre_hook(self._save_tensors)
        accelerator.register_load_state_pre_hook(self._load_tensors)

    def save(self, progress: TrainingProgress, made_by: str) -> None:
        """Write a checkpoint in place of the one before; to be called by all processes.

        Raises:
            TemperaError: the directory cannot be written.
        """
        path = self.directory / f"{PREFIX}{progress.step}"
        staging = self.directory / f".{path.name}.tmp"
        is_main = self.accelerator.is_main_process
        if is_main:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with _writing(path):
            self.accelerator.save_state(str(staging))
        self.accelerator.wait_for_everyone()
        if is_main:
            with _writing(path):
                files = {file.name: _flushed(file) for file in sorted(staging.iterdir())}
                write_json(
                    staging / CHECKPOINT_MANIFEST,
                    asdict(CheckpointManifest(made_by, progress, files)),
                )
                staging.rename(path)
            self._delete_others(path, made_by)
        self.accelerator.wait_for_everyone()

    def load(self, steps: int, made_by: str) -> TrainingProgress | None:
        """Go back to the latest checkpoint, if there is one; to be called by all processes.

        Args:
            steps: of the whole training.
            made_by: what `fix_record` returned.

        Returns:
            the counters when it was saved; None if there is no checkpoint.

        Raises:
            TemperaError: it is damaged, belongs to another training, or has more than `steps`
                steps.
        """
        path = self._latest()
        if path is None:
            return None
        try:
            manifest = read_manifest(path)
            if manifest.made_by != made_by:
                raise ValueError("it belongs to another training run")
            if manifest.progress.step > steps:
                raise ValueError(f"step {manifest.progress.step} of {steps}")
            self.accelerator.load_state(str(path))
        except torch.OutOfMemoryError:
            raise  # the checkpoint is whole
        except (TemperaError, OSError, ValueError, KeyError, RuntimeError) as problem:
            raise TemperaError(
                f"training cannot resume from {path} ({reason(problem)}): move it away to resume "
                "from an earlier one, or to start over if there is none."
            ) from problem
        return manifest.progress

    def _latest(self) -> Path | None:
        """The checkpoint of most steps."""
        found = {
            int(number[1]): path
            for path in self.directory.glob(f"{PREFIX}*")
            if (number := re.fullmatch(rf"{PREFIX}(\d+)", path.name))
        }
        return found[max(found)] if found else None

    def _delete_others(self, latest: Path, made_by: str) -> None:
        """Remove the other checkpoints of this training, and those that were not finished. What
        else lies there, or in one of them, stays.
        """
        for path in list(self.directory.iterdir()):
            if re.fullmatch(rf"\.{PREFIX}\d+\.tmp", path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path != latest and re.fullmatch(rf"{PREFIX}\d+", path.name):
                _remove(path, made_by)

    def _save_tensors(self, _: list[nn.Module], states: list[Any], directory: str) -> None:
        """Write what accelerate would write under the names of wrapped networks, or as pickles."""
        states.clear()
        if not self.accelerator.is_main_process:
            return
        for name, tensors in self._tensors().items():
            contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(contiguous, Path(directory) / name)

    def _load_tensors(self, networks: list[nn.Module], directory: str) -> None:
        """Read what `_save_tensors` wrote."""
        own = self._tensors()
        networks.clear()
        with torch.no_grad():
            for name, tensors in own.items():
                saved = load_file(Path(directory) / name)
                for key, value in tensors.items():
                    value.copy_(saved[key])

    def _tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of each file, by their names."""
        return {NETWORK: self.network.state_dict(), EXTRA: self.extra}


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint, whose files are as they were saved.

    Raises:
        ValueError: the manifest has a wrong value, or a file was changed.
        TemperaError: a file is missing or cannot be read.
    """
    manifest = _manifest(path)
    for name, expected in manifest.files.items():
        if sha256_file(regular_file(path / name)) != expected:
            raise ValueError(f"{name} is not what was saved")
    return manifest


def _remove(path: Path, made_by: str) -> None:
    """Remove the files of a training's checkpoint, and its directory if nothing else is there."""
    with suppress(TemperaError, ValidationError, OSError):  # it is none, or cannot be removed
        manifest = _manifest(path)
        if manifest.made_by == made_by:
            for name in (*manifest.files, CHECKPOINT_MANIFEST):
                (path / Path(name).name).unlink(missing_ok=True)
            path.rmdir()


def _manifest(path: Path) -> CheckpointManifest:
    content = json.dumps(read_json(path / CHECKPOINT_MANIFEST))
    return TypeAdapter(CheckpointManifest).validate_json(content, strict=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Tell in a sentence what keeps a checkpoint from being written."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError, RuntimeError) as problem:  # torch.save raises the last
        raise unwritable(path, problem) from problem


def _flushed(file: Path) -> str:
    """The sha256 of a file, after it has reached the disk."""
    with file.open("rb") as written:
        os.fsync(written.fileno())
    return sha256_file(file)


def fix_record(directory: Path, record: dict[str, Any], write: bool) -> str:
    """Record a run's configuration in its directory; refuse to resume it with another one.

    Returns:
        What the other parts of the training carry.

    Raises:
        TemperaError: the directory holds a run with another configuration.
    """
    path = directory / RECORD
    record = {"format": FORMAT, **record}
    if (write and create_json(path, record)) or not path.exists():
        return fingerprint(record)
    before = read_json(path)
    check_same(directory, _in_new_names(before), record)
    return fingerprint(before)  # its checkpoints have this one


def _in_new_names(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it would be today, where an earlier version wrote it: `limit` was at the top of
    the configuration, and so were two options that are in the record's recipe and loss.
    """
    if "limit" not in record:
        return record
    new = {key: record[key] for key in record if key not in ("limit", "epochs", "cross_entropy")}
    of_source = "${oc.select:train_data.limit,${family.entries}}"
    for name, limit in (("train_data", record["limit"]), ("source", of_source)):
        if new.get(name, {}).get("limit") == "${limit}":
            new[name] = {**new[name], "limit": limit}
    return new
