import json
from pathlib import Path

import pytest

from tempera.errors import TemperaError
from tempera.evaluation.run_directory import claim
from tempera.runtime.row_store import Store


def rows(*ids: str) -> list[dict[str, object]]:
    return [{"id": name, "tokens": [1, 2], "seconds": 0.5} for name in ids]


def test_rows_are_keyed_by_id_and_parts_are_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "records")
    assert store.rows() == {}
    assert store.missing(["a", "b"]) == ["a", "b"]
    store.add(rows("b", "a"))
    store.add(rows("c"))
    assert store.missing(["a", "d", "c"]) == ["d"]
    assert store.rows()["a"] == rows("a")[0]
    assert sorted(store.rows()) == ["a", "b", "c"]
    assert all(path.suffix == ".parquet" for path in (tmp_path / "records").iterdir())


def test_unfinished_parts_are_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(rows("a"))
    part = next(tmp_path.glob("*.parquet"))
    part.rename(tmp_path / ".x.parquet.123.tmp")
    assert store.missing(["a"]) == ["a"]
    (tmp_path / "x.parquet").write_bytes(b"PAR1 half")
    with pytest.raises(TemperaError, match=r"x\.parquet is damaged"):
        store.rows()


def test_a_directory_of_other_settings_is_refused(tmp_path: Path) -> None:
    identity = {"model": "shapes", "delta": 2.0, "tree": [0, 1]}
    claim(tmp_path / "run", identity, {"host": "x"})
    claim(tmp_path / "run", json.loads(json.dumps(identity)), {"host": "y"})
    assert json.loads((tmp_path / "run" / "run.json").read_text())["host"] == "y"
    with pytest.raises(
        TemperaError,
        match=r"made with delta=2\.0, but this one has delta=3\.0: choose another directory",
    ):
        claim(tmp_path / "run", {**identity, "delta": 3.0}, {})
    with pytest.raises(TemperaError, match="made with delta=2.0, but this one has delta=None"):
        claim(tmp_path / "run", {"model": "shapes", "tree": [0, 1]}, {}, write=False)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TemperaError, match="cannot write in .*file/run") as problem:
        claim(tmp_path / "file" / "run", {}, {})
    assert "\n" not in str(problem.value)
