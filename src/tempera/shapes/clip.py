"""The shipped CLIP, through open_clip's own code path: a directory with open_clip_config.json and
open_clip_model.safetensors.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tempera.runtime.torchvision import import_open_clip
from tempera.shapes.networks import SHIPPED

TINY_CLIP: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": 48,
            "layers": [1, 1, 1, 1],
            "width": 16,
            "patch_size": None,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": 48,
            "heads": 3,
            "layers": 3,
        },
    },
    "preprocess_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}
"""The shipped CLIP's configuration, in open_clip's format."""


def load_clip(
    directory: Path = SHIPPED / "clip",
) -> tuple[nn.Module, Callable[[list[str]], Tensor], Callable[[Any], Tensor]]:
    """The model, its tokenizer (texts → ids [B, T]) and its preprocessing (PIL image → [3, h, w]),
    loaded by open_clip.
    """
    open_clip = import_open_clip()
    name = f"local-dir:{directory}"
    with _quiet():
        model, _, preprocess = open_clip.create_model_and_transforms(name)
        tokenizer = open_clip.get_tokenizer(name)
    return model.eval().requires_grad_(False), tokenizer, preprocess


@contextmanager
def _quiet() -> Iterator[None]:
    """Without open_clip's running commentary, which goes to the root logger; warnings pass."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
