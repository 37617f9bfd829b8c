"""The prompts of a batch, as a network is conditioned on them.

Shapes: B prompts, T condition tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Conditioner = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Prompts -> the network's condition, rows first, and keep, bool [B, T]: False on padding, which
stands on the left.
"""


class PromptConditioner:
    """A `Conditioner` that can reuse its last result.

    Args:
        encode: the conditioner itself, for instance a text encoder's `encode`.
    """

    def __init__(self, encode: Conditioner) -> None:
        self.encode = encode
        self._encoded: tuple[list[str], tuple[Tensor, Tensor]] | None = None

    def __call__(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Condition and keep of the prompts."""
        if self._encoded is not None and self._encoded[0] == prompts:
            return self._encoded[1]
        return self.encode(prompts)

    @contextmanager
    def encoded(self, prompts: list[str]) -> Iterator[None]:
        """Encode the prompts now, and not again inside the `with` block."""
        self._encoded = list(prompts), self.encode(prompts)
        try:
            yield
        finally:
            self._encoded = None
