"""The EAGLE draft (Li et al. 2024, EAGLE-1): one decoder layer that predicts the target's next
hidden state.

At step t it reads the pair (embedding of token t, the target's hidden state at token t − 1) and
predicts the hidden state at token t, which the target's own head turns into the distribution of
token t + 1. Embedding and head are the target's and are not stored here.

Shapes: R rows, S sequence, T prefix tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.eagle_fused import FastEagle, inputs
from tempera.runtime.network_identity import config_dict, identity_of
from tempera.targets.forward import check_layers
from tempera.targets.network import DecoderLayer, TargetNetwork, decoder_layer


@dataclass(frozen=True)
class EagleConfig(DraftConfig):
    """Configuration of an EAGLE draft.

    Attributes:
        family: `TargetNetwork.family` of the target; the draft has its decoder layer.
        network: configuration of the target's network.
        features: layers of the target whose inputs the draft reads beside the last hidden state, as
            in EAGLE-3 (Li et al. 2025, arXiv 2503.01840); none in EAGLE-1.
    """

    family: str
    network: dict[str, Any]
    features: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
        features: tuple[int, ...] = (),
    ) -> Self:
        """Configuration of a draft for a target network.

        Args:
            network: the target's network.
            model: its name.
            vocab_size: number of image tokens; by default the network's vocabulary.
            identity: the target's identity; by default it is computed from the network's weights.
            features: see `EagleConfig`.

        Raises:
            TemperaError: the network has no such layers.
        """
        check_layers(network, features)
        vocab = network.config.vocab_size if vocab_size is None else vocab_size
        return cls(
            network.config.hidden_size,
            vocab,
            identity or identity_of(network),
            model,
            network.family,
            config_dict(network),
            features,
        )


class EagleModel(DraftNetwork):
    """fc: (2 + K)·H → H on [embedding ; hidden state ; features of K layers], then one decoder
    layer of the target's class, with the target's rotary embedding. The features of drafted tokens,
    which the target has not seen, are zero.

    Args:
        config: sizes and target.
        make_layer: builds the decoder layer and its rotary embedding; by default
            `targets.network.decoder_layer` builds those of `config`.
    """

    config: EagleConfig

    def __init__(
        self, config: EagleConfig, make_layer: Callable[[], DecoderLayer] | None = None
    ) -> None:
        super().__init__(config)
        self.features = config.features
        width = config.hidden_size
        self.fc = nn.Linear((2 + len(config.features)) * width, width)
        self.layer, self.rotary = (
            decoder_layer(config.family, config.network) if make_layer is None else make_layer()
        )
        self.initialise_linears()

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The decoder layer."""
        return (self.layer,)

    @classmethod
    @override
    def configure(cls, values: dict[str, Any]) -> EagleConfig:
        return EagleConfig(**values | {"features": tuple(values.get("features", ()))})

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """See `DraftNetwork.forward`."""
        rotation = self.rotary(embeds, position_ids)
        x = inputs(embeds, hidden)
        x = nn.functional.linear(x, self.fc.weight[:, : x.shape[-1]], self.fc.bias)
        out: Tensor = self.layer(
            x, attention_mask=mask, position_embeddings=rotation, use_cache=False
        )
        return out

    @override
    def drafting(self, device: torch.device, dtype: torch.dtype) -> FastEagle:
        return FastEagle(self, device, dtype)

    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
        features: tuple[int, ...] = (),
    ) -> Self:
        """An untrained draft for a target network; see `EagleConfig.of`."""
        config = EagleConfig.of(network, model, vocab_size, identity, features)
        return cls(config, network.decoder_layer)


def shifted(hidden: Tensor, keep: Tensor) -> Tensor:
    """The hidden state before each token; zero at the start and after padding.

    Args:
        hidden: the target's hidden states from the first prefix token on, [R, S, H].
        keep: False on padded prefix tokens, bool [R, T], T ≤ S + 1.

    Returns:
        [R, S + 1, H]; entry t belongs to token t.
    """
    covered = min(keep.shape[1], hidden.shape[1])
    real = hidden[:, :covered] * keep[:, :covered, None]
    return torch.cat(
        [hidden.new_zeros(len(hidden), 1, hidden.shape[-1]), real, hidden[:, covered:]], 1
    )


def eagle_network(
    target: Any, model: str, start: str | None = None, features: Sequence[int] = ()
) -> EagleModel:
    """`draft=eagle`: the EAGLE draft that training starts from.

    Args:
        target: a `TransformerTarget`.
        model: the target's name, shown in messages.
        start: directory of a trained draft; by default the weights are random.
        features: see `EagleConfig`; a draft from `start` has its own.
    """
    if start is not None:
        return EagleModel.from_pretrained(start)
    layers = tuple(features)
    return EagleModel.of(target.network, model, target.vocab_size, target.identity, layers)
