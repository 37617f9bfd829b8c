"""A run's results on disk: keyed by prompt id, written as they come, each piece whole or absent.

A run directory holds
    run.json            what made it: model, method, sampling, seed; another setting is refused
    records/            generated tokens and their trace, a part file per batch
    images/<id>.png     the pictures
    judged-…/           what the networks of the metrics say of each picture
    timings/            one timed pair per prompt, or per batch
and, made from these at the end: metrics.json, results.parquet, grid.png, acceptance_map.png, and of drafts accepted.png.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tempera.atomic import read_json, replacing, writable_directory, write_json
from tempera.errors import TemperaError

Row = dict[str, Any]


class Store:
    """Rows keyed by their `id`, in Parquet part files named after the ids within; a part appears whole or not at all.

    Several processes may add rows to one store. When an id appears in two parts, either row serves.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def rows(self) -> dict[str, Row]:
        """All rows by id."""
        found: dict[str, Row] = {}
        for path in sorted(self.directory.glob("*.parquet")):
            for row in _read(path):
                found[row["id"]] = row
        return found

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Those of the ids that have no row yet."""
        present = {row["id"] for path in self.directory.glob("*.parquet") for row in _read(path, ["id"])}
        return [name for name in ids if name not in present]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows as one part, all or none."""
        name = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()[:16]
        write_table(self.directory / f"{name}.parquet", rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file, atomically; columns in the order of the first row; NaN, which nothing equals, as null."""
    columns = {name: [_cell(row.get(name)) for row in rows] for name in (rows[0] if rows else {})}
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _read(path: Path, columns: list[str] | None = None) -> list[Row]:
    try:
        rows: list[Row] = pq.read_table(path, columns=columns, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError) as problem:
        raise TemperaError(f"{path} is damaged ({str(problem).splitlines()[0][:80]}): delete it and run again.") from None
    return rows


def claim(directory: Path, identity: Mapping[str, Any], about: Mapping[str, Any], write: bool = True) -> None:
    """Make the run directory this run's own, or check that it is.

    Args:
        directory: created when it does not exist.
        identity: the settings that results depend on; a directory made with others is refused.
        about: what else to note in run.json; noted anew at every start.
        write: False in processes other than the main one, which only check.

    Raises:
        TemperaError: the directory cannot be written, or belongs to a run with other settings.
    """
    path = directory / "run.json"
    if write:
        writable_directory(directory)
    if path.is_file():
        known = read_json(path).get("identity")
        for name in {**identity, **(known if isinstance(known, dict) else {})}:
            then, now = known.get(name) if isinstance(known, dict) else None, identity.get(name)
            if then != now:
                raise TemperaError(
                    f"{directory} holds a run made with {name}={_short(then)} and this one has {name}={_short(now)}: "
                    "choose another directory (hydra.run.dir=DIR), or the same settings to go on with it."
                )
    if write:
        write_json(path, {"identity": dict(identity), **about})


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
