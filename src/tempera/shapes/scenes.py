"""Scenes of the world as prompts, as pictures with captions, and as codes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import override

from tempera.data.encoders import VQEncoder
from tempera.data.entries import Entry, Source
from tempera.data.prompts import Count, Prompt
from tempera.data.shards import CodedImages
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.shapes.world import World
from tempera.targets.transformer import TransformerTarget
from tempera.training.dataset import HOLDOUT


class WorldCodes:
    """The shapes world's scenes, encoded as they are needed: unlimited. Scene 0, 20, 40, … are the
    hold-out.
    """

    def __init__(self, encoder: VQEncoder, seed: int = 0) -> None:
        self.world = World(seed)
        self.encoder = encoder

    def train(self, positions: list[int]) -> CodedImages:
        """Scenes that are not a multiple of 20."""
        return self._scenes([position + position // (HOLDOUT - 1) + 1 for position in positions])

    def holdout(self, positions: list[int]) -> CodedImages:
        """Scenes that are multiples of 20."""
        return self._scenes([position * HOLDOUT for position in positions])

    def _scenes(self, indices: list[int]) -> CodedImages:
        entries = [_entry(self.world, index, str(index)) for index in indices]
        return CodedImages(
            [entry.key for entry in entries],
            [entry.caption for entry in entries],
            self.encoder.encode(entries).codes,
        )


def _entry(world: World, index: int, key: str) -> Entry:
    sample = world.sample(index)
    picture = Image.fromarray((sample.image * 255).round().clip(0, 255).astype(np.uint8))
    return Entry(f"world scene {index}", key, sample.caption, picture)


class WorldScenes(Source):
    """The shapes world's scenes `first` … `first + count − 1`."""

    def __init__(self, count: PositiveInt, seed: NonNegativeInt, first: NonNegativeInt) -> None:
        self.world = World(seed)
        self.scenes = count
        self.first = first

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "kind": "world",
            "seed": self.world.seed,
            "terse": self.world.terse,
            "pairs": self.world.pairs,
            "first": self.first,
            "count": self.scenes,
        }

    @override
    def count(self) -> int | None:
        return self.scenes

    @override
    def read(self, start: int) -> Iterator[Entry]:
        for index in range(self.first + start, self.first + self.scenes):
            yield _entry(self.world, index, f"world-{self.world.seed}-{index}")


def world_prompts(
    limit: Count, offset: NonNegativeInt = 0, seed: NonNegativeInt = 1
) -> list[Prompt]:
    """Captions `offset` … `offset + limit − 1` of the shapes world with that seed; ids are
    world-000123.

    The default seed differs from the training world's (0), so the scenes are unseen.
    """
    world = World(seed)
    return [
        Prompt(f"world-{index:06d}", world.sample(index).caption)
        for index in range(offset, offset + limit)
    ]


def world_codes(
    target: TransformerTarget, tokenizer: ImageTokenizer, directory: Path, seed: NonNegativeInt
) -> WorldCodes:
    """`train_data=shapes`: scenes of the shapes world, encoded as they are needed."""
    return WorldCodes(VQEncoder(target.grid, tokenizer), seed)
