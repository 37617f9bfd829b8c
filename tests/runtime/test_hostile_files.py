"""Whatever lies at a path that a user gives, and whatever it holds, is read or refused in one
sentence: no reader crashes.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import RUNS, made_up_runs
from safetensors.torch import save_file
from tiny_evaluation import tiny_pipeline

from tempera.data.prompts import Prompt, rows_of
from tempera.data.shards import MANIFEST, Manifest
from tempera.errors import TemperaError
from tempera.evaluation import calibration
from tempera.evaluation.pipeline import record_columns, records
from tempera.metrics.scores import read_scores
from tempera.reporting.collect import find_runs, read_run
from tempera.runtime.files import read_json, read_text, reason
from tempera.runtime.image_files import read_picture, write_picture
from tempera.runtime.network_directory import draft_directory
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.row_store import Store, read_table, write_table
from tempera.runtime.tensor_files import read_tensors
from tempera.shapes.networks import WorldCaptions, load_text_encoder
from tempera.training.checkpoint import CHECKPOINT_MANIFEST, read_manifest

Reader = Callable[[Path], Any]


def prompts_of(path: Path) -> Any:
    return [list(rows_of(path.with_suffix(end))) for end in (".txt", ".csv", ".tsv", ".jsonl")]


def checkpoint_of(path: Path) -> Any:
    try:
        return read_manifest(path)
    except ValueError as problem:  # which the training tells with its directory
        raise TemperaError(reason(problem)) from problem


FILES: dict[str, Reader] = {
    "text": read_text,
    "JSON": read_json,
    "rows": read_table,
    "records": lambda path: Store(path.parent, "run").rows(),
    "picture": lambda path: read_picture(path, "run"),
    "tensors": lambda path: read_tensors(path.with_suffix(".safetensors")),
    "pickled tensors": lambda path: read_tensors(path.with_suffix(".pt"), skip_objects=True),
    "statistics": calibration.load_statistics,
    "prompts": prompts_of,
    "a table of prompts": lambda path: list(rows_of(path.with_suffix(".parquet"))),
    "scores": lambda path: read_scores(str(path), ["a"]),
    "manifest": lambda path: Manifest.load(path.parent),
    "network": lambda path: load_text_encoder(path.parent),
    "captions": lambda path: WorldCaptions(path.parent),
    "draft": lambda path: draft_directory(path.parent),
    "weights": lambda path: PretrainedFiles(str(path), ("a.safetensors",), "owner/name").find(),
    "sizes": lambda path: PretrainedFiles(str(path.parent), ("a.pt",), "o/n").stated(
        {"hidden_size": 8, "rope_theta": 1e4}, "llama"
    ),
    "checkpoint": lambda path: checkpoint_of(path.parent),
    "runs": lambda path: [read_run(run) for run in find_runs([path.parent])[0]],
}
NAMES = (
    *(
        "config.json",
        "model.safetensors",
        MANIFEST,
        CHECKPOINT_MANIFEST,
        "run.json",
        "metrics.json",
    ),
    *("results.parquet", "a.safetensors", "a.pt", "a.txt", "a.csv", "a.tsv", "a.jsonl"),
    *("a.parquet", "a", "a.png", "a.json"),
)


def answered(read: Reader, path: Path) -> None:
    """A reader may read the file, or refuse it in one line."""
    try:
        read(path)
    except TemperaError as problem:
        told = str(problem)
        assert told and "\n" not in told and " object at 0x" not in told, told
    except OSError as problem:
        if problem.filename is None:  # else the command line tells them in a sentence
            raise


def put(kind: str, path: Path) -> None:
    match kind:
        case "a directory":
            path.mkdir()
        case "an empty file":
            path.touch()
        case "a pipe":
            os.mkfifo(path)


KINDS = "nothing", "a directory", "an empty file", "a pipe"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", FILES)
def test_whatever_lies_at_a_path(reader: str, kind: str, tmp_path: Path) -> None:
    for name in NAMES:
        put(kind, tmp_path / name)
    answered(FILES[reader], tmp_path / "a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(
        ["length", "width", "layers", "heads", "identity", "settings", "metrics", "method",
         "format", "grid", "shards", "vocab_size", "hidden_size", "rope_scaling", "text_config",
         "model_type", "tokenizer", "weight_map", "about", "results"]), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip
CONTENTS = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())
FUZZED = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.parametrize("reader", FILES)
@FUZZED
@given(content=CONTENTS)
def test_whatever_a_file_holds(reader: str, content: bytes, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(content)
    answered(FILES[reader], tmp_path / "a")


def whole(place: Path) -> dict[Path, Reader]:
    """Files that their readers read."""
    made_up_runs(place / "runs", RUNS[1:2], prompts=2)
    run = next((place / "runs").iterdir())
    pipeline, prompts = tiny_pipeline(), [Prompt("a", "a ring"), Prompt("b", "a star")]
    store = Store(place / "records", "run", record_columns(pipeline.target.length, 4))
    for done in pipeline.decoded(prompts, 2):
        store.add([{**row, "seconds": 1.0} for row in records(done)])
    save_file({"a": torch.rand(3, 3)}, place / "a.safetensors")
    torch.save({"a": torch.rand(3, 3)}, place / "a.pt")
    write_picture(place / "a.png", torch.zeros(3, 4, 4, dtype=torch.uint8).numpy(), "run")
    write_table(place / "a.parquet", [{"id": "a", "prompt": "a ring"}])
    return {
        run / "metrics.json": lambda path: read_run(path.parent),
        run / "results.parquet": lambda path: read_run(path.parent),
        run / "run.json": lambda path: read_run(path.parent),
        next((place / "records").iterdir()): lambda _: store.rows(),
        place / "a.safetensors": read_tensors,
        place / "a.pt": read_tensors,
        place / "a.png": lambda path: read_picture(path, "run"),
        place / "a.parquet": lambda path: list(rows_of(path)),
    }


@settings(FUZZED, max_examples=60)
@given(st.data())
def test_whatever_a_damaged_file_holds(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Bytes of a file that was whole are lost, changed or come twice."""
    place = tmp_path_factory.mktemp("whole")
    files = whole(place)
    path = data.draw(st.sampled_from(sorted(files, key=lambda one: one.name)))
    files[path](path)
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut", "change", "double"])):
        case "cut":
            del content[start:]
        case "change":
            content[start : start + 4] = data.draw(st.binary(min_size=1, max_size=4))
        case "double":
            content[start:start] = content[start : start + 64]
    path.write_bytes(content)
    answered(files[path], path)
