import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tempera.errors import TemperaError
from tempera.runtime.row_store import Numbers, Store, read_table, write_table


def rows(*ids: str) -> list[dict[str, object]]:
    return [{"id": name, "tokens": [1, 2], "seconds": 0.5} for name in ids]


def test_rows_are_keyed_by_id_and_parts_are_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "records", "run")
    assert store.rows() == {}
    assert store.missing(["a", "b"]) == ["a", "b"]
    store.add(rows("b", "a"))
    store.add(rows("c"))
    assert store.missing(["a", "d", "c"]) == ["d"]
    assert store.rows()["a"] == rows("a")[0]
    assert sorted(store.rows()) == ["a", "b", "c"]
    assert all(path.suffix == ".parquet" for path in (tmp_path / "records").iterdir())


def test_unfinished_parts_are_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path, "run")
    store.add(rows("a"))
    part = next(tmp_path.glob("*.parquet"))
    part.rename(tmp_path / ".x.parquet.123.tmp")
    assert store.missing(["a"]) == ["a"]
    latin = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"),
                                                   pa.py_buffer(b"\xe9")])  # fmt: skip
    for content in (b"PAR1 half", pa.table({"id": latin})):
        if isinstance(content, bytes):
            (tmp_path / "x.parquet").write_bytes(content)
        else:
            pq.write_table(content, tmp_path / "x.parquet")
        with pytest.raises(TemperaError, match=r"x\.parquet is damaged"):
            store.rows()


COLUMNS = {
    "tokens": Numbers(0, 300, whole=True, length=3), "seconds": Numbers(positive=True),
    "tested": Numbers(0), "kept": Numbers(0, at_most="tested"),
    "sizes": Numbers(0, length=3, needed=False), "name": None,
}  # fmt: skip
GOOD = {"id": "a", "tokens": [1, 2, 299], "seconds": 0.5, "tested": [2, 1], "kept": [2, 0],
        "sizes": [1, None, 7], "name": "x"}  # fmt: skip
BELIEVED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [1, 2]}, "tokens has rows that do not have exactly 3"),
    ({"tokens": [1, 2, 300]}, "tokens contains numbers outside"),
    ({"tokens": [1, 2, -1]}, "tokens contains numbers outside"),
    ({"tokens": [1.5, 2, 3]}, "tokens contains numbers that are not whole"),
    ({"seconds": 0.0}, "seconds contains numbers that are not above 0"),
    ({"kept": [2, 2]}, "kept holds more than tested"),
    ({"kept": [0]}, "kept holds more than tested"),
    ({"sizes": [1, None, -7]}, "sizes contains numbers outside"),
    ({"tokens": ["1", "2", "3"]}, "tokens contains values that are not"),
    ({"tokens": 7}, "tokens has rows that do not have exactly 3"),
    ({"seconds": None}, "seconds has missing values"),
    ({"name": None}, "name has missing values"),
    ({"name": 7}, "name contains values that are not"),
]


@pytest.mark.parametrize(("wrong", "told"), BELIEVED)
def test_rows_are_looked_at_before_they_are_believed(
    wrong: dict[str, Any], told: str, tmp_path: Path
) -> None:
    store = Store(tmp_path, "run", COLUMNS)
    store.add([GOOD])
    tokens, sizes = (store.rows()["a"][name] for name in ("tokens", "sizes"))
    assert [tokens.dtype, sizes.dtype] == [np.int16, np.float32] and tokens.tolist() == [1, 2, 299]
    store.add([{**GOOD, "id": "b"} | wrong])
    with pytest.raises(TemperaError, match=f"its column {told}.*: delete the file"):
        store.rows()


def test_parts_of_something_else_are_refused_and_rows_may_come_twice(tmp_path: Path) -> None:
    own, other = Store(tmp_path / "own", "own"), Store(tmp_path / "other", "other")
    own.add(rows("a", "b"))
    other.add(rows("c"))
    (part,) = other.directory.iterdir()
    copy = own.directory / part.name
    shutil.copy(part, copy)
    for read in (own.rows, lambda: own.missing(["a"])):
        with pytest.raises(TemperaError, match=f"{part.name} is from another run"):
            read()
    copy.unlink()
    pq.write_table(pa.Table.from_pylist(rows("c")), copy)  # nobody's
    with pytest.raises(TemperaError, match="is from another run or version"):
        own.rows()
    copy.unlink()
    own.add(rows("c", "b"))  # as another run of other batches does
    assert sorted(own.rows()) == ["a", "b", "c"]
    assert own.missing(["a", "b", "c", "d"]) == ["d"]


def test_lists_of_any_length_are_arrays_where_they_are_asked_for(tmp_path: Path) -> None:
    lists = {"a": [1.5, 2.0], "b": [], "c": [-1.0, 2**40, 3.0]}
    store = Store(tmp_path, "run", {"features": Numbers(needed=False)})
    store.add([{"id": name, "features": values} for name, values in lists.items()])
    found = store.rows()
    assert {name: found[name]["features"].tolist() for name in lists} == lists


def test_a_bit_that_turned_over_is_not_believed(tmp_path: Path) -> None:
    """Also where the number that it makes could have been measured."""
    path = tmp_path / "a.parquet"
    written = [{"id": "p", "top10": 1 / 3}]
    write_table(path, written)
    whole = path.read_bytes()
    places = [found.start() for found in re.finditer(re.escape(np.float64(1 / 3).tobytes()), whole)]
    believed = []
    for place in places:
        turned = bytearray(whole)
        turned[place + 6] ^= 1
        path.write_bytes(turned)
        with suppress(TemperaError):
            believed.append(read_table(path))
    assert len(believed) < len(places)
    assert all(rows == written for rows in believed)  # of statistics, which nobody reads
