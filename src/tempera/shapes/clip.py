"""The shipped CLIP, through open_clip's own code path: a directory with open_clip_config.json and
open_clip_model.safetensors.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime.torchvision import import_open_clip
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import WORDS

CHARACTERS = 512
"""The first tokens of CLIP's vocabulary: single bytes, within a word and at its end."""
CONTEXT = 32
"""Tokens of a text."""


def load_clip(
    directory: Path = SHIPPED / "clip",
) -> tuple[nn.Module, Callable[[list[str]], Tensor], Callable[[Any], Tensor]]:
    """The model, its tokenizer (texts → ids [B, T]) and its preprocessing (PIL image → [3, h, w]),
    loaded by open_clip.
    """
    open_clip = import_open_clip()
    with _quiet():
        model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{directory}")
    return model.eval().requires_grad_(False), world_tokenizer(), preprocess


def world_tokenizer() -> Callable[[list[str]], Tensor]:
    """CLIP's tokenizer, renumbered: the table has rows for single characters and for the world's
    words. All other tokens share the row of padding, whose id is 0; the end of a text keeps the
    largest id, by which CLIP finds it.
    """
    tokenizer = import_open_clip().SimpleTokenizer(context_length=CONTEXT)
    rows = torch.cat([torch.arange(CHARACTERS), tokenizer(list(WORDS)).flatten()]).unique()
    ids = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    ids[rows] = torch.arange(len(rows))
    return lambda texts: ids[tokenizer(texts)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without open_clip's running commentary, which goes to the root logger; warnings pass."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
