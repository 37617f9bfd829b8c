"""LAION-COCO: image URLs and captions in Parquet files, images on the web.

URLs (hub, by commit)  →  shards of images: 00000.parquet …  →  entries

The files and the seed determine the order of the rows. Shard n holds the images of rows
n·shard_size … (n + 1)·shard_size − 1 that could be downloaded. Each shard
is written once and whole, so an interrupted download resumes with the next one, and several models
can share the images.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeInt, PositiveInt
from tqdm import tqdm
from typing_extensions import override

from tempera.data.downloads import Limits, download
from tempera.data.entries import Broken, Entry, Item, LeftOut, Source, Tally, tallied
from tempera.data.prompts import text_of
from tempera.data.sources import matching
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import (
    check_same,
    read_json,
    reason,
    replacing,
    writable_directory,
    write_json,
)
from tempera.runtime.hub import Repository

URLS = ("URL", "url")
CAPTIONS = ("top_caption", "caption", "TEXT", "text")
ASKED = ("repository", "revision", "path", "url", "caption", "seed", "shard_size", "size")
"""Options on which the images depend."""
COLUMNS = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in ("key", "url", "caption")]
    + [pa.field("image", pa.binary(), nullable=False)]
)
"""Of a shard."""

LEFT_OUT = "left_out"
"""Metadata of a shard: the rows that it lacks, by the reason."""
UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError)
"""What reading a table raises."""

Row = tuple[str, str | None, str | None]
"""Key, URL and caption."""


@dataclass
class LaionCoco(Limits, Source):
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
        concurrency and others: see `downloads.Limits`.
    """

    repository: str
    images: str
    seed: NonNegativeInt
    shard_size: PositiveInt
    revision: str | None = None
    path: str | None = None
    limit: PositiveInt | None = None
    url: str | None = None
    caption: str | None = None

    @override
    def describe(self) -> dict[str, Any]:
        request = {name: value for name, value in self._manifest().items() if name != "files"}
        return {"kind": "laion_coco", **request, "pairs": self.count()}

    @override
    def count(self) -> int | None:
        if not self._manifest():
            return None
        pairs = sum(self._shards())
        return pairs if self.limit is None else min(pairs, self.limit)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        most = None if self.limit is None else max(self.limit - start, 0)
        return islice(tallied(self, partial(self._pairs, start)), most)

    def _pairs(self, skip: int, tally: Tally) -> Iterator[Item]:
        for number, pairs in enumerate(self._shards()):
            file = pq.ParquetFile(self._shard(number))
            for kind, rows in _left_out(file).items():
                tally.given += rows
                yield LeftOut(kind, rows)
            if skip < pairs:
                for batch in file.iter_batches(64):
                    for row in batch.slice(skip).to_pylist():
                        tally.given += 1
                        yield Entry(row["url"], row["key"], row["caption"], row["image"])
                    skip -= min(skip, len(batch))
            else:
                skip -= pairs

    @override
    def fetch(self, processes: Processes) -> None:
        """The main process downloads shards until there are `limit` pairs.

        Raises:
            TemperaError: the URLs are unavailable, no image could be downloaded, or the directory
                holds images of another table.
        """
        if processes.is_main:
            self._download()
        processes.wait()

    def _download(self) -> None:
        writable_directory(Path(self.images))
        self._keep_manifest()
        pairs = self._shards()
        failed = Counter[str]()
        rows = islice(self._rows(), len(pairs) * self.shard_size, None)
        with tqdm(
            desc="download images", unit="image", total=self.limit, initial=sum(pairs)
        ) as bar:
            while self.limit is None or sum(pairs) < self.limit:
                batch = list(islice(rows, self.shard_size))
                if not batch:
                    break
                pairs.append(self._make(self._shard(len(pairs)), batch, failed))
                bar.update(pairs[-1])
        if not sum(pairs):
            kinds = ", ".join(f"{kind} {times:,}" for kind, times in failed.most_common())
            raise TemperaError(
                f"no image of {self.path or self.repository} could be downloaded "
                f"({kinds or 'no captions'}): check the network, or give another source."
            )

    def _shard(self, number: int) -> Path:
        return Path(self.images, f"{number:05d}.parquet")

    def _shards(self) -> list[int]:
        """Pairs in each shard before the first missing one."""
        pairs: list[int] = []
        while (path := self._shard(len(pairs))).is_file():
            try:
                pairs.append(pq.ParquetFile(path).metadata.num_rows)
            except UNREADABLE as problem:
                raise _unreadable(path, problem) from None
        return pairs

    def _make(self, shard: Path, rows: list[Row], failed: Counter[str]) -> int:
        """Make a shard, which keeps the numbers of rows that it lacks by the reason; the number of
        its pairs. Counts failures by their kinds.
        """
        captioned = [(key, url or "", caption) for key, url, caption in rows if caption]
        downloads = download([url for _, url, _ in captioned], self)
        problems = Counter(failure for failure in downloads if isinstance(failure, str))
        failed.update(problems)
        left_out = {f"images not downloaded ({kind})": rows for kind, rows in problems.items()}
        captionless = len(rows) - len(captioned)
        if captionless:
            left_out["rows without a caption"] = captionless
        pairs = [
            (*row, image)
            for row, image in zip(captioned, downloads, strict=True)
            if isinstance(image, bytes)
        ]
        columns = [[pair[place] for pair in pairs] for place in range(len(COLUMNS))]
        schema = COLUMNS.with_metadata({LEFT_OUT: json.dumps(left_out)})
        with replacing(shard) as temporary:
            pq.write_table(pa.table(columns, schema), temporary, row_group_size=64)
        return len(pairs)

    def _rows(self) -> Iterator[Row]:
        """The rows of the files that the manifest names: files, row groups of a file, and rows of a
        group in a seeded order.
        """
        manifest = self._manifest()
        order = np.random.default_rng(self.seed)
        pinned = Repository(self.repository, "dataset", manifest["commit"])
        for place in order.permutation(len(manifest["files"])):
            name = manifest["files"][place]
            path = Path(name) if self.path is not None else pinned.file(name)
            try:
                file = pq.ParquetFile(path)
                names = file.schema_arrow.names
                url = self.url or next((name for name in URLS if name in names), URLS[0])
                caption = self.caption or next((name for name in CAPTIONS if name in names), "")
                for group in order.permutation(file.num_row_groups):
                    table = file.read_row_group(group, [url, caption]).select([url, caption])
                    addresses = table.column(0).to_pylist()
                    texts = table.column(1).to_pylist()
                    for row in order.permutation(len(table)):
                        key = f"{Path(name).stem}-{group}-{row}"
                        yield key, text_of(addresses[row]), text_of(texts[row])
            except UNREADABLE as problem:
                raise _unreadable(path, problem) from None

    def _manifest(self) -> dict[str, Any]:
        path = Path(self.images, "images.json")
        return dict(read_json(path)) if path.is_file() else {}

    def _keep_manifest(self) -> None:
        """Record the request, the commit and its files; refuse a directory of another request."""
        request = {name: getattr(self, name) for name in ASKED}
        manifest = self._manifest()
        if manifest and self._shards():
            begun_with = {name: manifest.get(name) for name in ASKED}
            check_same(Path(self.images), begun_with, request)
            return
        if self.path is None:
            commit = Repository(self.repository, "dataset", self.revision).commit()
            files = sorted(Repository(self.repository, "dataset", commit).files("*.parquet"))
        else:
            commit = ""
            files = [str(file.resolve()) for file in matching(self.path, "parquet")]
        write_json(Path(self.images, "images.json"), {**request, "commit": commit, "files": files})


def _left_out(file: pq.ParquetFile) -> dict[str, int]:
    """The rows that a shard lacks, by the reason."""
    metadata = file.schema_arrow.metadata or {}
    return dict(json.loads(metadata.get(LEFT_OUT.encode(), b"{}")))


def _unreadable(path: Path, problem: Exception) -> TemperaError:
    return TemperaError(
        f"{path} cannot be read ({reason(problem)}): name its columns with source.url= and "
        "source.caption=, or delete it to download it again."
    )
