"""Rows keyed by id, in Parquet parts. A killed process loses at most the part it was writing."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, replacing

Row = dict[str, Any]


class Store:
    """Rows keyed by their `id`, in Parquet part files named after their ids. Parts are written
    atomically.

    Several processes may add rows to one store. If an id is in two parts, either row may be read.

    Args:
        directory: directory of the parts.
        columns: what each row must have besides its id.
    """

    def __init__(self, directory: Path, columns: Iterable[str] = ()) -> None:
        self.directory, self.columns = directory, ("id", *columns)

    def rows(self) -> dict[str, Row]:
        """All rows by id.

        Raises:
            TemperaError: a part is damaged, or lacks a column.
        """
        found: dict[str, Row] = {}
        for path in sorted(self.directory.glob("*.parquet")):
            for row in read_table(path):
                lacking = [name for name in self.columns if row.get(name) is None]
                if lacking:
                    raise TemperaError(
                        f"{path} has a row without {lacking[0]}: delete the file and run again."
                    )
                found[row["id"]] = row
        return found

    def missing(self, ids: Iterable[str]) -> list[str]:
        """The ids that have no row yet."""
        present = {
            row["id"]
            for path in self.directory.glob("*.parquet")
            for row in read_table(path, ["id"])
        }
        return [name for name in ids if name not in present]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows as one part, atomically."""
        name = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()[:16]
        write_table(self.directory / f"{name}.parquet", rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file, atomically; columns as in the first row, NaN as null."""
    columns = {name: [_cell(row.get(name)) for row in rows] for name in (rows[0] if rows else {})}
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def read_table(path: Path, columns: list[str] | None = None) -> list[Row]:
    """The rows of a Parquet file, with all columns or some.

    Raises:
        TemperaError: the file is missing or damaged.
    """
    regular_file(path)
    try:
        rows: list[Row] = pq.read_table(path, columns=columns, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise TemperaError(
            f"{path} is damaged ({shortened(str(problem))}): delete it and run again."
        ) from None
    return rows
