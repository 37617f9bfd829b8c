"""Rows keyed by id, in Parquet parts. A killed process loses at most the part it was writing. Every
part carries the identity of what it belongs to.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, replacing
from tempera.runtime.waiting import waiting

if TYPE_CHECKING:  # what decodes without reading or writing rows does not need it
    import pyarrow as pa

Row = dict[str, Any]
Array = NDArray[Any]
MADE_BY = b"made_by"
"""Where a part's metadata keeps the identity of what it belongs to."""


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, or of lists of them, which are read as arrays.

    Attributes:
        least, below: the numbers' range.
        positive: whether they are also above 0.
        whole: whether they are whole.
        at_most: the column whose numbers theirs do not exceed, one by one.
        length: of every list, for instance the tokens of an image. Such arrays take as few bytes as
            their numbers need.
        needed: whether every row must have a value.
    """

    least: float = -math.inf
    below: float = math.inf
    positive: bool = False
    whole: bool = False
    at_most: str = ""
    length: int | None = None
    needed: bool = True

    def check(self, numbers: Array, limit: Array | None) -> None:
        """Raise ValueError unless these are such numbers; `limit` are those of `at_most`."""
        known = numbers if self.needed else numbers[numbers == numbers]  # NaN: none
        if not ((known >= self.least) & (known < self.below)).all():
            raise ValueError(f"contains numbers outside [{self.least}, {self.below})")
        if self.positive and not (known > 0).all():
            raise ValueError("contains numbers that are not above 0")
        if self.whole and (known % 1).any():
            raise ValueError("contains numbers that are not whole")
        if limit is not None and (limit.shape != numbers.shape or (numbers > limit).any()):
            raise ValueError(f"holds more than {self.at_most}")


class Store:
    """Rows keyed by their `id`, in Parquet part files named after their ids. Parts are written
    atomically, by one or several processes.

    Args:
        directory: directory of the parts.
        identity: of what the rows belong to, such as a run; every part carries it.
        columns: what each row must have besides its id, and the numbers that it can be; None: text.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        columns: Mapping[str, Numbers | None] | None = None,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.columns: dict[str, Numbers | None] = {"id": None, **(columns or {})}

    def rows(self) -> dict[str, Row]:
        """All rows by id. Two runs that share a directory may both have made a row: the same one,
        since all parts are of one identity; the first is taken.

        Raises:
            TemperaError: a part is damaged or belongs to something else, lacks a column, or has
                numbers that cannot be.
        """
        found: dict[str, Row] = {}
        for path in self._parts():
            rows = read_table(path, self.columns, identity=self.identity)
            for row in rows:
                found.setdefault(row["id"], row)
        return found

    def missing(self, ids: Iterable[str]) -> list[str]:
        """The ids that have no row yet.

        Raises:
            TemperaError: a part is damaged or belongs to something else.
        """
        present: set[str] = set()
        for path in self._parts():
            present |= {*_table(path, ["id"], self.identity)["id"].to_pylist()}
        return [name for name in ids if name not in present]

    def texts(self) -> dict[str, str]:
        """Each row's `text` by its id; other columns are not read.

        Raises:
            TemperaError: a part is damaged, belongs to something else or has no texts.
        """
        wanted: dict[str, Numbers | None] = {"id": None, "text": None}
        return {
            row["id"]: row["text"]
            for path in self._parts()
            for row in read_table(path, wanted, identity=self.identity, others=False)
        }

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows as one part, atomically."""
        name = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()[:16]
        write_table(self.directory / f"{name}.parquet", rows, self.identity)

    def _parts(self) -> list[Path]:
        return sorted(self.directory.glob("*.parquet"))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], identity: str = "") -> None:
    """Write rows as a Parquet file, atomically; columns as in the first row, NaN as null.

    Args:
        path: the file.
        rows: its rows.
        identity: see `Store`.
    """
    import pyarrow as pa
    from pyarrow.parquet import write_table as write

    names = list(rows[0] if rows else ())
    columns = {name: pa.array([row.get(name) for row in rows], from_pandas=True) for name in names}
    table = pa.table(columns).replace_schema_metadata({MADE_BY: identity})
    with replacing(path) as temporary:
        write(table, temporary, write_page_checksum=True)


def read_table(
    path: Path,
    columns: Mapping[str, Numbers | None] | None = None,
    most: int | None = None,
    identity: str | None = None,
    others: bool = True,
) -> list[Row]:
    """The rows of a Parquet file.

    Args:
        path: the file.
        columns: see `Store`.
        most: read only so many rows, the first ones.
        identity: that the file must carry; by default any or none.
        others: read the other columns, too.

    Raises:
        TemperaError: the file is missing, damaged or of something else, or does not hold such
            columns.
    """
    from pyarrow import ChunkedArray

    table = _table(path, None if others else list(columns or ()), identity)[:most]
    read: dict[str, Any] = dict(zip(table.column_names, table.columns, strict=True))
    for name, wanted in (columns or {}).items():
        try:
            if name in read:
                limit = table[wanted.at_most] if wanted and wanted.at_most in read else None
                read[name] = _values(read[name].combine_chunks(), wanted, limit)
            elif wanted is None or wanted.needed:
                raise ValueError("is missing")
        except ValueError as problem:
            raise TemperaError(
                f"{path} is damaged, its column {name} {problem}: delete the file, and run the "
                "command again."
            ) from None
    plain = {
        name: values.to_pylist() if isinstance(values, ChunkedArray) else values
        for name, values in read.items()
    }
    return rows_of(plain)


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The rows of columns, which have equally many values."""
    count = len(next(iter(columns.values()), []))
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def _table(path: Path, columns: list[str] | None = None, identity: str | None = None) -> "pa.Table":
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table as read

    regular_file(path)
    try:
        with waiting(f"{path} to be read"):
            options = {"partitioning": None, "page_checksum_verification": True}
            table = read(path, columns=columns, **options)
        table.validate(full=True)  # texts in UTF-8, for instance
        made_by = (table.schema.metadata or {}).get(MADE_BY)
        if identity is None or made_by == identity.encode():
            return table
    except (ArrowException, OSError, ValueError) as problem:
        raise TemperaError(
            f"{path} is damaged ({shortened(str(problem))}): restore it, or delete it and run the "
            "command again."
        ) from None
    raise TemperaError(
        f"{path} is from another run or version than its directory: delete the file, and run the "
        "command again."
    )


