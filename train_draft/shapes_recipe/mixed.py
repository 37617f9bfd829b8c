"""What the shipped drafts are trained on: scenes of the world, and images of the target's own."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from tempera.data.shards import CodedImages
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.runtime.distributed import Processes
from tempera.shapes.scenes import WorldCodes, WorldScenes, world_codes
from tempera.targets.transformer import TransformerTarget
from tempera.training.dataset import ShardCodes, encoded_codes


class MixedCodes:
    """Scenes of the world, and images that the target generated; held out are the latter, which are
    what a draft meets in decoding.

    Args:
        world: the scenes.
        generated: the target's own images.
        share: of the target's own among training images.
    """

    def __init__(self, world: WorldCodes, generated: ShardCodes, share: float) -> None:
        self.world = world
        self.generated = generated
        self.share = share

    def train(self, positions: list[int]) -> CodedImages:
        """The target's own images stand at even distances among the scenes."""
        keys = []
        captions = []
        codes = []
        for position in positions:
            before = int(position * self.share)
            is_generated = int((position + 1) * self.share) > before
            if is_generated:
                image = self.generated.train([before])
            else:
                image = self.world.train([position - before])
            keys += image.keys
            captions += image.captions
            codes.append(image.codes)
        return CodedImages(keys, captions, np.concatenate(codes))

    def holdout(self, positions: list[int]) -> CodedImages:
        """Held-out images of the target's own."""
        return self.generated.holdout(positions)


def mixed_codes(
    target: TransformerTarget,
    tokenizer: ImageTokenizer,
    directory: Path,
    processes: Processes | None = None,
    limit: PositiveInt = 4096,
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
    batch_size: int = 64,
    seed: NonNegativeInt = 0,
) -> MixedCodes:
    """As `train_data`: scenes of the world of `seed`, and `limit` images that the target generates
    for captions of its later scenes, kept in `directory`/codes.
    """
    source = WorldScenes(limit, seed, first=10**6)
    options: Any = {"limit": limit, "batch_size": batch_size, "seed": seed, "processes": processes}
    generated = encoded_codes(target, tokenizer, directory, source, draws=True, **options)
    return MixedCodes(world_codes(target, tokenizer, directory, seed), generated, share)
