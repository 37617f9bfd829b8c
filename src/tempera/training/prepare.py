"""Captions and images → shards of codes, restartable at every shard.

source (entries)  →  encoder (codes of the entries)  →  shard-00000.parquet …  +  manifest.json
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from torch import Tensor

from tempera.acceptance import Exact
from tempera.atomic import writable_directory
from tempera.decode import decode
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.streams import Streams
from tempera.targets.adapter import TransformerTarget
from tempera.training.shards import MANIFEST, Images, Manifest, Shard, check_shard, write_shard
from tempera.training.sources import Broken, Entry, Source, decode_picture
from tempera.vq import VQModel

LISTED = 100
"""Broken entries that the manifest lists one by one; all are counted."""


@dataclass(frozen=True)
class Encoded:
    """Codes int32 [n, length] of the `entries` that could be encoded, and the rest."""

    entries: list[Entry]
    codes: NDArray[np.int32]
    broken: list[Broken]


class Encoder(Protocol):
    """Turns entries into codes."""

    tokenizer: str
    grid: tuple[int, int]
    vocab_size: int

    def describe(self) -> dict[str, Any]:
        """Kind and model identities, for the manifest."""

    def encode(self, entries: list[Entry]) -> Encoded:
        """One batch."""


class VQEncoder:
    """The images' own codes: resize the shorter side, crop the centre, encode.

    Args:
        vq: the target's tokenizer; `tokenizer`: its identity.
        grid: rows and columns of codes, which with the tokenizer's factor fix the picture's size.
    """

    def __init__(self, vq: VQModel, tokenizer: str, grid: tuple[int, int], device: str = "cpu") -> None:
        self.vq, self.tokenizer, self.grid, self.device = vq.to(device), tokenizer, grid, device
        self.vocab_size, self.size = vq.vocab_size, vq.image_size(grid)

    def describe(self) -> dict[str, Any]:
        """Picture size."""
        return {"kind": "vq", "size": list(self.size)}

    @torch.no_grad()
    def encode(self, entries: list[Entry]) -> Encoded:
        """Encode the pictures; one that cannot be decoded is broken."""
        kept: list[Entry] = []
        pixels: list[Tensor] = []
        broken: list[Broken] = []
        for entry in entries:
            if entry.image is None:
                raise TemperaError(f"{entry.where} has a caption but no image: use encoder=target, or give the source its images.")
            try:
                pixels.append(to_pixels(decode_picture(entry.image), self.size))
                kept.append(entry)
            except (OSError, ValueError, SyntaxError) as problem:  # what PIL raises on damaged files
                broken.append(Broken(entry.where, f"unreadable image ({str(problem).splitlines()[0]})"))
        if not kept:
            return Encoded([], np.zeros((0, self.grid[0] * self.grid[1]), np.int32), broken)
        codes = self.vq.encode(torch.stack(pixels).to(self.device)).flatten(1)
        return Encoded(kept, codes.cpu().numpy().astype(np.int32), broken)


class TargetEncoder:
    """Codes that the target draws itself for the captions, autoregressively under its own guidance and temperature: self-distillation.

    Args:
        target: the target; `tokenizer`: the identity of the tokenizer whose codes it draws.
        seed: with an entry's key it fixes the image.
    """

    def __init__(self, target: TransformerTarget, tokenizer: str, seed: int = 0) -> None:
        self.target, self.tokenizer, self.seed = target, tokenizer, seed
        self.grid, self.vocab_size = target.grid, target.vocab_size

    def describe(self) -> dict[str, Any]:
        """Target identity, sampling and seed."""
        return {"kind": "target", "target": self.target.identity, "seed": self.seed, "sampling": asdict(self.target.sampling)}

    def encode(self, entries: list[Entry]) -> Encoded:
        """Draw one image per caption."""
        streams = Streams(self.seed, [entry.key for entry in entries], self.target.device)
        output = decode(self.target, NoDraft(), Exact(), streams, [entry.caption for entry in entries])
        return Encoded(entries, output.tokens.cpu().numpy().astype(np.int32), [])


def to_pixels(image: Image, size: tuple[int, int]) -> Tensor:
    """An RGB image as float32 [3, height, width] in [−1, 1]: scaled to cover `size` = (height, width), centre cropped."""
    height, width = size
    scale = max(height / image.height, width / image.width)
    if (image.height, image.width) != size:
        scaled = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(scaled, Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 127.5 - 1


def prepare(
    source: Source,
    encoder: Encoder,
    directory: Path,
    *,
    shard_size: int = 1000,
    batch_size: int = 32,
    limit: int | None = None,
    max_broken: int = 100,
    report: Callable[[str], None] = print,
    progress: Callable[[int], object] = lambda images: None,
) -> Manifest:
    """Encode a source into a shards directory, continuing whatever intact shards it already holds.

    Args:
        source: what to encode, in order.
        encoder: how.
        directory: the shards directory, begun or new.
        batch_size: entries per encoder call.
        shard_size: source entries per shard; a shard with broken entries holds fewer images.
        limit: read at most so many entries.
        max_broken: stop when more entries than this are broken.
        report: receives one line per broken entry.
        progress: receives the number of images newly encoded, batch by batch.

    Raises:
        TemperaError: an empty source, too many broken entries, a directory of other shards, or one that cannot be written.
    """
    if shard_size < 1 or batch_size < 1 or max_broken < 0 or (limit is not None and limit < 1):
        raise TemperaError("shard_size, batch_size and limit must be at least 1 and max_broken at least 0: correct them.")
    writable_directory(directory)
    fresh = Manifest(encoder.tokenizer, encoder.describe(), source.describe(), encoder.grid, encoder.vocab_size, shard_size, limit)
    manifest = _intact(directory, fresh)
    if manifest.complete:
        return manifest
    for grown in _shards(source, encoder, directory, manifest, batch_size, report, progress):
        manifest = grown
        manifest.save(directory)
        if manifest.broken_count > max_broken:
            raise TemperaError(
                f"{manifest.broken_count} entries of the source are broken, more than max_broken={max_broken} (the first: "
                f"{manifest.broken[0]}): mend them or raise max_broken."
            )
    if not manifest.count:
        reason = f"all its entries are broken (the first: {manifest.broken[0]})" if manifest.broken else "it has no entries"
        raise TemperaError(f"the source {source.describe()} gives no images, as {reason}: give another source.")
    manifest = replace(manifest, complete=True)
    manifest.save(directory)
    return manifest


def _intact(directory: Path, fresh: Manifest) -> Manifest:
    """What is done already: the manifest up to its first missing or damaged shard; `fresh` in a new directory."""
    if not (directory / MANIFEST).exists():
        return fresh
    old = Manifest.load(directory)
    differing = [name for name, value in fresh.recipe.items() if json.dumps(old.recipe[name]) != json.dumps(value)]
    if differing:
        name = differing[0]
        raise TemperaError(
            f"{directory} holds shards of another {name} ({old.recipe[name]}, now {fresh.recipe[name]}): "
            "give another output directory, or the options it was begun with."
        )
    good = tuple(takewhile(lambda shard: check_shard(directory, shard) is None, old.shards))
    if len(good) == len(old.shards):
        return old
    return replace(old, shards=good, broken=old.broken[: sum(shard.broken for shard in good)], complete=False)


def _shards(
    source: Source,
    encoder: Encoder,
    directory: Path,
    manifest: Manifest,
    batch_size: int,
    report: Callable[[str], None],
    progress: Callable[[int], object],
) -> Iterator[Manifest]:
    """Write the shards that are missing, one by one; yields the manifest after each."""
    first = manifest.shards[-1].next if manifest.shards else 0
    end = manifest.limit if manifest.limit is not None else sys.maxsize
    entries = source.read(first)
    while items := list(islice(entries, min(manifest.shard_size, end - first))):
        images, broken = _encode(items, encoder, batch_size, progress)
        for line in broken:
            report(f"broken entry, passed over: {line}")
        name = f"shard-{len(manifest.shards):05d}.parquet"
        digest = write_shard(directory / name, images)
        shard = Shard(name, len(images), len(broken), first, first + len(items), digest)
        first = shard.next
        listed = (*manifest.broken, *map(str, broken))[:LISTED]
        manifest = replace(manifest, shards=(*manifest.shards, shard), broken=listed)
        yield manifest


def _encode(
    items: list[Entry | Broken], encoder: Encoder, batch_size: int, progress: Callable[[int], object]
) -> tuple[Images, list[Broken]]:
    """Encode one shard's entries in batches."""
    good = [item for item in items if isinstance(item, Entry)]
    broken = [item for item in items if isinstance(item, Broken)]
    parts: list[Encoded] = []
    for start in range(0, len(good), batch_size):
        parts.append(encoder.encode(good[start : start + batch_size]))
        progress(len(parts[-1].entries))
    kept = [entry for part in parts for entry in part.entries]
    codes = np.concatenate([part.codes for part in parts] or [np.zeros((0, encoder.grid[0] * encoder.grid[1]), np.int32)])
    broken += [item for part in parts for item in part.broken]
    return Images([entry.key for entry in kept], [entry.caption for entry in kept], codes), broken