def _values(
    column: "pa.Array", wanted: Numbers | None, limit: "pa.ChunkedArray | None"
) -> list[Any]:
    """The values of a column, with lists of numbers as arrays.

    Args:
        column: as it was read.
        wanted: what it must hold.
        limit: the column of `wanted.at_most`.

    Raises:
        ValueError: they are not the wanted ones.
    """
    from pyarrow.compute import list_value_length
    from pyarrow.types import is_large_string, is_string

    kind = column.type
    lists = _is_list(column.type)
    if column.null_count and (wanted is None or wanted.needed):
        raise ValueError("has missing values")
    if wanted is None and not (is_string(kind) or is_large_string(kind)):
        raise ValueError("contains values that are not texts")
    if wanted is None or column.null_count:
        return column.to_pylist()  # type: ignore[no-any-return]
    lengths = list_value_length(column).to_numpy(zero_copy_only=False) if lists else np.zeros(1)
    if wanted.length is not None and (lengths != wanted.length).any():
        raise ValueError(f"has rows that do not have exactly {wanted.length} numbers")
    numbers = _flat(column)
    if not np.issubdtype(numbers.dtype, np.number) and len(numbers):
        raise ValueError("contains values that are not numbers")
    wanted.check(numbers, None if limit is None else _flat(limit.combine_chunks()))
    if not lists or _is_list(kind.value_type):
        return column.to_pylist()  # type: ignore[no-any-return]
    if wanted.length is not None:
        integers = np.issubdtype(numbers.dtype, np.integer)
        small = np.min_scalar_type(-1 - numbers.max(initial=0)) if integers else np.float32
        numbers = numbers.astype(small)
    return np.split(numbers, np.cumsum(lengths))[:-1]


def _flat(column: "pa.Array") -> Array:
    """The numbers of a column of numbers, or of lists of them."""
    while _is_list(column.type):
        column = column.flatten()
    numbers: Array = column.to_numpy(zero_copy_only=False)
    return numbers


def _is_list(kind: "pa.DataType") -> bool:
    from pyarrow.types import is_fixed_size_list, is_list

    return bool(is_list(kind) or is_fixed_size_list(kind))
