"""Estimates the time and disk space of a preparation from a small timed sample. Writes nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from tempera.data.encoders import CodeEncoder, Encoded
from tempera.data.prepare import entries_to_read, existing_manifest, no_images
from tempera.data.shards import CodedImages, shard_bytes
from tempera.data.sources import Broken, Entry, Source
from tempera.runtime.units import amount, duration, short

SECONDS = 10.0
"""How long the sample is encoded, in seconds; at least one batch."""

PROCESSES = (1, 2, 4, 8)
"""Numbers of processes for which times are printed."""

RESAMPLED = 1000
"""Images in the shard whose size is measured; larger shards take about the same space per image."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a job, per entry of its source.

    Attributes:
        done: entries that the directory already covers; `left`: entries still to read, None if the
            source's size is unknown.
        sampled: entries encoded for this estimate; `images`: the share of them that became images.
        reading, encoding: seconds per entry. Every process reads the whole source, but reads
            pictures from files and archives, and encodes, only for its own share.
        size: bytes per image on disk, codes and caption together.
    """

    done: int
    left: int | None
    sampled: int
    images: float
    reading: float
    encoding: float
    size: float

    def seconds(self, processes: int, entries: int) -> float:
        """Seconds for this many entries, shared by processes that each have a device."""
        return entries * (self.reading + self.encoding / processes)

    def __str__(self) -> str:
        if self.left == 0:
            return f"nothing is left to do: all {self.done:,} entries of the source are encoded"
        entries, what = (
            (self.left, "entries are left")
            if self.left is not None
            else (1000, "entries, as the source's size is unknown")
        )
        times = ", ".join(f"{duration(self.seconds(n, entries))} with {n}" for n in PROCESSES)
        rate = short(1 / max(self.reading + self.encoding, 1e-9))
        images = round(entries * self.images)
        return "\n".join(
            [
                f"sample: {self.sampled:,} entries, {self.images:.0%} of them images, {rate} a "
                "second "
                f"({short(self.reading * 1e3)} ms to read one, {short(self.encoding * 1e3)} ms "
                "to encode it)",
                f"to do: {entries:,} {what}" + (f", {self.done:,} are done" if self.done else ""),
                f"disk: about {amount(images * self.size)} for {images:,} images, "
                f"{amount(self.size)} each with its caption",
                f"time: about {times} processes, if each has its own device",
            ]
        )


def estimate(
    source: Source,
    encoder: CodeEncoder,
    directory: Path,
    *,
    shard_size: int = 1000,
    batch_size: int = 32,
    limit: int | None = None,
    seconds: float = SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> Estimate:
    """Encode the batches that `prepare` would encode next, in memory and for a few seconds.

    Args:
        source, encoder, directory, shard_size, batch_size, limit: as for `prepare`.
        seconds: no new batch starts after this time.
        now: the clock.

    Raises:
        TemperaError: the directory holds shards of another job, or the sample holds no image.
    """
    manifest = existing_manifest(source, encoder, directory, shard_size, batch_size, limit)
    total, done = entries_to_read(source, limit), manifest.next
    left = 0 if manifest.complete else None if total is None else max(total - done, 0)
    if left == 0:
        return Estimate(done, 0, 0, 0.0, 0.0, 0.0, 0.0)
    batches = list(_timed(islice(source.read(done), left), encoder, batch_size, seconds, now))
    kept = [batch.encoded for batch in batches if batch.encoded and batch.encoded.entries]
    if not kept:
        raise no_images(source, [broken for batch in batches for broken in batch.broken])
    steady = batches[1:] or batches  # the first one includes warm-up, and skipping what is done
    entries, timed = sum(batch.entries for batch in batches), sum(batch.entries for batch in steady)
    return Estimate(
        done=done,
        left=left,
        sampled=entries,
        images=sum(len(part.entries) for part in kept) / entries,
        reading=sum(batch.reading for batch in steady) / timed,
        encoding=sum(batch.encoding for batch in steady) / timed,
        size=_size(kept, min(shard_size, RESAMPLED)),
    )


@dataclass(frozen=True)
class _Batch:
    """Entries encoded, the seconds that reading and encoding took, and the result."""

    entries: int
    reading: float
    encoding: float
    encoded: Encoded | None
    broken: list[Broken]


def _timed(
    entries: Iterator[Entry | Broken],
    encoder: CodeEncoder,
    batch_size: int,
    seconds: float,
    now: Callable[[], float],
) -> Iterator[_Batch]:
    """Timed batches, until the time is up or the source ends."""
    began = start = now()
    while items := list(islice(entries, batch_size)):
        read = now()
        good = [item for item in items if isinstance(item, Entry)]
        encoded = encoder.encode(good) if good else None
        end = now()
        broken = [item for item in items if isinstance(item, Broken)] + (
            encoded.broken if encoded else []
        )
        yield _Batch(len(items), read - start, end - read, encoded, broken)
        if end - began >= seconds:
            return
        start = now()


def _size(parts: list[Encoded], rows: int) -> float:
    """Bytes per image: codes as compressed in a shard of `rows` images drawn from the sample, plus
    uncompressed captions and keys.
    """
    codes = np.concatenate([part.codes for part in parts])
    drawn = np.random.default_rng(0).choice(codes.reshape(-1), (rows, codes.shape[1]))
    words = [
        len(entry.key.encode()) + len(entry.caption.encode())
        for part in parts
        for entry in part.entries
    ]
    return shard_bytes(CodedImages([""] * rows, [""] * rows, drawn)) / rows + sum(words) / len(
        words
    )
