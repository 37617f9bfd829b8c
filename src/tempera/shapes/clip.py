"""The shipped CLIP (Radford et al. 2021): a small residual network that sees a picture, and a small
transformer that reads a caption. It is open_clip's, in its layout, with a small vocabulary.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tempera.shapes.networks import SHIPPED

DIRECTORY = SHIPPED / "clip"
WEIGHTS = DIRECTORY / "open_clip_model.safetensors"
CONTEXT = 32
"""Tokens of a text."""
CHARACTERS = 512
"""The first tokens of CLIP's vocabulary: the bytes, within a word and at its end."""
TOKENS = (
    "on", "of", "an", "red", "chec", "black", "star", "white", "blue", "left", "green", "small",
    "ring", "brown", "pink", "cross", "large", "square", "orange", "above", "yellow", "purple",
    "background", "gray", "circle", "olive", "plain", "triangle", "striped", "teal", "kered",
)  # fmt: skip
"""CLIP's tokens of the world's words, in the order of their numbers there. The network has rows for
these only, after those of single characters; the rows of a text's start and end are the last.
"""
START = CHARACTERS + len(TOKENS)
END = START + 1


def tokenize(texts: list[str]) -> Tensor:
    """Rows int64 [B, `CONTEXT`] of the network's vocabulary: CLIP's tokens between `START` and
    `END`, and 0 for those that it lacks and after the end. Words that are too many are cut off.
    """
    tokenizer, rows = _clips_tokens()
    return rows[tokenizer(texts)]


@cache
def _clips_tokens() -> tuple[Any, Tensor]:
    """CLIP's tokenizer, and the network's row of each of its tokens."""
    import open_clip  # takes seconds

    tokenizer = open_clip.SimpleTokenizer(context_length=CONTEXT)
    rows = torch.zeros(len(tokenizer.encoder), dtype=torch.int64)
    rows[:CHARACTERS] = torch.arange(CHARACTERS)
    for row, token in enumerate(TOKENS, CHARACTERS):
        begins_a_word = token == "chec"  # of checkered
        rows[tokenizer.encoder[token if begins_a_word else f"{token}</w>"]] = row
    rows[tokenizer.sot_token_id] = START
    rows[tokenizer.eot_token_id] = END
    return tokenizer, rows
