"""Damages of every file that a script reads, and disks that take no more."""

import functools
import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostile_options import BENCH, CONTINUOUS, EVAL, TRAIN
from hostile_process import Case, Setup, nothing, outcomes
from PIL import Image

from tempera.runtime.installation import PACKAGE

SHIPPED = PACKAGE / "shapes" / "weights"
WEIGHTS = ("config.json", "model.safetensors")
SPACES = (64, 4096, 65536)
"""Bytes that a file may have where the disk is full."""


@dataclass(frozen=True)
class Reading:
    """A command line that reads files: what makes them, and their paths, where a `*` stands for the
    first of several.
    """

    line: str
    make: Setup
    files: str = ""


def _remove(file: Path) -> None:
    file.unlink()


def _content(content: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(content)

    return write


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _lock(file: Path) -> None:
    file.chmod(0)


def _parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), buffer)
    return buffer.getvalue()


def _tensors() -> bytes:
    """A safetensors file of one float."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def picture_bytes(kind: str = "png") -> bytes:
    """A grey square."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": _remove,
    "empty": _content(b""),
    "truncated": _truncate,
    "a web page": _content(b"<!doctype html><html><body>404 Not Found</body></html>\n"),
    "a picture": _content(picture_bytes()),
    "a pickle": _content(pickle.dumps({"a": [1.0]})),
    "other tensors": _content(_tensors()),
    "other rows": _content(_parquet()),
    "other JSON": _content(b'{"a": 1, "annotations": null, "images": null}'),
    "a list": _content(b"[1, [2], null]"),
    "deep JSON": _content(b"[" * 100_000),
    "deep objects": _content(b'{"a":' * 100_000),
    "lone surrogates": _content(
        rb'{"annotations": [{"id": 1, "image_id": 1, "caption": "\ud800"}]}'
    ),
    "not UTF-8": _content(b"\xff\xfe\x00a\x80\n"),
    "NULs": _content(bytes(4096)),
    "a directory": _directory,
    "a pipe": _pipe,
    "a link to nothing": _dangling,
    "unreadable": _lock,
}


def _copy(source: Path, name: str) -> Setup:
    """A directory under another name; its files can be damaged."""

    def copy(directory: Path) -> None:
        shutil.copytree(source, directory / name)

    return copy


def _write(name: str, content: bytes) -> Setup:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)

    return write


def _all(*steps: Setup) -> Setup:
    def make(directory: Path) -> None:
        for step in steps:
            step(directory)

    return make


BASE = {
    "eval/run.py": EVAL,
    "eval/bench.py": BENCH,
    "eval/calibrate.py": ("limit=1", "batch_size=1"),
    "train_draft/main.py": TRAIN,
    "train_draft/prepare.py": ("shard_size=60", "batch_size=60"),
}
"""What makes each script quick."""


def _command(line: str) -> tuple[str, tuple[str, ...]]:
    """A script and its arguments, quick ones first."""
    script, *arguments = line.split()
    return script, (*BASE.get(script, ()), *arguments)


@functools.cache
def _made(line: str, name: str) -> Path:
    """The directory `name` that a command wrote, kept for this process."""
    kept = Path(tempfile.mkdtemp(prefix="hostile-made-")) / name

    def keep(directory: Path) -> None:
        shutil.copytree(directory / name, kept)

    for _, outcome in outcomes([Case(*_command(line))], keep=keep):
        if outcome.status != 0:
            raise AssertionError(f"{line}: {outcome.err}")
    return kept


def _after(line: str, name: str) -> Setup:
    """What a command leaves in the directory `name`."""

    def make(directory: Path) -> None:
        shutil.copytree(_made(line, name), directory / name)

    return make


RUN = "eval/run.py method=ar hydra.run.dir=run"
SHARDS = "train_draft/prepare.py source.count=60 hydra.run.dir=shards"
TRAINED = "train_draft/main.py hydra.run.dir=train"
NEIGHBOURS = "eval/run.py method=lantern neighbours.directory=n"
STATISTICS = "statistics=s/s.safetensors"
COCO = {
    "images": [{"id": 1, "file_name": "1.png"}],
    "annotations": [{"id": 1, "image_id": 1, "caption": "a red ring"}],
}


