"""LAION-COCO: image URLs and captions in Parquet files, images on the web.

URLs (hub, by commit)  →  shards of images: 00000.parquet …  →  entries

The files and the seed determine the order of the rows. Shard n holds the images of rows
n·shard_size … (n + 1)·shard_size − 1 that could be downloaded. Each shard is written once and
whole, when the network has answered for all of its rows, so an interrupted download resumes with
the next one, and several models can share the images. Rows whose server did not answer stay open: a
later run asks for them again once the list is at its end, in further shards.
"""

import json
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

from tempera.data.downloads import Limits, download, is_open
from tempera.data.entries import Entry, Source, shown
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

FORMAT = 2
"""Of the directory of images."""
STATE = "tempera"
"""Metadata of a shard: the fields of `Shard` but the pairs."""
PROBES = 8
"""Most servers that are asked whether the network is there."""
UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError)
"""What reading a table raises."""

Row = tuple[str, str | None, str | None]
"""Key, URL and caption."""


@dataclass(frozen=True)
class Shard:
    """What is in a shard's file beside its images.

    Attributes:
        pairs: number of images.
        left_out: numbers of rows that it lacks for good, by the reason.
        open: rows that it lacks for now, and why.
        again: number of open rows of earlier shards that were its rows; 0 if rows of the list were.
    """

    pairs: int
    left_out: dict[str, int]
    open: list[tuple[Row, str]]
    again: int


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
        pairs = sum(shard.pairs for shard in self._shards())
        return pairs if self.limit is None else min(pairs, self.limit)

    @override
    def read(self, start: int) -> Iterator[Entry]:
        shards = self._shards()
        self.left_out = _missing(shards)
        most = None if self.limit is None else max(self.limit - start, 0)
        return islice(self._pairs(shards, start), most)

    def _pairs(self, shards: Sequence[Shard], skip: int) -> Iterator[Entry]:
        for number, shard in enumerate(shards):
            if skip < shard.pairs:
                for batch in pq.ParquetFile(self._shard(number)).iter_batches(64):
                    for row in batch.slice(skip).to_pylist():
                        yield Entry(row["url"], row["key"], row["caption"], row["image"])
                    skip -= min(skip, len(batch))
            else:
                skip -= shard.pairs

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
        pairs = sum(shard.pairs for shard in shards)
        with tqdm(desc="download images", unit="image", total=self.limit, initial=pairs) as bar:
            for batch, again in self._batches(shards):
                if self.limit is not None and pairs >= self.limit:
                    break
                shards.append(self._make(len(shards), batch, again))
                pairs += shards[-1].pairs
                bar.update(shards[-1].pairs)
        missing = _missing(shards)
        if not pairs:
            raise TemperaError(
                f"no image of {self.path or self.repository} could be downloaded "
                f"({shown(missing) or 'no rows'}): check the network, or give another source."
            )
        unanswered = len(_open(shards))
        if unanswered and (self.limit is None or pairs < self.limit):
            print(
                f"{unanswered:,} images are missing because their servers did not answer: run the "
                "command again to try these once more."
            )

    def _batches(self, shards: Sequence[Shard]) -> Iterator[tuple[list[Row], int]]:
        """The rows of the next shards, and how many of them were open: first those of the list,
        then those that are open already.
        """
        of_list = sum(not shard.again for shard in shards)
        open_rows = _open(shards)
        rows = islice(self._rows(), of_list * self.shard_size, None)
        while batch := list(islice(rows, self.shard_size)):
            yield batch, 0
        for first in range(0, len(open_rows), self.shard_size):
            batch = [row for row, _ in open_rows[first : first + self.shard_size]]
            yield batch, len(batch)

    def _shard(self, number: int) -> Path:
        return Path(self.images, f"{number:05d}.parquet")

    def _shards(self) -> list[Shard]:
        """The shards before the first missing one."""
        shards: list[Shard] = []
        while (path := self._shard(len(shards))).is_file():
            try:
                metadata = pq.read_metadata(path)
                state = json.loads((metadata.metadata or {})[STATE.encode()])
                rows = [((key, url, caption), why) for key, url, caption, why in state.pop("open")]
                shards.append(Shard(pairs=metadata.num_rows, open=rows, **state))
            except UNREADABLE as problem:
                raise _unreadable(path, problem) from None
        return shards

    def _make(self, number: int, rows: Sequence[Row], again: int) -> Shard:
        """Make a shard.

        Raises:
            TemperaError: the network is not there, so that nothing is known of its rows.
        """
        captioned = [(key, url or "", caption) for key, url, caption in rows if caption]
        outcomes = download([url for _, url, _ in captioned], self)
        pairs = []
        left_out = Counter[str]()
        left_out["rows without a caption"] = len(rows) - len(captioned)
        open_rows = list[tuple[Row, str]]()
        for row, outcome in zip(captioned, outcomes, strict=True):
            if isinstance(outcome, bytes):
                pairs.append((*row, outcome))
            elif outcome.final:
                left_out[_not_downloaded(outcome.kind)] += 1
            else:
                open_rows.append((row, outcome.kind))
        if open_rows:
            self._check_network(number, [url for _, url, *_ in pairs], open_rows[0][1])
        state = {
            "left_out": +left_out,
            "open": [(*row, why) for row, why in open_rows],
            "again": again,
        }
        columns = [[pair[index] for pair in pairs] for index in range(len(COLUMNS))]
        schema = COLUMNS.with_metadata({STATE: json.dumps(state)})
        with replacing(self._shard(number)) as temporary:
            pq.write_table(pa.table(columns, schema), temporary, row_group_size=64)
        return Shard(len(pairs), +left_out, open_rows, again)

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
                f"the network or the image servers do not answer ({why}): run the command again "
                f"when they do; the images downloaded so far are in {self.images}."
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


def _open(shards: Sequence[Shard]) -> list[tuple[Row, str]]:
    """The rows that are open, and why."""
    rows = [row for shard in shards for row in shard.open]
    return rows[sum(shard.again for shard in shards) :]


def _missing(shards: Sequence[Shard]) -> Counter[str]:
    """Numbers of rows without an image, by the reason."""
    missing = Counter[str]()
    for shard in shards:
        missing.update(shard.left_out)
    missing.update(_not_downloaded(why) for _, why in _open(shards))
    return missing


def _not_downloaded(why: str) -> str:
    return f"images not downloaded ({why})"


def _unreadable(path: Path, problem: Exception) -> TemperaError:
    return TemperaError(
        f"{path} cannot be read ({reason(problem)}): name its columns with source.url= and "
        "source.caption=, or delete it to download it again."
    )
