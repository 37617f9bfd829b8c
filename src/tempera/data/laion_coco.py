"""LAION-COCO: image URLs and captions in Parquet files, images on the web.

URLs (hub, by commit)  →  shards of images: 00000.tar …, each with 00000_stats.json
                       →  entries, as from any WebDataset

The files and the seed determine the order of the rows. Shard n holds the images of rows
n·shard_size … (n + 1)·shard_size − 1 that could be downloaded. Each shard is written once and
whole, by any process, so an interrupted download resumes with the missing shards, and several
models can share the images.
"""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm
from typing_extensions import override

from tempera.data.downloads import Failure, Limits, Outcome, download, kinds
from tempera.data.sources import Broken, Entry, Source, TarShards
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_json, replacing, writable_directory, write_json
from tempera.runtime.hub import CannotReach, Gated, Repository

MANIFEST = "images.json"
URLS = ("URL", "url")
CAPTIONS = ("top_caption", "caption", "TEXT", "text")
PER_PIXEL = 0.36
"""Bytes of a pixel of a photograph that is stored, as JPEG of quality 95."""
OPEN_SAMPLE = "Mayfull/laion-coco-1m"
"""A million rows of LAION-COCO that are not gated."""


@dataclass(frozen=True)
class AddressRow:
    """A row of the table: its place, the image's URL and the caption."""

    key: str
    url: str
    caption: str


class AddressTable:
    """Rows of Parquet files in a seeded order. Files, row groups within a file, and rows within a
    group are shuffled, so consecutive rows usually come from one row group.

    Args:
        names: the files, in any order.
        locate: a file's name → its path on this machine, downloaded on demand.
        url, caption: names of the columns; None tries the usual ones.
        seed: seed of the order.
    """

    def __init__(
        self,
        names: list[str],
        locate: Callable[[str], Path],
        url: str | None = None,
        caption: str | None = None,
        seed: int = 0,
    ) -> None:
        order = np.random.default_rng(seed).permutation(len(names))
        self.names = [sorted(names)[place] for place in order]
        self.locate, self.seed, self.wanted = locate, seed, (url, caption)
        self._group: tuple[tuple[int, int], list[AddressRow]] | None = None

    def rows(self, start: int, count: int) -> list[AddressRow]:
        """Rows `start` … `start + count − 1`; fewer at the end of the table."""
        return list(islice(self._from(start), count))

    def _from(self, start: int) -> Iterator[AddressRow]:
        for number, name in enumerate(self.names):
            file = self._opened(name)
            if start >= file.metadata.num_rows:
                start -= file.metadata.num_rows
                continue
            for group in self._permutation(number, -1, file.num_row_groups):
                size = file.metadata.row_group(int(group)).num_rows
                if start < size:
                    yield from self._rows(file, number, int(group))[start:]
                start = max(start - size, 0)

    def _opened(self, name: str) -> pq.ParquetFile:
        path = self.locate(name)
        try:
            return pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as problem:
            raise TemperaError(
                f"{path} cannot be read ({str(problem).splitlines()[0]}): delete it to download "
                "it again."
            ) from None

    def _permutation(self, file: int, group: int, size: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, file, group + 1]).permutation(size)

    def _rows(self, file: pq.ParquetFile, number: int, group: int) -> list[AddressRow]:
        """The rows of a group in their order; the latest group stays in memory."""
        if self._group is None or self._group[0] != (number, group):
            url, caption = self._columns(file, number)
            table = file.read_row_group(group, columns=[url, caption])
            columns = [table[column].to_pylist() for column in (url, caption)]
            name = Path(self.names[number]).stem.replace(".", "-")  # a dot ends a sample's name
            rows = [
                AddressRow(
                    f"{name}-{group}-{place}", str(columns[0][place]), str(columns[1][place] or "")
                )
                for place in self._permutation(number, group, table.num_rows).tolist()
            ]
            self._group = (number, group), rows
        return self._group[1]

    def _columns(self, file: pq.ParquetFile, number: int) -> tuple[str, str]:
        names, found = file.schema_arrow.names, []
        for wanted, usual, option in zip(
            self.wanted, (URLS, CAPTIONS), ("url", "caption"), strict=True
        ):
            name = wanted or next((name for name in usual if name in names), usual[0])
            if name not in names:
                raise TemperaError(
                    f"{self.names[number]} has no column {name!r} (it has {', '.join(names)}): "
                    f"name the right one with source.{option}=."
                )
            found.append(name)
        return found[0], found[1]


