"""Rows keyed by id, in Parquet parts. A killed process loses at most the part it was writing."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
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
    columns = {name: pa.array([row.get(name) for row in rows], from_pandas=True) for name in names}
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


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
    table = _table(path)[:most]
    read: dict[str, Any] = dict(zip(table.column_names, table.columns, strict=True))
    for name, wanted in (columns or {}).items():
        try:
            if name in read:
                read[name] = _values(read[name].combine_chunks(), wanted)
            elif wanted is None or wanted.needed:
                raise ValueError("is missing")
        except ValueError as problem:
            raise TemperaError(
                f"{path} is damaged, its column {name} {problem}: delete the file and run again."
            ) from None
    values = [one.to_pylist() if isinstance(one, pa.ChunkedArray) else one for one in read.values()]
    return [dict(zip(read, row, strict=True)) for row in zip(*values, strict=True)]


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


def _values(column: pa.Array, wanted: Numbers | None) -> list[Any]:
    """The values of a column, with lists of numbers as arrays.

    Raises:
        ValueError: they are not the wanted ones.
    """
    kind, lists = column.type, _is_list(column.type)
    if column.null_count and (wanted is None or wanted.needed):
        raise ValueError("lacks values")
    if wanted is None and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError("holds other things than texts")
    if wanted is None or column.null_count:
        return column.to_pylist()  # type: ignore[no-any-return]
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False) if lists else np.zeros(1)
    if wanted.length is not None and (lengths != wanted.length).any():
        raise ValueError(f"has rows of other than {wanted.length} numbers")
    flat = column
    while _is_list(flat.type):
        flat = flat.flatten()
    numbers = flat.to_numpy(zero_copy_only=False)
    if not np.issubdtype(numbers.dtype, np.number) and len(numbers):
        raise ValueError("holds other things than numbers")
    known = numbers if wanted.needed else numbers[numbers == numbers]  # NaN: none
    if not ((known >= wanted.least) & (known < wanted.below)).all():
        raise ValueError(f"holds numbers outside of [{wanted.least}, {wanted.below})")
    if not lists or _is_list(kind.value_type):
        return column.to_pylist()  # type: ignore[no-any-return]
    if wanted.length is not None:
        integers = np.issubdtype(numbers.dtype, np.integer)
        small = np.min_scalar_type(-1 - numbers.max(initial=0)) if integers else np.float32
        numbers = numbers.astype(small)
    return np.split(numbers, np.cumsum(lengths))[:-1]


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))
