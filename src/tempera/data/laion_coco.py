"""LAION-COCO: image URLs and captions in Parquet files, images on the web.

URLs (hub, by commit)  →  shards of images: 00000.parquet …  →  entries

The files and the seed determine the order of the rows. Shard n holds the images of rows
n·shard_size … (n + 1)·shard_size − 1 that could be downloaded. Each shard is written once and
whole, when the network has answered for all of its rows, so an interrupted download resumes with
the next one, and several models can share the images.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeInt, PositiveInt
from tqdm import tqdm
from typing_extensions import override

from tempera.data.downloads import Failure, Limits, download, is_open
from tempera.data.entries import Entry, Source
from tempera.data.prompts import text_of
from tempera.data.sources import matching, state_of
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import (
    check_same,
    fingerprint,
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

FORMAT = 3
"""Of the directory of images."""
PROBES = 8
"""Most servers that are asked whether the network is there."""
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
        return {"kind": "laion_coco", **request}

    @override
    def count(self) -> int | None:
        if not self._manifest():
            return None
        pairs = sum(self._shards())
        return pairs if self.limit is None else min(pairs, self.limit)

    @override
    def read(self, start: int) -> Iterator[Entry]:
        shards = self._shards()
        most = None if self.limit is None else max(self.limit - start, 0)
        return islice(self._pairs(shards, start), most)

    def _pairs(self, shards: Sequence[int], skip: int) -> Iterator[Entry]:
        for number, pairs in enumerate(shards):
            if skip < pairs:
                for batch in pq.ParquetFile(self._shard(number)).iter_batches(64):
                    for row in batch.slice(skip).to_pylist():
                        yield Entry(row["url"], row["key"], row["caption"], row["image"])
                    skip -= min(skip, len(batch))
            else:
                skip -= pairs

    @override
    def fetch(self, processes: Processes) -> None:
        """The main process downloads shards until there are `limit` pairs.

        Raises:
            TemperaError: the URLs are unavailable, the network is, no image could be downloaded, or
                the directory holds images of another table.
        """
        if processes.is_main:
            self._download()
        processes.wait()

    def _download(self) -> None:
        writable_directory(Path(self.images))
        self._store_manifest()
        shards = self._shards()
        pairs = sum(shards)
        missing = Counter[str]()
        rows = islice(self._rows(), len(shards) * self.shard_size, None)
        with tqdm(desc="download images", unit="image", total=self.limit, initial=pairs) as bar:
            while self.limit is None or pairs < self.limit:
                batch = list(islice(rows, self.shard_size))
                if not batch:
                    break
                made = self._make(len(shards), batch, missing)
                shards.append(made)
                pairs += made
                bar.update(made)
        if not pairs:
            reasons = ", ".join(f"{count:,} × {why}" for why, count in missing.items())
            raise TemperaError(
                f"no image of {self.path or self.repository} could be downloaded "
                f"({reasons or 'no captions'}): check the network, or give another source."
            )

    def _shard(self, number: int) -> Path:
        return Path(self.images, f"{number:05d}.parquet")

    def _shards(self) -> list[int]:
        """The numbers of images in the shards before the first missing one."""
        shards: list[int] = []
        while (path := self._shard(len(shards))).is_file():
            try:
                shards.append(pq.read_metadata(path).num_rows)
            except UNREADABLE as problem:
                raise _unreadable(path, problem) from None
        return shards

    def _make(self, number: int, rows: Sequence[Row], missing: Counter[str]) -> int:
        """Make a shard; return how many images it has, and count in `missing` why others have none.

        Raises:
            TemperaError: the network is not there, so that nothing is known of its rows.
        """
        captioned = [(key, url or "", caption) for key, url, caption in rows if caption]
        outcomes = download([url for _, url, _ in captioned], self)
        found = zip(captioned, outcomes, strict=True)
        pairs = [(*row, image) for row, image in found if isinstance(image, bytes)]
        failures = [one for one in outcomes if isinstance(one, Failure)]
        unanswered = [failure.kind for failure in failures if not failure.final]
        if unanswered:
            self._check_network(number, [url for _, url, *_ in pairs], unanswered[0])
        missing.update(failure.kind for failure in failures)
        columns = [[pair[index] for pair in pairs] for index in range(len(COLUMNS))]
        with replacing(self._shard(number)) as temporary:
            pq.write_table(pa.table(columns, COLUMNS), temporary, row_group_size=64)
        return len(pairs)

    def _check_network(self, number: int, addresses: Sequence[str], why: str) -> None:
        """Raise TemperaError if no server whose image came before answers now: what a shard lacks
        then says nothing about its rows.

        Args:
            number: of the shard.
            addresses: of the images that it got.
            why: an image did not come.
        """
        earlier = number
        while not addresses and earlier:
            earlier -= 1
            table = pq.read_table(self._shard(earlier), columns=["url"])
            addresses = table.column("url").to_pylist()
        servers = {urlsplit(address).netloc: address for address in addresses}
        probes = list(servers.values())[-PROBES:]
        if all(map(is_open, download(probes, self))):
            raise TemperaError(
                f"the network or the servers of images do not answer ({why}); what came before is "
                f"in {self.images}: give the same command again when they do."
            )

    def _rows(self) -> Iterator[Row]:
        """The rows of the files that the manifest names: files, row groups of a file, and rows of a
        group in a seeded order.
        """
        manifest = self._manifest()
        order = np.random.default_rng(self.seed)
        pinned = Repository(self.repository, "dataset", manifest["commit"])
        for index in order.permutation(len(manifest["files"])):
            name = manifest["files"][index]
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

    def _store_manifest(self) -> None:
        """Record the request, the commit and its files; refuse a directory of another request."""
        request = {"format": FORMAT, **{name: getattr(self, name) for name in ASKED}}
        if self.path is not None:
            files = matching(self.path, "parquet")
            request["fingerprint"] = fingerprint({"files": state_of(files)})
        manifest = self._manifest()
        if manifest and self._shard(0).is_file():
            begun_with = {name: manifest.get(name) for name in request}
            check_same(Path(self.images), begun_with, request)
            return
        if self.path is None:
            commit = Repository(self.repository, "dataset", self.revision).commit()
            names = sorted(Repository(self.repository, "dataset", commit).files("*.parquet"))
        else:
            commit = ""
            names = [str(file.resolve()) for file in files]
        write_json(Path(self.images, "images.json"), {**request, "commit": commit, "files": names})


def _unreadable(path: Path, problem: Exception) -> TemperaError:
    return TemperaError(
        f"{path} cannot be read ({reason(problem)}): name its columns with source.url= and "
        "source.caption=, or delete it to download it again."
    )
