"""Encodes captions and images into shards of codes; can be resumed at every shard.

source (entries)  →  encoder (codes of the entries)  →  shard-00000.parquet …  +  manifest.json

Several processes share the batches of every shard, and the main process writes it, so the number of
processes does not change the files.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tempera.data.encoders import CodeEncoder
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
    if batch_size < 1 or max_broken < 0:
        name = "batch_size" if batch_size < 1 else "max_broken"
        raise TemperaError(f"{name} is too small: give a larger one.", option=name)
    manifest = _begun(source, encoder, writable_directory(directory), shard_size, limit)
    if manifest.complete:
        return manifest
    processes = processes or Processes(cpu=True)
    bar = tqdm(disable=True) if bar is None else bar
    bar.reset(entries_to_read(source, limit))
    bar.initial = bar.n = bar.last_print_n = manifest.next
    for items in _parts(source, manifest):
        images, broken = _encoded(encoder, items, batch_size, bar, processes)
        for line in broken:
            report(f"skipped a broken entry: {line}")
        digest = write_shard(directory / manifest.new, images) if processes.is_main else ""
        manifest = _grown(manifest, len(images), broken, digest)
        if processes.is_main:
            manifest.save(directory)
        if manifest.broken_count > max_broken:
            break
    return _finished(manifest, directory, max_broken, processes)


def _grown(manifest: Manifest, count: int, broken: list[Broken], digest: str) -> Manifest:
    """The manifest with one more shard."""
    end = manifest.next + count + len(broken)
    shard = Shard(manifest.new, count, len(broken), manifest.next, end, digest)
    listed = (*manifest.broken, *map(str, broken))[:LISTED]
    return replace(manifest, shards=(*manifest.shards, shard), broken=listed)


def _finished(
    manifest: Manifest, directory: Path, max_broken: int, processes: Processes
) -> Manifest:
    """The complete manifest, saved; a directory without any image is released."""
    problem = _refusal(manifest, max_broken)
    if problem is None:
        manifest = replace(manifest, complete=True)
    if problem is None and processes.is_main:
        manifest.save(directory)
    elif not manifest.count and processes.is_main:
        for path in (MANIFEST, *(shard.file for shard in manifest.shards)):
            (directory / path).unlink(missing_ok=True)
    processes.wait()
    if problem is not None:
        raise problem
    return manifest


def _begun(
    source: Source, encoder: CodeEncoder, directory: Path, shard_size: int, limit: int | None
) -> Manifest:
    """The manifest to resume from: it ends before the first missing or damaged shard, and is empty
    for a new directory.

    Raises:
        TemperaError: the directory holds shards of another job, or a size is not positive.
    """
    for name, size in (("shard_size", shard_size), ("limit", limit)):
        if size is not None and size < 1:
            raise TemperaError(f"{name}={size} is too small: give at least 1.", option=name)
    fresh = Manifest(
        encoder.tokenizer, encoder.describe(), source.describe(), encoder.grid, encoder.vocab_size,
        shard_size, limit,
    )  # fmt: skip
    if not (directory / MANIFEST).exists():
        return fresh
    old = Manifest.load(directory)
    for name, value in fresh.recipe.items():
        if json.dumps(old.recipe[name]) != json.dumps(value):
            raise TemperaError(
                f"{directory} holds shards of another {name} ({old.recipe[name]}, now {value}): "
                "give another output directory, or the original options."
            )
    good = tuple(takewhile(lambda shard: check_shard(directory, shard) is None, old.shards))
    if len(good) == len(old.shards):
        return old
    listed = old.broken[: sum(shard.broken for shard in good)]
    return replace(old, shards=good, broken=listed, complete=False)


def entries_to_read(source: Source, limit: int | None) -> int | None:
    """Number of entries that the whole job reads; None if neither source nor limit sets it."""
    known = [count for count in (source.count(), limit) if count is not None]
    return min(known) if known else None


def _parts(source: Source, manifest: Manifest) -> Iterator[list[Entry | Broken]]:
    """The entries of the missing shards."""
    end = sys.maxsize if manifest.limit is None else manifest.limit
    entries = islice(source.read(manifest.next), max(end - manifest.next, 0))
    while items := list(islice(entries, manifest.shard_size)):
        yield items


def _refusal(manifest: Manifest, max_broken: int) -> TemperaError | None:
    """The error for a source without usable images, or with too many broken entries."""
    first = f"the first: {manifest.broken[0]}" if manifest.broken else ""
    if manifest.broken_count > max_broken:
        return TemperaError(
            f"{manifest.broken_count} entries of the source are broken, more than "
            f"max_broken={max_broken} ({first}): repair them or raise max_broken."
        )
    if manifest.count:
        return None
    why = f"all its entries are broken ({first})" if first else "it has no entries"
    return TemperaError(
        f"the source {manifest.source['kind']} yields no images, as {why}: give another source."
    )


def _encoded(
    encoder: CodeEncoder,
    items: list[Entry | Broken],
    batch_size: int,
    bar: Any,
    processes: Processes,
) -> tuple[CodedImages, list[Broken]]:
    """Encode one shard's entries and join the results of all processes; each of n processes encodes
    every n-th batch.
    """
    good = [item for item in items if isinstance(item, Entry)]
    starts, seen, mine = range(0, len(good), batch_size), 0, []
    for start in starts[processes.rank :: processes.count]:
        part = encoder.encode(good[start : start + batch_size])
        bare = [replace(entry, image=None) for entry in part.entries]  # others need no pictures
        mine.append(replace(part, entries=bare))
        now = min(start + processes.count * batch_size, len(good))  # as if all were equally far
        bar.update(now - seen)
        seen = now
    every = processes.gather(mine)
    bar.update(len(items) - seen)
    parts = [every[n % processes.count][n // processes.count] for n in range(len(starts))]
    kept = [entry for part in parts for entry in part.entries]
    none = np.zeros((0, encoder.grid[0] * encoder.grid[1]), np.int32)
    codes = np.concatenate([none, *(part.codes for part in parts)])
    broken = [item for item in items if isinstance(item, Broken)]
    broken += [item for part in parts for item in part.broken]
    images = CodedImages([one.key for one in kept], [one.caption for one in kept], codes)
    return images, broken
