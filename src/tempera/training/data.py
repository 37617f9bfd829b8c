"""What `train_data=` and `encoder=` choose. All take the image tokenizer, the target or no more than its grid, and their own options."""

import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tempera.errors import TemperaError
from tempera.targets.adapter import TransformerTarget, identity_of
from tempera.training.codes import ShardCodes, WorldCodes
from tempera.training.prepare import TargetEncoder, VQEncoder, prepare
from tempera.training.shards import MANIFEST, Manifest
from tempera.training.sources import Source
from tempera.vq import VQModel


def vq_encoder(grid: tuple[int, int], tokenizer: VQModel) -> VQEncoder:
    """`encoder=vq`: the images' own codes on the target's grid."""
    return VQEncoder(tokenizer, identity_of(tokenizer), grid)


def target_encoder(target: TransformerTarget, tokenizer: VQModel, seed: int = 0) -> TargetEncoder:
    """`encoder=target`: codes that the target draws."""
    return TargetEncoder(target, identity_of(tokenizer), seed)


def world_codes(target: TransformerTarget, tokenizer: VQModel, directory: Path, seed: int = 0) -> WorldCodes:
    """`train_data=world`: scenes of the embedded world, encoded as they are needed."""
    return WorldCodes(vq_encoder(target.grid, tokenizer), seed)


def shard_codes(target: TransformerTarget, tokenizer: VQModel, directory: Path, path: str, seed: int = 0) -> ShardCodes:
    """`train_data=shards`: shards in `path`, made for this tokenizer."""
    return ShardCodes.read(path, identity_of(tokenizer), target.vocab_size, target.grid, seed)


def generated_codes(
    target: TransformerTarget,
    tokenizer: VQModel,
    directory: Path,
    source: Any,
    limit: int | None = 4096,
    batch_size: int = 64,
    seed: int = 0,
) -> ShardCodes:
    """`train_data=generated`: images that the target draws for the captions of `source`, kept as shards in `directory/codes`.

    Raises:
        TemperaError: several processes, and the images are not drawn yet.
    """
    shards, origin = directory / "codes", _source(source)
    drawn = (shards / MANIFEST).is_file() and Manifest.load(shards).complete
    if not drawn and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TemperaError(
            "several processes cannot draw one set of training images: draw them first with train_draft/prepare.py encoder=target, "
            "then train with train_data=shards train_data.path=DIR."
        )
    with tqdm(desc="draw training images", unit="image", disable=drawn) as bar:
        encoder = target_encoder(target, tokenizer, seed)
        prepare(origin, encoder, shards, shard_size=4 * batch_size, batch_size=batch_size, limit=limit, report=bar.write, bar=bar)
    return ShardCodes.read(str(shards), identity_of(tokenizer), target.vocab_size, target.grid, seed)


def _source(source: Any) -> Source:
    """The source, which configuration files cannot annotate."""
    found: Source = source
    return found
