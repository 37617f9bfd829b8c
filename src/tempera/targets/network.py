"""The interface that a network offers to `TransformerTarget` and to drafts of its architecture.

Shapes: R rows, T condition tokens, S sequence, H hidden size.
"""

import importlib
import sys
from typing import Any, Protocol, Self

from torch import Tensor

from tempera.errors import TemperaError
from tempera.targets.token_format import ModelSpec


class TargetNetwork(Protocol):
    """A causal transformer over tokens. It hides all that is specific to a family of models."""

    config: Any
    """Its sizes, named as in Hugging Face configurations."""
    model: Any
    """The decoder, called as `decoder_layer.Decoder`; it has `layers`, `norm`, `rotary`,
    `head_dim` and `kv_heads`."""
    lm_head: Any
    """From hidden states to logits; a linear layer until the target is packed."""
    family: str
    """The module whose `layer_sizes(config)` gives the sizes of its layers, see `family_module`."""
    spec: ModelSpec | None
    """The format of its sequences, if it has other tokens than the codes of an image. If None,
    `config.grid` is the grid of an image.
    """

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed ids of the network's vocabulary, int64 [...] -> [..., H]."""

    def embed_prefix(self, condition: Tensor, keep: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the condition tokens.

        Args:
            condition: output of the family's `Conditioner`, [R, ...].
            keep: False on the prompts' padding, bool [R, T].
            drop: null-conditioned rows, bool [R].

        Returns:
            embeddings [R, T, H] in the network's dtype, and keep, bool [R, T], where the null
            condition may be padded differently.
        """

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`."""


def family_module(family: str) -> Any:
    """The module of a family of networks: `tempera.targets.NAME`, or a module of another package by
    its full name, which must be imported already (a draft's file is no reason to run code).

    Raises:
        TemperaError: there is none.
    """
    if family in sys.modules and "." in family:
        return sys.modules[family]
    try:
        if not family.isidentifier():
            raise ModuleNotFoundError(family)
        return importlib.import_module(f"tempera.targets.{family}")
    except ModuleNotFoundError as problem:
        raise TemperaError(
            f"there is no draft for networks of the family {family!r}: it must be the name of a "
            "module of tempera.targets, or the full name of one that you have imported, with a "
            "function layer_sizes(config)."
        ) from problem
