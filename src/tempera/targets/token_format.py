"""What is peculiar to a model whose image tokens share a vocabulary with text: its prompt, its
image tokens, and what is forced.

A target emits our own tokens: 0 … codes − 1 are the codes of the image tokenizer, and `codes` is
the end of a line, where there is one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.errors import TemperaError

FORBIDDEN = -1e4
"""Added to a logit: no probability is left, and yet no infinity that a loss could multiply by zero.
"""


@dataclass(frozen=True)
class ModelSpec:
    """The declared format of one model's sequences: prompt, image, end.

    Attributes:
        lines, columns: codes of an image; `columns` without the end of a line.
        codes: size of the image codebook.
        first_code: the network's id of code 0; the others follow in order.
        prompt: what stands before an image: ids, and texts in which `{text}` is the user's prompt.
        null: what stands there for the unconditional row of guidance (a negative prompt, or no
            prompt).
        context: positions that the network was made for.
        line_end: id that ends every line of codes; none where lines have no end.
        end: ids after the image. Forced, so that they are never run: the image is complete before
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
    end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not any(isinstance(piece, str) and "{text}" in piece for piece in self.prompt):
            raise TemperaError(
                f"the prompt format {self.prompt} has no place for the prompt: write {{text}} "
                "into one of its texts."
            )
        for name, value in (
            ("lines", self.lines),
            ("columns", self.columns),
            ("codes", self.codes),
        ):
            if value < 1:
                raise TemperaError(f"{name}={value} makes no image: give at least 1.")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, ends of lines included."""
        return self.lines, self.columns + (self.line_end is not None)

    @property
    def length(self) -> int:
        """Tokens of an image, ends of lines included."""
        return self.grid[0] * self.grid[1]

    @property
    def token_ids(self) -> Tensor:
        """The network's id of each of our tokens, int64 [V]."""
        ends = [] if self.line_end is None else [self.line_end]
        return torch.tensor([*range(self.first_code, self.first_code + self.codes), *ends])

    @property
    def forced(self) -> Tensor | None:
        """Our token that each position must have, −1 where it is free, int64 [length]."""
        if self.line_end is None:
            return None
        forced = torch.full(self.grid, -1)
        forced[:, -1] = self.codes
        return forced.flatten()

    @property
    def token_bias(self) -> Tensor | None:
        """What keeps the end of a line from being drawn where it is not forced, float32 [V]."""
        if self.line_end is None:
            return None
        bias = torch.zeros(self.codes + 1)
        bias[-1] = FORBIDDEN
        return bias

    @property
    def room(self) -> int:
        """Tokens that a prompt may have in all."""
        return self.context - self.length - len(self.end)


def patches(pixels: int, patch: int, what: str) -> int:
    """Patches along a side of `pixels`.

    Raises:
        TemperaError: it does not divide.
    """
    if pixels < patch or pixels % patch:
        raise TemperaError(
            f"{what}={pixels} does not divide into {patch}-pixel patches: give a multiple of "
            f"{patch}."
        )
    return pixels // patch
