"""Encodes captions and images into shards of codes; can be resumed at every shard.

source (entries)  →  encoder (codes of the entries)  →  shard-00000.parquet …  +  manifest.json

Several processes share the batches of every shard, and the main process writes it, so the number of
processes does not change the files. A process holds the pictures of one batch at a time.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt
from tqdm import tqdm

from tempera.data.encoders import CodeEncoder, Encoded
from tempera.data.entries import Broken, Entry, Source
from tempera.data.prompts import CaptionCheck
from tempera.data.shards import (
    MANIFEST,
    CodedImages,
    Manifest,
    Positive,
    Shard,
    is_intact,
    shard_file,
    write_shard,
)
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import check_same, writable_directory, write_json

LISTED = 100
"""The manifest counts all broken entries, and lists at most this many one by one."""


def prepare(
    source: Source,
    encoder: CodeEncoder,
    directory: Path,
    *,
    shard_size: Positive,
    batch_size: Positive,
    limit: Positive | None = None,
    max_broken: NonNegativeInt,
    captions: CaptionCheck | None = None,
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
        captions: entries whose captions it refuses are broken.
        processes: the processes that share the work; each must call this function. By default all
            that torchrun started.

    Returns:
        The directory's manifest; only the main process has the hashes of the new shards.

    Raises:
        TemperaError: the source is empty, too many entries are broken, or the directory holds other
            shards or cannot be written.
    """
    manifest = _begun(source, encoder, writable_directory(directory), shard_size, limit)
    if manifest.complete:
        return manifest
    processes = processes or Processes(cpu=True)
    entries = _checked(source.read(manifest.next), captions)
    entries = islice(entries, None if limit is None else max(limit - manifest.next, 0))
    with tqdm(
        desc="encode",
        unit="image",
        total=entries_to_read(source, limit),
        initial=manifest.next,
        disable=not processes.is_main,
    ) as bar:
        while manifest.broken_count <= max_broken:
            shard = _counted(islice(entries, shard_size), bar)
            images, broken = _encoded(encoder, shard, batch_size, processes)
            if not len(images) + len(broken):
                break
            manifest = _grown(manifest, directory, images, broken, processes)
    problem = _refusal(manifest, max_broken)
    if problem is None:
        manifest = replace(manifest, complete=True, left_out=dict(source.left_out))
        _save(manifest, directory, processes)
    processes.wait()
    if problem is not None:
        raise problem
    return manifest


def _grown(
    manifest: Manifest,
    directory: Path,
    images: CodedImages,
    broken: list[Broken],
    processes: Processes,
) -> Manifest:
    """The manifest with one more shard, both written."""
    digest = ""
    if processes.is_main:
        for line in broken:
            tqdm.write(f"skipped a broken entry: {line}")
        digest = write_shard(shard_file(directory, len(manifest.shards)), images)
    shard = Shard(len(images), len(broken), digest)
    listed = (*manifest.broken, *map(str, broken))[:LISTED]
    manifest = replace(manifest, shards=(*manifest.shards, shard), broken=listed)
    _save(manifest, directory, processes)
    return manifest


def _counted(entries: Iterator[Entry | Broken], bar: "tqdm[Any]") -> Iterator[Entry | Broken]:
    for entry in entries:
        yield entry
        bar.update()


def _save(manifest: Manifest, directory: Path, processes: Processes) -> None:
    """Write the manifest; a directory without any image stays free for another source."""
    if processes.is_main and manifest.count:
        write_json(directory / MANIFEST, asdict(manifest))


def _checked(
    entries: Iterator[Entry | Broken], captions: CaptionCheck | None
) -> Iterator[Entry | Broken]:
    """The entries; those whose captions the model cannot use are broken."""
    for entry in entries:
        try:
            if captions is not None and isinstance(entry, Entry):
                captions.check([entry.caption])
            yield entry
        except TemperaError as problem:
            why = str(problem).removeprefix("prompt 1 of 1").partition(";")[0].partition(":")[0]
            yield Broken(entry.where, f"the caption{why}")


def _begun(
    source: Source, encoder: CodeEncoder, directory: Path, shard_size: int, limit: int | None
) -> Manifest:
    """The manifest to resume from: it ends before the first missing or damaged shard, and is empty
    for a new directory.

    Raises:
        TemperaError: the directory holds shards of another job.
    """
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
    if _is_changed(old.source, fresh.source):
        raise TemperaError(
            f"files of the source have changed (in size or time) since {directory} was started: "
            "give another directory, or delete this one, to encode the current files."
        )
    check_same(directory, old.recipe, fresh.recipe)
    intact: list[Shard] = []
    for number, shard in enumerate(old.shards):
        if not is_intact(shard_file(directory, number), shard):
            break
        intact.append(shard)
    if len(intact) == len(old.shards):
        there = entries_to_read(source, limit)
        has_grown = there is not None and there > old.next  # as downloads do, at their end
        return replace(old, complete=False) if has_grown else old
    listed = old.broken[: sum(shard.broken for shard in intact)]
    return replace(old, shards=tuple(intact), broken=listed, complete=False)


def _is_changed(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a source differs from what it was in its fingerprint alone."""
    differing = {name for name in before | now if before.get(name) != now.get(name)}
    return differing == {"fingerprint"}


def entries_to_read(source: Source, limit: int | None) -> int | None:
    """Number of entries that the whole job reads; None if neither source nor limit sets it."""
    counts = [count for count in (source.count(), limit) if count is not None]
    return min(counts, default=None)


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
        f"the source {manifest.source['kind']} yields no images, because {why}: give another "
        "source."
    )


def _encoded(
    encoder: CodeEncoder,
    items: Iterator[Entry | Broken],
    batch_size: int,
    processes: Processes,
) -> tuple[CodedImages, list[Broken]]:
    """Encode one shard's entries as they are read, and join the results of all processes; each of n
    processes encodes every n-th batch.
    """
    broken: list[Broken] = []
    mine: list[Encoded] = []
    batches = 0
    while batch := _batch(items, batch_size, broken):
        if batches % processes.count == processes.rank:
            mine.append(_without_pictures(encoder.encode(batch)))
        batch.clear()  # frees its pictures before the next are read
        batches += 1
    by_process = processes.gather(mine)
    keys: list[str] = []
    captions: list[str] = []
    codes = [np.zeros((0, encoder.length), np.int32)]
    for number in range(batches):
        turn, process = divmod(number, processes.count)
        part = by_process[process][turn]
        keys += [entry.key for entry in part.entries]
        captions += [entry.caption for entry in part.entries]
        codes.append(part.codes)
        broken += part.broken
    return CodedImages(keys, captions, np.concatenate(codes)), broken


def _without_pictures(part: Encoded) -> Encoded:
    return replace(part, entries=[replace(entry, image=None) for entry in part.entries])


def _batch(items: Iterator[Entry | Broken], size: int, broken: list[Broken]) -> list[Entry]:
    """The next entries that are whole; the others join `broken`."""
    batch: list[Entry] = []
    for item in items:
        if isinstance(item, Broken):
            broken.append(item)
        else:
            batch.append(item)
        if len(batch) == size:
            break
    return batch
