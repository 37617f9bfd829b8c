"""LlamaGen's published models (Sun et al. 2024): text- and class-conditional, in the official key layout, and their image tokenizer."""

from typing import Literal

import torch

from tempera.targets.llamagen import LlamaGen, LlamaGenConfig, from_official
from tempera.targets.spec import patches
from tempera.targets.weights import Release, fill, on_meta, randomise, read

PATCH = 16
Size = Literal["B", "L", "XL", "XXL", "3B"]
SIZES: dict[Size, tuple[int, int, int]] = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "3B": (24, 32, 3200),
}
"""Layers, heads and width, as in the official code."""


def llamagen_config(
    size: Size,
    image_size: int,
    caption_dim: int | None = None,
    num_classes: int | None = None,
    caption_tokens: int = 120,
    vocab_size: int = 16384,
) -> LlamaGenConfig:
    """The configuration of a published size for square images of `image_size` pixels."""
    layers, heads, width = SIZES[size]
    side = patches(image_size, PATCH, "image_size")
    return LlamaGenConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=-(-(8 * width // 3) // 256) * 256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        grid=(side, side),
        prefix_length=1 if caption_dim is None else caption_tokens,
        caption_dim=caption_dim,
        num_classes=num_classes,
    )


def load_llamagen(
    config: LlamaGenConfig,
    weights: str,
    files: list[str],
    hub: str,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    option: str = "model.weights",
) -> LlamaGen:
    """A LlamaGen with published weights.

    Args:
        weights, files, hub, option: see `tempera.targets.weights.Release`.
        device, dtype: where and as what random weights are made; published ones stay as they are in their files.
    """
    release = Release(weights, files, hub, option)
    network = on_meta(lambda: LlamaGen(config))
    if release.random:
        randomise(network, device or torch.device("cpu"), dtype)
    else:
        found = release.find()
        state = {name: tensor for name, tensor in read(found).items() if name != "freqs_cis"}
        fill(network, from_official(state, config.num_attention_heads), str(found[0]))
    return network  # type: ignore[return-value]
