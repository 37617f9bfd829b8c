"""The prompts of a batch: the network's condition, and the position that each image has reached.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), T condition tokens, H
hidden size; R' rows that begin.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Conditioner = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Prompts -> the network's condition [B, ...], and keep, bool [B, T]: False on padding, which is on
the left.
"""


class PicturedText(str):
    """The text of a prompt that has pictures beside it.

    Attributes:
        pictures: whatever the model's processor reads as pictures.
    """

    pictures: tuple[Any, ...]

    def __new__(cls, text: str, pictures: Sequence[Any]) -> "PicturedText":
        """The text with pictures."""
        made = super().__new__(cls, text)
        made.pictures = tuple(pictures)
        return made

    def __eq__(self, other: object) -> bool:
        """Whether the pictures are the same objects, too."""
        return self is other or (
            isinstance(other, PicturedText)
            and str.__eq__(self, other)
            and [*map(id, self.pictures)] == [*map(id, other.pictures)]
        )

    def __ne__(self, other: object) -> bool:
        """The opposite, of which `str` has its own."""
        return not self == other

    def __hash__(self) -> int:
        """Of the text."""
        return str.__hash__(self)


class PromptConditioner:
    """A `Conditioner` that can reuse its last result.

    Args:
        encode: the conditioner to wrap, for instance a text encoder's `encode`.
    """

    def __init__(self, encode: Conditioner) -> None:
        self.encode = encode
        self._encoded: tuple[list[str], tuple[Tensor, Tensor]] | None = None

    def __call__(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """The prompts' condition and keep; see `Conditioner`."""
        if self._encoded is not None and self._encoded[0] == prompts:
            return self._encoded[1]
        return self.encode(prompts)

    @contextmanager
    def encoded(self, prompts: list[str]) -> Iterator[None]:
        """Encode the prompts now and reuse the result inside the `with` block."""
        self._encoded = list(prompts), self.encode(prompts)
        try:
            yield
        finally:
            self._encoded = None


@dataclass(frozen=True)
class Prefix:
    """The condition tokens of rows that begin.

    Attributes:
        embeds: their embeddings, [R', T, H].
        mask: False on padding, bool [R', T].
        rows: which rows of the batch they are, int64 [R']; None: all.
        positions: their three positions where pictures are among them (`MultimodalRotary`), int64
            [R', 3, T]; None: each is its slot.
    """

    embeds: Tensor
    mask: Tensor
    rows: Tensor | None = None
    positions: Tensor | None = None

    def padded(self, length: int) -> "Prefix":
        """The same with padding on the left, up to `length` tokens."""
        more = length - self.mask.shape[1]
        pad = torch.nn.functional.pad
        positions = None if self.positions is None else pad(self.positions, (more, 0))
        embeds = pad(self.embeds, (0, 0, more, 0))
        return Prefix(embeds, pad(self.mask, (more, 0)), self.rows, positions)


class PromptState:
    """The position of every row.

    The last prefix token is the *root* of the first round; later roots are the last emitted tokens.
    A token's slot in the cache is its position: T − 1 + the number of image tokens up to it.

    Args:
        rows: R.
        prefix: T, of all rows.
        copies: rows per prompt, 1 or 2.
        length: tokens of an image.
        device: of the numbers.

    Attributes:
        lengths: image tokens that each row has emitted, int64 [B].
        root_slots: slot of each row's root, int64 [R].
        longest: upper bound of `lengths`, on the host.
    """

    def __init__(
        self, rows: int, prefix: int, copies: int, length: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.prefix = prefix
        self.copies = copies
        self.length = length
        self.lengths = torch.zeros(rows // copies, dtype=torch.int64, device=device)
        self.root_slots = torch.full((rows,), prefix - 1, dtype=torch.int64, device=device)
        self.longest = 0

    def rows_of(self, prompts: Tensor) -> Tensor:
        """The rows of prompts of the batch, int64 [M] -> [copies·M]."""
        return torch.cat([prompts + copy * len(self.lengths) for copy in range(self.copies)])

    def restart(self, prompts: Tensor) -> None:
        """Put prompts of the batch, int64 [M], back to their first root."""
        self.lengths[prompts] = 0
        self.root_slots[self.rows_of(prompts)] = self.prefix - 1

    def advance(self, emitted: Tensor, longest: int) -> None:
        """Advance each row by `emitted` tokens, int64 [B], to at most `longest`."""
        self.lengths += emitted
        self.root_slots.view(self.copies, -1).add_(emitted)
        self.longest = min(self.length, longest)

    def by_row(self, values: Tensor) -> Tensor:
        """What belongs to each prompt, [B, ...], for each of its rows: [R, ...]."""
        return torch.cat([values] * self.copies)

    def start_of(self, emitted: Tensor) -> Tensor:
        """Slot of the first of the tokens that the last round emitted, int64 [R], where `emitted`
        is their number, int64 [B].
        """
        return self.root_slots + 1 - self.by_row(emitted)

    def from_root(self, states: Tensor, emitted: Tensor, count: int = 1) -> Tensor:
        """The states at each row's root, and behind it, of a pass from `start_of(emitted)` on.

        Args:
            states: [R, M, H].
            emitted: tokens of the last round, int64 [B].
            count: number of states, the root's included.

        Returns:
            [R, count, H].
        """
        last = self.by_row((emitted - 1).clamp(min=0))
        indices = last[:, None] + torch.arange(count, device=states.device)
        return states.gather(1, indices.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    def padding(self, mask: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [R', 1, 1, S] that hides prefix tokens where `mask`, bool [R', T], is
        False, with S = `capacity` slots.
        """
        padding = torch.zeros(len(mask), capacity, dtype=dtype, device=mask.device)
        padding[:, : self.prefix].masked_fill_(~mask, torch.finfo(dtype).min)
        return padding[:, None, None]
