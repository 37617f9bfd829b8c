"""What a `TransformerTarget` and a draft of its architecture need of a network.

Shapes: R rows, T condition tokens, S sequence, H hidden size.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

from torch import Tensor, nn

from tempera.errors import TemperaError

DecoderLayer = tuple[nn.Module, nn.Module]
"""A decoder layer as Hugging Face calls it, and the rotary embedding that goes with it."""


class TargetNetwork(Protocol):
    """A causal transformer over tokens. All that is peculiar to a family of models stays inside."""

    config: Any
    """Its sizes, in Hugging Face's names."""
    model: Any
    """The Hugging Face decoder: `rotary_emb`, `layers` and `norm` make up a forward pass."""
    lm_head: nn.Linear
    family: str
    """The module of `tempera.targets` that builds such networks; see `decoder_layer`."""

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embeddings of the network's own ids, int64 [...] -> [..., H]."""

    def embed_prefix(self, condition: Tensor, drop: Tensor) -> Tensor:
        """Embeddings of the condition tokens, [R, T, H].

        Args:
            condition: what the family's text encoder gives, rows first.
            drop: null-conditioned rows, bool [R].
        """

    def keep_prefix(self, condition: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
        """Which condition tokens are real, bool [R, T]: the prompt's `keep`, unless the null
        condition has padding of its own.
        """

    def decoder_layer(self) -> DecoderLayer:
        """A new decoder layer of this architecture with its rotary embedding, for a draft."""

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`."""

    def modules(self) -> Iterator[nn.Module]:
        """See `torch.nn.Module.modules`."""


def decoder_layer(family: str, config: Mapping[str, Any]) -> DecoderLayer:
    """A new decoder layer of a network that is not at hand, for a draft that is read from disk.

    Args:
        family: `TargetNetwork.family`; that module's `decoder_layer(config)` builds the layer.
        config: the network's configuration, as `network_identity.config_dict` gives it.

    Raises:
        TemperaError: there is no such family.
    """
    try:
        if not family.isidentifier():
            raise ModuleNotFoundError(family)
        module = importlib.import_module(f"tempera.targets.{family}")
    except ModuleNotFoundError as problem:
        raise TemperaError(
            f"there is no EAGLE draft for networks of the family {family!r}: tempera.targets needs "
            "a module of that name with a function decoder_layer(config)."
        ) from problem
    layer: DecoderLayer = module.decoder_layer(config)
    return layer