class LaionCoco(Source):
    """LAION-COCO's pairs of image and caption, as far as the images can be downloaded.

    Args:
        repository: the hub repository.
        revision: a commit, branch or tag; the first run fixes the commit.
        path: a directory or a glob pattern of Parquet files to read instead of the repository.
        images: directory for the images.
        limit: number of pairs; None takes all.
        url, caption: names of the columns; None tries the usual ones.
        seed: seed of the order.
        shard_size: rows per shard.
        concurrency, timeout, retries, max_bytes, min_side, size, robots: see `downloads.Limits`.
    """

    def __init__(
        self,
        repository: str = "laion/relaion-coco",
        revision: str | None = None,
        path: str | None = None,
        images: str = "outputs/images/laion_coco",
        limit: int | None = None,
        url: str | None = None,
        caption: str | None = None,
        seed: int = 0,
        shard_size: int = 1000,
        concurrency: int = 64,
        timeout: float = 10.0,
        retries: int = 1,
        max_bytes: int = 20_000_000,
        min_side: int = 64,
        size: int = 768,
        robots: bool = True,
    ) -> None:
        self.limits = Limits(concurrency, timeout, retries, max_bytes, min_side, size, robots)
        if shard_size < 1 or (limit is not None and limit < 1):
            raise TemperaError("source.shard_size and limit must be at least 1: correct them.")
        self.repository, self.path = Repository(repository, "dataset", revision), path
        self.images, self.limit, self.shard_size = Path(images), limit, shard_size
        self.columns, self.seed = (url, caption), seed

    @override
    def describe(self) -> dict[str, Any]:
        manifest = {name: value for name, value in self._manifest().items() if name != "files"}
        return {"kind": "laion_coco", **manifest, "pairs": self.count()}

    @override
    def count(self) -> int | None:
        if not (self.images / MANIFEST).is_file():
            return None
        pairs = self._pairs(self._shards())
        return pairs if self.limit is None else min(pairs, self.limit)

    def _pairs(self, shards: int) -> int:
        return sum(self._stats(number)["successes"] for number in range(shards))

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(TarShards(str(self.images)).read(start), self._left(start))

    def _left(self, start: int) -> int | None:
        return None if self.limit is None else max(self.limit - start, 0)

    @override
    def to_store(self) -> dict[Path, int]:
        """The images that `limit` still lacks, as large as those that are here, or else as
        photographs of 4:3 whose shorter side has `size` pixels. Nothing without a limit.
        """
        here = self._pairs(shards := self._shards())
        if self.limit is None or here >= self.limit:
            return {}
        each = PER_PIXEL * 4 / 3 * self.limits.size**2
        if here:
            tars = (self.images / f"{number:05d}.tar" for number in range(shards))
            each = sum(tar.stat().st_size for tar in tars) / here
        return {self.images: round((self.limit - here) * each)}

    @override
    def fetch(self, processes: Processes) -> None:
        """Download shards until there are `limit` pairs. Each of n processes takes every n-th one.

        Raises:
            TemperaError: the URLs are unavailable, no image could be downloaded, or the directory
                holds images of another table.
        """
        writable_directory(self.images)
        table = self._table(processes)
        with tqdm(
            desc="download images", unit="image", total=self.limit, disable=not processes.is_main
        ) as bar:
            while True:
                first = min(processes.gather(self._shards()))  # the same in all processes
                pairs = self._pairs(first)
                bar.n = pairs if self.limit is None else min(pairs, self.limit)
                bar.refresh()
                if self.limit is not None and pairs >= self.limit:
                    break
                made = self._download(table, first + processes.rank)
                if not all(processes.gather(made)):
                    break  # the table has ended
        if not self.count():
            raise TemperaError(
                f"no image of {self._place} could be downloaded ({self.failures() or 'no rows'}): "
                "check the network, or give another source."
            )
        if processes.is_main and (failures := self.failures()):
            print(f"{self.count():,} pairs in {self.images}; URLs skipped: {failures}")

    def failures(self) -> str:
        """How many URLs failed, by kind of failure."""
        counted: Counter[str] = Counter()
        for number in range(self._shards()):
            counted.update(self._stats(number)["failures"])
        return ", ".join(f"{kind} {count:,}" for kind, count in counted.most_common())

    def _shards(self) -> int:
        """Number of shards on disk before the first missing one."""
        number = 0
        while (self.images / f"{number:05d}_stats.json").is_file():
            number += 1
        return number

    def _stats(self, number: int) -> dict[str, Any]:
        return dict(read_json(self.images / f"{number:05d}_stats.json"))

    def _download(self, table: AddressTable, number: int) -> bool:
        """Make one shard; False if the table has no rows for it."""
        stats = self.images / f"{number:05d}_stats.json"
        if stats.is_file():
            return True
        rows = table.rows(number * self.shard_size, self.shard_size)
        if not rows:
            return False
        outcomes = [Failure("no caption") if not row.caption.strip() else None for row in rows]
        wanted = [row for row, outcome in zip(rows, outcomes, strict=True) if outcome is None]
        got = iter(download([row.url for row in wanted], self.limits))
        all_outcomes = [outcome or next(got) for outcome in outcomes]
        _write_tar(self.images / f"{number:05d}.tar", rows, all_outcomes)
        good = sum(isinstance(outcome, bytes) for outcome in all_outcomes)
        write_json(stats, {"count": len(rows), "successes": good, "failures": kinds(all_outcomes)})
        return True

    @property
    def _place(self) -> str:
        return self.path or self.repository.id

    def _manifest(self) -> dict[str, Any]:
        """The manifest of the images directory; before the first download, that of this request."""
        if (self.images / MANIFEST).is_file():
            return dict(read_json(self.images / MANIFEST))
        return self._asked

    @cached_property
    def _asked(self) -> dict[str, Any]:
        url, caption = self.columns
        asked = {
            "place": self._place, "url": url, "caption": caption, "seed": self.seed,
            "shard_size": self.shard_size, "size": self.limits.size,
        }  # fmt: skip
        return {**asked, "revision": self.repository.revision if self.path is None else None}

    def _table(self, processes: Processes) -> AddressTable:
        """The table that the manifest describes; the main process writes the manifest first."""
        if processes.is_main:
            self._keep_manifest()
        processes.wait()
        manifest = self._manifest()
        pinned = Repository(self.repository.id, "dataset", manifest["commit"])
        locate = Path if self.path is not None else pinned.file
        return AddressTable(manifest["files"], locate, *self.columns, seed=self.seed)

    def _keep_manifest(self) -> None:
        known = self._manifest() if (self.images / MANIFEST).is_file() else None
        for name, value in self._asked.items() if known else ():
            if known and known.get(name) != value:
                raise TemperaError(
                    f"{self.images} holds images of another {name} ({known.get(name)}, now "
                    f"{value}): give another directory with source.images=DIR, or the original "
                    "options."
                )
        if known is None:
            commit, files = self._resolved()
            write_json(self.images / MANIFEST, {**self._asked, "commit": commit, "files": files})

    def _resolved(self) -> tuple[str | None, list[str]]:
        """The commit and its Parquet files, or the local files."""
        if self.path is not None:
            folder = Path(self.path)
            found = folder.glob("*.parquet") if folder.is_dir() else folder.parent.glob(folder.name)
            files = sorted(str(file.resolve()) for file in found)
            if not files:
                raise TemperaError(f"{self.path} holds no Parquet files: give source.path=DIR.")
            return None, files
        try:
            commit = self.repository.commit()
            pinned = Repository(self.repository.id, "dataset", commit)
            files = pinned.files("*.parquet")
            if files:
                pinned.file(files[0])  # fails if the repository is gated
        except Gated as problem:
            raise TemperaError(
                f"{str(problem).removesuffix('.')}; or use a sample that is not gated, with "
                f"source.repository={OPEN_SAMPLE}."
            ) from None
        except CannotReach as problem:
            raise TemperaError(
                f"{problem.repository.id} cannot be reached ({problem.reason}), and "
                f"{self.images} holds no images yet: run this with a network, or give Parquet "
                "files of URLs with source.path=DIR."
            ) from None
        if not files:
            raise TemperaError(
                f"{self.repository.id} holds no Parquet files: give another source.repository=."
            )
        return commit, files


def _write_tar(path: Path, rows: list[AddressRow], outcomes: list[Outcome]) -> None:
    """Write a WebDataset archive of the downloaded images, with their captions and URLs."""
    with replacing(path) as temporary, tarfile.open(temporary, "w") as archive:
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, Failure):
                continue
            fields = {"caption": row.caption, "url": row.url}
            members = {"jpg": outcome, "json": json.dumps(fields, ensure_ascii=False).encode()}
            for suffix, body in members.items():
                member = tarfile.TarInfo(f"{row.key}.{suffix}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
