"""Rows keyed by id, in Parquet parts. A killed process loses at most the part it was writing."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, replacing

Row = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, or of lists of them, which are read as arrays.

    Attributes:
        least, below: the numbers' range.
        length: of every list, for instance the tokens of an image. Such arrays take as few bytes as
            their numbers need.
        needed: whether every row must have a value.
    """

    least: float = -math.inf
    below: float = math.inf
    length: int | None = None
    needed: bool = True


class Store:
    """Rows keyed by their `id`, in Parquet part files named after their ids. Parts are written
    atomically.

    Several processes may add rows to one store. If an id is in two parts, either row may be read.

    Args:
        directory: directory of the parts.
        columns: what each row must have besides its id, and the numbers that it can be; None: text.
    """

    def __init__(
        self, directory: Path, columns: Mapping[str, Numbers | None] | None = None
    ) -> None:
        self.directory = directory
        self.columns: dict[str, Numbers | None] = {"id": None, **(columns or {})}

    def rows(self) -> dict[str, Row]:
        """All rows by id.

        Raises:
            TemperaError: a part is damaged, lacks a column, or has numbers that cannot be.
        """
        parts = sorted(self.directory.glob("*.parquet"))
        return {row["id"]: row for path in parts for row in read_table(path, self.columns)}

    def missing(self, ids: Iterable[str]) -> list[str]:
        """The ids that have no row yet."""
        parts = self.directory.glob("*.parquet")
        present = {name for path in parts for name in _table(path, ["id"])["id"].to_pylist()}
        return [name for name in ids if name not in present]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows as one part, atomically."""
        name = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()[:16]
        write_table(self.directory / f"{name}.parquet", rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file, atomically; columns as in the first row, NaN as null."""
    names = list(rows[0] if rows else ())

    def parts() -> Iterator[pa.Table]:
        for start in range(0, len(rows) or 1, 256):
            cells = {name: [row.get(name) for row in rows[start:][:256]] for name in names}
            yield pa.table({name: _array(values) for name, values in cells.items()})

    schema = pa.unify_schemas([part.schema for part in parts()], promote_options="permissive")
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for part in parts():
            writer.write_table(part.cast(schema))


def _array(values: list[Any]) -> pa.Array:
    """A column, with lists of small numbers in half the space."""
    array = pa.array(values, from_pandas=True)  # NaN is null
    try:
        return array.cast(pa.list_(pa.int32())) if array.type == pa.list_(pa.int64()) else array
    except pa.ArrowInvalid:  # a number needs 64 bits
        return array


def read_table(
    path: Path, columns: Mapping[str, Numbers | None] | None = None, most: int | None = None
) -> list[Row]:
    """The rows of a Parquet file.

    Args:
        path: the file.
        columns: see `Store`.
        most: read only so many rows, the first ones.

    Raises:
        TemperaError: the file is missing or damaged, or does not hold such columns.
    """
    table, columns = _table(path)[:most], columns or {}
    for name, numbers in columns.items():
        if fault := _fault(table, name, numbers):
            raise TemperaError(f"{path} has {fault}: delete the file and run again.")
    read = {
        name: _lists(table[name], numbers) if (numbers := columns.get(name)) else column.to_pylist()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return [dict(zip(read, values, strict=True)) for values in zip(*read.values(), strict=True)]


def _table(path: Path, columns: list[str] | None = None) -> pa.Table:
    regular_file(path)
    try:
        table = pq.read_table(path, columns=columns, partitioning=None)
        table.validate(full=True)  # texts in UTF-8, for instance
        return table
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise TemperaError(
            f"{path} is damaged ({shortened(str(problem))}): restore it, or delete it and run "
            "again."
        ) from None


def _fault(table: pa.Table, name: str, numbers: Numbers | None) -> str | None:
    """What is wrong with a column; None if nothing is."""
    here = name in table.column_names
    if not here or table[name].null_count:
        return f"a row without {name}" if numbers is None or numbers.needed else None
    column = table[name].combine_chunks()
    if numbers is None:
        return None if _is_text(column) else f"{name} that are not texts"
    if numbers.length is not None:
        lengths = pc.list_value_length(column) if _is_list(column) else pa.array([0])
        if pc.any(pc.not_equal(lengths, numbers.length)).as_py():
            return f"a row of other than {numbers.length} {name}"
    while _is_list(column):
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False)
    if not len(values):
        return None
    if not np.issubdtype(values.dtype, np.number):
        return f"{name} that are not numbers"
    if not numbers.needed:  # None, of NaN
        values = values[~np.isnan(values)]
    if not ((values >= numbers.least) & (values < numbers.below)).all():
        return f"{name} that are not between {numbers.least} and {numbers.below}"
    return None


def _is_list(column: pa.Array | pa.ChunkedArray) -> bool:
    return bool(pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type))


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _lists(column: pa.ChunkedArray, wanted: Numbers) -> list[Any]:
    """A column's values, with its lists of numbers as arrays."""
    flat = column.combine_chunks()
    kinds = pa.types.is_integer, pa.types.is_floating
    numbers = _is_list(flat) and any(kind(flat.type.value_type) for kind in kinds)
    if flat.null_count or not numbers:
        values: list[Any] = flat.to_pylist()
        return values
    ends = np.cumsum(pc.list_value_length(flat).to_numpy(zero_copy_only=False))
    content = flat.flatten().to_numpy(zero_copy_only=False)
    if wanted.length:
        integers = np.issubdtype(content.dtype, np.integer)
        small = (
            np.min_scalar_type(-1 - content.max(initial=0)) if integers else np.dtype(np.float32)
        )
        content = content.astype(small)
    return np.split(content, ends)[:-1]
