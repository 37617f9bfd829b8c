"""Encodes captions and images into shards of codes; can be resumed at every shard.

source (entries)  →  encoder (codes of the entries)  →  shard-00000.parquet …  +  manifest.json

Several processes share the batches of every shard, and the main process writes it, so the number of
processes does not change the files.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tempera.data.encoders import CodeEncoder, Encoded
from tempera.data.shards import MANIFEST, CodedImages, Manifest, Shard, check_shard, write_shard
from tempera.data.sources import Broken, Entry, Source
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import writable_directory

LISTED = 100
"""The manifest counts all broken entries, and lists at most this many one by one."""


def prepare(
    source: Source,
    encoder: CodeEncoder,
    directory: Path,
    *,
    shard_size: int = 1000,
    batch_size: int = 32,
    limit: int | None = None,
    max_broken: int = 100,
    report: Callable[[str], None] = print,
    bar: Any = None,
    processes: Processes | None = None,
) -> Manifest:
    """Encode a source into a directory of shards, and keep the intact shards that it already holds.

    Args:
        source: what to encode, in order.
        encoder: turns entries into codes.
        directory: the directory of shards, new or partly filled.
        batch_size: entries per encoder call.
        shard_size: source entries per shard; a shard with broken entries holds fewer images.
        limit: largest number of entries to read.
        max_broken: stop when more entries than this are broken.
        report: receives one line per broken entry.
        bar: a `tqdm` that counts the source's entries, including those done before; it gets a total
            if the source's size is known.
        processes: the processes that share the work; each must call this function. By default all
            that torchrun started.

    Returns:
        The directory's manifest; only the main process has the hashes of the new shards.

    Raises:
        TemperaError: the source is empty, too many entries are broken, or the directory holds other
            shards or cannot be written.
    """
    if max_broken < 0:
        raise TemperaError(f"max_broken={max_broken} is not possible: give 0 or more.")
    manifest = existing_manifest(
        source, encoder, writable_directory(directory), shard_size, batch_size, limit
    )
    if manifest.complete:
        return manifest
    bar = tqdm(disable=True) if bar is None else bar
    job = _Job(
        source, encoder, directory, batch_size, report, bar, processes or Processes(cpu=True)
    )
    for grown in job.shards(manifest):
        manifest = grown
        if manifest.broken_count > max_broken:
            job.withdraw(manifest)
            raise TemperaError(
                f"{manifest.broken_count} entries of the source are broken, more than "
                f"max_broken={max_broken} (the first: "
                f"{manifest.broken[0]}): repair them or raise max_broken."
            )
    if not manifest.count:
        job.withdraw(manifest)
        raise no_images(source, manifest.broken)
    return job.finish(manifest)


def existing_manifest(
    source: Source,
    encoder: CodeEncoder,
    directory: Path,
    shard_size: int,
    batch_size: int,
    limit: int | None,
) -> Manifest:
    """The manifest to resume from: it ends before the first missing or damaged shard, and is empty
    for a new directory.

    Raises:
        TemperaError: the directory holds shards of another job, or a size is not positive.
    """
    for name, size in (("shard_size", shard_size), ("batch_size", batch_size), ("limit", limit)):
        if size is not None and size < 1:
            raise TemperaError(f"{name}={size} is too small: give at least 1.")
    fresh = Manifest(
        encoder.tokenizer,
        encoder.describe(),
        source.describe(),
        encoder.grid,
        encoder.vocab_size,
        shard_size,
        limit,
    )
    if not (directory / MANIFEST).exists():
        return fresh
    old = Manifest.load(directory)
    differing = [
        name
        for name, value in fresh.recipe.items()
        if json.dumps(old.recipe[name]) != json.dumps(value)
    ]
    if differing:
        name = differing[0]
        raise TemperaError(
            f"{directory} holds shards of another {name} ({old.recipe[name]}, now "
            f"{fresh.recipe[name]}): "
            "give another output directory, or the original options."
        )
    good = tuple(takewhile(lambda shard: check_shard(directory, shard) is None, old.shards))
    if len(good) == len(old.shards):
        return old
    return replace(
        old, shards=good, broken=old.broken[: sum(shard.broken for shard in good)], complete=False
    )


def entries_to_read(source: Source, limit: int | None) -> int | None:
    """Number of entries that the whole job reads; None if neither source nor limit sets it."""
    known = [count for count in (source.count(), limit) if count is not None]
    return min(known) if known else None


def no_images(source: Source, broken: Sequence[object]) -> TemperaError:
    """The error for a source without usable images."""
    reason = (
        f"all its entries are broken (the first: {broken[0]})" if broken else "it has no entries"
    )
    return TemperaError(
        f"the source {source.describe()} yields no images, as {reason}: give another source."
    )


@dataclass
class _Job:
    """One process's part of a preparation; see `prepare`."""

    source: Source
    encoder: CodeEncoder
    directory: Path
    batch_size: int
    report: Callable[[str], None]
    bar: "tqdm[Any]"
    processes: Processes

    def shards(self, manifest: Manifest) -> Iterator[Manifest]:
        """Write the missing shards; yield the saved manifest after each."""
        first, end = manifest.next, manifest.limit if manifest.limit is not None else sys.maxsize
        self.bar.reset(entries_to_read(self.source, manifest.limit))
        self.bar.initial = self.bar.n = self.bar.last_print_n = first
        entries = self.source.read(first)
        while items := list(islice(entries, min(manifest.shard_size, end - first))):
            images, broken = self._encode(items)
            for line in broken:
                self.report(f"skipped a broken entry: {line}")
            name = f"shard-{len(manifest.shards):05d}.parquet"
            digest = write_shard(self.directory / name, images) if self.processes.is_main else ""
            shard = Shard(name, len(images), len(broken), first, first + len(items), digest)
            first = shard.next
            listed = (*manifest.broken, *map(str, broken))[:LISTED]
            manifest = self.keep(replace(manifest, shards=(*manifest.shards, shard), broken=listed))
            yield manifest

    def keep(self, manifest: Manifest) -> Manifest:
        """Save the manifest."""
        if self.processes.is_main:
            manifest.save(self.directory)
        return manifest

    def finish(self, manifest: Manifest) -> Manifest:
        """Save the complete manifest, and wait until it is written."""
        finished = self.keep(replace(manifest, complete=True))
        self.processes.wait()
        return finished

    def withdraw(self, manifest: Manifest) -> None:
        """Release the directory if no entry became an image, before any process stops."""
        if not manifest.count and self.processes.is_main:
            (self.directory / MANIFEST).unlink(missing_ok=True)
            for shard in manifest.shards:
                (self.directory / shard.file).unlink(missing_ok=True)
        self.processes.wait()

    def _encode(self, items: list[Entry | Broken]) -> tuple[CodedImages, list[Broken]]:
        """Encode one shard's entries and join the results of all processes; each of n processes
        encodes every n-th batch.
        """
        good = [item for item in items if isinstance(item, Entry)]
        rank, count = self.processes.rank, self.processes.count
        starts, seen, mine = range(0, len(good), self.batch_size), 0, []
        for start in starts[rank::count]:
            mine.append(
                _without_pictures(self.encoder.encode(good[start : start + self.batch_size]))
            )
            now = min(start + count * self.batch_size, len(good))  # assumes all are equally far
            self.bar.update(now - seen)
            seen = now
        every = self.processes.gather(mine)
        parts = [every[number % count][number // count] for number in range(len(starts))]
        self.bar.update(len(items) - seen)
        kept = [entry for part in parts for entry in part.entries]
        codes = np.concatenate(
            [part.codes for part in parts]
            or [np.zeros((0, self.encoder.grid[0] * self.encoder.grid[1]), np.int32)]
        )
        broken = [item for item in items if isinstance(item, Broken)] + [
            item for part in parts for item in part.broken
        ]
        return CodedImages(
            [entry.key for entry in kept], [entry.caption for entry in kept], codes
        ), broken


def _without_pictures(part: Encoded) -> Encoded:
    """A batch without its pictures, which other processes do not need."""
    return replace(part, entries=[replace(entry, image=None) for entry in part.entries])
