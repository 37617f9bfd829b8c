"""The prompts of a batch: the network's condition, and the position that each image has reached.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), T condition tokens, H
hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Conditioner = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Prompts -> the network's condition [B, ...], and keep, bool [B, T]: False on padding, which is on
the left.
"""


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


class PromptState:
    """The prefix of every row and the number of tokens it has emitted.

    The last prefix token is the *root* of the first round; later roots are the last emitted tokens.
    A token's slot in the cache is its position: T − 1 + the number of image tokens up to it.

    Args:
        embeds: embeddings of the prefix, [R, T, H].
        keep: False on padding, bool [R, T].
        copies: rows per prompt, 1 or 2.
        length: tokens of an image.

    Attributes:
        lengths: image tokens that each row has emitted, int64 [B].
        root_slots: slot of each row's root, int64 [R].
        longest: upper bound of `lengths`, on the host.
    """

    def __init__(self, embeds: Tensor, keep: Tensor, copies: int, length: int) -> None:
        self.embeds = embeds
        self.keep = keep
        self.copies = copies
        self.length = length
        self.rows, self.prefix = keep.shape
        self.lengths = torch.zeros(self.rows // copies, dtype=torch.int64, device=keep.device)
        self.root_slots = torch.full(
            (self.rows,), self.prefix - 1, dtype=torch.int64, device=keep.device
        )
        self.longest = 0

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
        places = last[:, None] + torch.arange(count, device=states.device)
        return states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    def padding(self, keep: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [R, 1, 1, S] that hides prefix tokens where `keep`, bool [R, T], is False,
        with S = `capacity` slots.
        """
        padding = torch.zeros(self.rows, capacity, dtype=dtype, device=keep.device)
        padding[:, : self.prefix].masked_fill_(~keep, torch.finfo(dtype).min)
        return padding[:, None, None]
