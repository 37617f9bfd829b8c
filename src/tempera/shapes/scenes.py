"""Scenes of the world as prompts, as pictures with captions, and as codes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field, NonNegativeInt, PositiveInt
from typing_extensions import override

from tempera.data.encoders import VQEncoder
from tempera.data.prompts import Prompt
from tempera.data.shards import CodedImages
from tempera.data.sources import Broken, Entry, Source
from tempera.image_tokenizers.vq import VQModel
from tempera.runtime.distributed import Processes
from tempera.shapes.world import World
from tempera.targets.transformer import TransformerTarget
from tempera.training.dataset import HOLDOUT, ShardCodes, encoded_codes


class WorldCodes:
    """The shapes world's scenes, encoded as they are needed: unlimited. Scene 0, 20, 40, … are the
    hold-out.
    """

    def __init__(self, encoder: VQEncoder, seed: int = 0) -> None:
        self.world, self.encoder = World(seed), encoder

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

    def __init__(
        self, count: PositiveInt, seed: NonNegativeInt = 0, first: NonNegativeInt = 0
    ) -> None:
        self.world, self.scenes, self.first = World(seed), count, first

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
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for index in range(self.first + start, self.first + self.scenes):
            yield _entry(self.world, index, f"world-{self.world.seed}-{index}")


def world_prompts(
    limit: PositiveInt = 64, offset: NonNegativeInt = 0, seed: NonNegativeInt = 1
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
    target: TransformerTarget, tokenizer: VQModel, directory: Path, seed: NonNegativeInt = 0
) -> WorldCodes:
    """`train_data=shapes`: scenes of the shapes world, encoded as they are needed."""
    return WorldCodes(VQEncoder(target.grid, tokenizer), seed)


class MixedCodes:
    """Scenes of the world, and images that the target generated; held out are the latter, which are
    what a draft meets in decoding.

    Args:
        world: the scenes.
        generated: the target's own images.
        share: of the target's own among training images.
    """

    def __init__(self, world: WorldCodes, generated: ShardCodes, share: float) -> None:
        self.world, self.generated, self.share = world, generated, share

    def train(self, positions: list[int]) -> CodedImages:
        """The target's own images stand at even distances among the scenes."""
        parts = []
        for position in positions:
            before = int(position * self.share)
            own = int((position + 1) * self.share) > before
            part = self.generated.train([before]) if own else self.world.train([position - before])
            parts.append(part)
        return CodedImages(
            [key for part in parts for key in part.keys],
            [caption for part in parts for caption in part.captions],
            np.concatenate([part.codes for part in parts]),
        )

    def holdout(self, positions: list[int]) -> CodedImages:
        """Held-out images of the target's own."""
        return self.generated.holdout(positions)


def mixed_codes(
    target: TransformerTarget,
    tokenizer: VQModel,
    directory: Path,
    processes: Processes | None = None,
    limit: PositiveInt = 4096,
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
    batch_size: int = 64,
    seed: NonNegativeInt = 0,
) -> MixedCodes:
    """`train_data=shapes_mixed`: scenes of the world of `seed`, and `limit` images that the target
    generates for captions of its later scenes, kept in `directory`/codes.
    """
    source = WorldScenes(limit, seed, first=10**6)
    options: Any = {"limit": limit, "batch_size": batch_size, "seed": seed, "processes": processes}
    own = encoded_codes(target, tokenizer, directory, source, draws=True, **options)
    return MixedCodes(world_codes(target, tokenizer, directory, seed), own, share)