def _tar(directory: Path) -> None:
    (directory / "tars").mkdir()
    with tarfile.open(directory / "tars" / "a.tar", "w") as archive:
        for name, content in (("1.png", picture_bytes()), ("1.txt", b"a red ring")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _table(directory: Path) -> None:
    (directory / "table").mkdir()
    columns = {"image": [picture_bytes()], "caption": ["a red ring"]}
    pq.write_table(pa.table(columns), directory / "table" / "a.parquet")


def _weights(*places: str) -> str:
    """The two files of the networks in some directories."""
    return " ".join(f"{place}/{name}" for place in places for name in WEIGHTS)


DRAFT = _copy(SHIPPED / "draft", "draft")
MAR = _all(*(_copy(SHIPPED / part, f"w/{part}") for part in ("mar", "kl", "mar_draft")))
FOLDER = _write("images/1.png", picture_bytes())
LISTED = b'{"file_name": "1.png", "text": "a red ring"}\n'
FOLDERS = "train_draft/prepare.py source=imagefolder source.path=images"
READINGS = (
    Reading("eval/run.py data=file path=a.txt", _write("a.txt", b"a red ring\n"), "a.txt"),
    Reading("eval/run.py data=file path=a.tsv", _write("a.tsv", b"Prompt\na ring\n"), "a.tsv"),
    Reading(
        "eval/run.py data=file path=a.json", _write("a.json", json.dumps(COCO).encode()), "a.json"
    ),
    Reading("eval/run.py drafter.path=draft", DRAFT, _weights("draft")),
    Reading("eval/bench.py drafter.path=draft", DRAFT, "draft/model.safetensors"),
    Reading("eval/calibrate.py drafter.path=draft", DRAFT, "draft/config.json"),
    Reading(
        "eval/run.py method=independent model.independent.directory=small",
        _copy(SHIPPED / "independent", "small"),
        _weights("small", "small/text_encoder"),
    ),
    Reading(
        f"eval/run.py method=cspd {' '.join(CONTINUOUS)} weights=w",
        MAR,
        _weights("w/mar", "w/kl", "w/mar_draft"),
    ),
    Reading(
        RUN,
        _after(RUN, "run"),
        "run/run.json run/records/*.parquet run/images/*.png run/metrics.json run/results.parquet",
    ),
    Reading(
        "eval/report.py runs=run",
        _after(RUN, "run"),
        "run/run.json run/metrics.json run/results.parquet run/images/*.png",
    ),
    Reading(
        f"eval/run.py schedule=calibrated delta=null expected_length=2 {STATISTICS}",
        _after(f"eval/calibrate.py {STATISTICS}", "s"),
        "s/s.safetensors",
    ),
    Reading(NEIGHBOURS, _after(NEIGHBOURS, "n"), "n/*.safetensors"),
    Reading(
        "train_draft/main.py train_data=shards train_data.path=shards",
        _after(SHARDS, "shards"),
        "shards/manifest.json shards/shard-00000.parquet",
    ),
    Reading(
        TRAINED,
        _after(TRAINED, "train"),
        "train/training.json train/last.safetensors train/draft/metrics.json "
        + _weights("train/draft"),
    ),
    Reading("train_draft/main.py start=draft", DRAFT, _weights("draft")),
    Reading(SHARDS, _after(SHARDS, "shards"), "shards/manifest.json shards/shard-00000.parquet"),
    Reading(
        FOLDERS,
        _all(FOLDER, _write("images/metadata.jsonl", LISTED)),
        "images/metadata.jsonl images/1.png",
    ),
    Reading(
        FOLDERS,
        _all(FOLDER, _write("images/metadata.csv", b"file_name,text\n1.png,a red ring\n")),
        "images/metadata.csv",
    ),
    Reading(FOLDERS, _all(FOLDER, _write("images/1.txt", b"a ring")), "images/1.txt images/1.png"),
    Reading("train_draft/prepare.py source=webdataset source.path=tars", _tar, "tars/a.tar"),
    Reading("train_draft/prepare.py source=parquet source.path=table", _table, "table/a.parquet"),
    Reading(
        "train_draft/prepare.py source=coco source.path=c/c.json source.images=images",
        _all(FOLDER, _write("c/c.json", json.dumps(COCO).encode())),
        "c/c.json images/1.png",
    ),
    Reading(
        "train_draft/prepare.py source=prompts source.path=p.txt encoder=target",
        _write("p.txt", b"a red ring\n"),
        "p.txt",
    ),
)
"""Every kind of file that a script reads."""
WRITING = (
    Reading("eval/run.py", nothing),
    Reading("eval/report.py runs=run", _after(RUN, "run")),
    Reading("eval/calibrate.py", nothing),
    Reading("eval/bench.py", nothing),
    Reading("train_draft/main.py", nothing),
    Reading("train_draft/prepare.py source.count=2", nothing),
    Reading(NEIGHBOURS, nothing),
)
"""One command of every script that writes."""


def cases() -> Iterator[Case]:
    """Every file with every damage, and every script on full and on read-only disks."""
    for reading in READINGS:
        for name in reading.files.split():
            for kind, damage in DAMAGES.items():
                parts = {part for part in Path(name).parts if "*" not in part}
                yield Case(
                    *_command(reading.line),
                    names=tuple(parts),
                    setup=_all(reading.make, _damaging(name, damage)),
                    unprivileged=kind == "unreadable",
                    title=f"{reading.line} with {name}: {kind}",
                )
    for reading in WRITING:
        for space in SPACES:
            yield Case(
                *_command(reading.line),
                setup=reading.make,
                space=space,
                title=f"{reading.line} with {space} bytes left",
            )
        yield Case(
            *_command(reading.line),
            setup=_all(reading.make, lambda directory: directory.chmod(0o555)),
            unprivileged=True,
            title=f"{reading.line} in a directory that cannot be written",
        )


def _damaging(name: str, damage: Callable[[Path], None]) -> Setup:
    return lambda directory: damage(sorted(directory.glob(name))[0])
