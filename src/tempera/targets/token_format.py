"""The sequence format of models whose image tokens share a vocabulary with text: prompt, image
tokens and forced tokens.

A target does not emit the network's ids but *target tokens*: 0 … codes − 1 are the codes of the
image tokenizer, and `codes` is the end-of-line token if the format has one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.errors import TemperaError

END_OF_TEXT = "{end of text}"
"""Stands in `ModelSpec.prompt` for the end of text of the text tokenizer."""


@dataclass(frozen=True)
class ModelSpec:
    """The format of a model's sequences.

    Attributes:
        lines, columns: grid of image codes; `columns` does not count the end-of-line token.
        codes: size of the image codebook.
        first_code: the network's id of code 0; the others follow in order.
        prompt: what precedes an image: ids, and texts in which `{text}` is the user's prompt.
        null: what precedes it in the unconditional row of guidance (a negative prompt, or none).
        context: number of positions that the network supports.
        line_end: id that ends every line of codes; None if lines have no end token.
        null_filling: if given, the unconditional row is not `null` but the prompt with this special
            token in place of all tokens but the first and the last.
        preview: rows and columns of a small image that the model draws first (GLM-Image).
        pictures: whether a prompt has pictures beside its text.
        special: texts that must each be one token of the text tokenizer.
        text_tokens: number of tokens that the text tokenizer must have, if the codes are behind
            them.
    """

    lines: int
    columns: int
    codes: int
    first_code: int
    prompt: tuple[int | str, ...]
    null: tuple[int | str, ...]
    context: int
    line_end: int | None = None
    null_filling: str | None = None
    preview: tuple[int, int] | None = None
    pictures: bool = False
    special: tuple[str, ...] = ()
    text_tokens: int | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, including end-of-line tokens, without the preview."""
        return self.lines, self.columns + (self.line_end is not None)

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of tokens of the preview, if there is one, and of the image."""
        return [self.grid] if self.preview is None else [self.preview, self.grid]

    @property
    def length(self) -> int:
        """Tokens of an image, including end-of-line tokens and those of the preview."""
        return sum(math.prod(grid) for grid in self.grids)

    @property
    def token_ids(self) -> Tensor:
        """The network's id of each target token, int64 [V]."""
        ends = [] if self.line_end is None else [self.line_end]
        return torch.tensor([*range(self.first_code, self.first_code + self.codes), *ends])

    @property
    def forced(self) -> Tensor | None:
        """The forced target token of each position, −1 where it is free, int64 [length]; None if
        nothing is forced.
        """
        if self.line_end is None:
            return None
        forced = torch.full(self.grid, -1)
        forced[:, -1] = self.codes
        before = torch.full((self.length - forced.numel(),), -1)
        return torch.cat([before, forced.flatten()])

    @property
    def room(self) -> int:
        """Number of tokens that the context leaves for the prompt."""
        return self.context - self.length


def patches(pixels: int, patch: int, what: str) -> int:
    """Number of patches along a side of `pixels`; `what` names the option in the error.

    Raises:
        TemperaError: `pixels` is not a multiple of `patch`.
    """
    if pixels < patch or pixels % patch:
        raise TemperaError(
            f"{what}={pixels} cannot be divided into patches of {patch} pixels: give a multiple "
            f"of {patch}."
        )
    return pixels // patch
