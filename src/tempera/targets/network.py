"""The interface that a network offers to `TransformerTarget` and to drafts of its architecture.

Shapes: R rows, T condition tokens, S sequence, H hidden size.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

from torch import Tensor, nn

from tempera.errors import TemperaError

DecoderLayer = tuple[nn.Module, nn.Module]
"""A decoder layer with Hugging Face's call signature, and its rotary embedding."""


class TargetNetwork(Protocol):
    """A causal transformer over tokens. It hides all that is specific to a family of models."""

    config: Any
    """Its sizes, named as in Hugging Face configurations."""
    model: Any
    """The Hugging Face decoder; a forward pass uses its `rotary_emb`, `layers` and `norm`."""
    lm_head: Any
    """From hidden states to logits; a linear layer until the target is packed."""
    family: str
    """Name of the module in `tempera.targets` whose `decoder_layer(config)` builds its layers."""

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed ids of the network's vocabulary, int64 [...] -> [..., H]."""

    def embed_prefix(self, condition: Tensor, drop: Tensor) -> Tensor:
        """Embed the condition tokens, -> [R, T, H].

        Args:
            condition: output of the family's `Conditioner`, [R, ...].
            drop: null-conditioned rows, bool [R].
        """

    def keep_prefix(self, condition: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
        """Which condition tokens are not padding, bool [R, T].

        Args:
            condition, drop: as in `embed_prefix`.
            keep: the same for the prompts, bool [R, T]; the null condition may be padded
                differently.
        """

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`."""

    def modules(self) -> Iterator[nn.Module]:
        """See `torch.nn.Module.modules`."""


def family_module(family: str) -> Any:
    """The module of a family of networks, `tempera.targets.NAME`.

    Raises:
        TemperaError: there is none.
    """
    try:
        if not family.isidentifier():
            raise ModuleNotFoundError(family)
        return importlib.import_module(f"tempera.targets.{family}")
    except ModuleNotFoundError as problem:
        raise TemperaError(
            f"there is no draft for networks of the family {family!r}: tempera.targets needs "
            "a module of that name with a function decoder_layer(config)."
        ) from problem


def decoder_layer(family: str, config: Mapping[str, Any]) -> DecoderLayer:
    """A new decoder layer for a draft.

    Args:
        family: `TargetNetwork.family`; that module's `decoder_layer(config)` builds the layer.
        config: the network's configuration, as `network_identity.config_dict` gives it.

    Raises:
        TemperaError: the family is unknown.
    """
    layer: DecoderLayer = family_module(family).decoder_layer(config)
    return layer
