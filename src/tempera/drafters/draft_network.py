"""Draft networks, for training and decoding: an input projection and decoder layers of the target's
class. Embedding and head are the target's and are not stored with the draft. For their files see
`draft_files`.

Shapes: R rows, S positions, H hidden size, K features.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from tempera.decoding.interfaces import DraftModel
from tempera.runtime.int4 import Int4Linear
from tempera.runtime.network_identity import identity_of
from tempera.runtime.processor import Placement
from tempera.targets.attention import SharedMask
from tempera.targets.cache import Keys, KVCache
from tempera.targets.decoder_layer import DecoderLayer, LayerSizes
from tempera.targets.few_rows import product
from tempera.targets.forward import check_layers
from tempera.targets.network import TargetNetwork
from tempera.targets.packed_linear import PackedLinear, pack


@dataclass(frozen=True)
class DraftConfig:
    """Configuration of a draft network; subclasses add fields.

    Attributes:
        layer_sizes: of the target's decoder layers, which are the draft's too.
        vocab_size: V of the target.
        target: identity of the target's weights (`tempera.runtime.network_identity.identity_of`).
        model: the target's name, shown in messages.
        features: K layers of the target whose inputs the draft reads beside the last hidden state,
            as in EAGLE-3 (Li et al. 2025, arXiv 2503.01840); none in EAGLE-1.
    """

    layer_sizes: LayerSizes
    vocab_size: int
    target: str
    model: str
    features: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # options have lists


class DraftNetwork(nn.Module):
    """A network that predicts the target's next hidden state from its last one and a token.

    fc: (2 + K)·H → H on [embedding ; hidden state ; features of K layers], then decoder layers of
    the target's sizes. The features of drafted tokens, which
    the target has not seen, are zero.

    A draft network of your own is a subclass that has `layers` and `draft_model` and, if need be,
    another `forward`; a YAML in `conf/draft/` makes it an option of training.

    Attributes:
        identity: of the weights file that the draft was read from; None for one in training.
        features: the K layers of its configuration.
        slots: number of tokens that one pass drafts: 1, or more if the network needs no drafted
            token to predict the next one.
        layers: its decoder layers.
        embed_tokens: its own embedding of the target network's ids; None: the target's.
        config_type: the class of its configuration.
        sizes: the defaults of further fields.
        drafter: the choice in `conf/drafter/` that drafts with such a network, and in `conf/draft/`
            that trains it.
        draft_model: decodes with such a network, `draft_model(network, target)`; an
            `interfaces.DraftModel`.
    """

    identity: str | None = None
    slots: int = 1
    layers: Any
    config_type: ClassVar[type[DraftConfig]] = DraftConfig
    sizes: ClassVar[dict[str, int]] = {}
    drafter: ClassVar[str] = "eagle"
    draft_model: ClassVar[Callable[..., DraftModel]]

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.features = config.features
        self.embed_tokens: nn.Module | None = None
        width = config.layer_sizes.width
        self.fc: nn.Module = nn.Linear((2 + len(config.features)) * width, width)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predict hidden states, over whole sequences or, with a cache, over further tokens.

        Args:
            embeds: embedding of token t, [R, S, H].
            hidden: the target's hidden state at token t − 1 and its `features` there, [R, S,
                (1 + K)·H]; or a draft's prediction, [R, S, H], or that with zeros for features. A
                network of several slots may get fewer states than embeddings: it drafts at the
                positions without one.
            mask: additive, [R, 1, S, keys]; or in training a `SharedMask`.
            rotation: the target's rotary embedding at the place of token t in prefix + image, see
                `rotary.rotate`, [2, R, S, D].
            cache: the keys and values of earlier tokens.

        Returns:
            the predicted hidden state at token t, [R, S, H].
        """
        return self.run_layers(self.project(embeds, hidden), mask, rotation, cache)

    def visible(self, count: int) -> Tensor | None:
        """Who sees whom among `count` tokens in a row that one pass runs, bool [count, count]: each
        those before it and itself, unless a subclass says more. All see what lies before. None: no
        layer attends; `forward` gets hidden states alone, and None for embeddings, mask and
        rotation.
        """
        return torch.ones(count, count, dtype=torch.bool).tril()

    def prefix(self, embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the draft reads of a prefix, from the target's embeddings [R, T, H] and `mask`, bool
        [R, T], which is False on padding.

        Returns:
            embeddings [R, T, H]; the tokens whose hidden states it reads, and the tokens that it
            attends to, bool [R, T].
        """
        return embeds, mask, mask

    def project(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What the first layer reads: fc, of `inputs`; without the columns of features if there are
        none.
        """
        x = inputs(embeds, hidden)
        if hidden.shape[-1] == embeds.shape[-1] and self.features:
            if isinstance(self.fc, Int4Linear):  # the operator takes whole rows of weights
                x = nn.functional.pad(x, (0, len(self.features) * hidden.shape[-1]))
                return cast(Tensor, self.fc(x))
            return nn.functional.linear(x, self.fc.weight[:, : x.shape[-1]], self.fc.bias)  # type: ignore[index, arg-type]
        return product(self.fc, x)

    def run_layers(
        self, x: Tensor, mask: Tensor | SharedMask, rotation: Tensor, cache: Keys | None
    ) -> Tensor:
        """The decoder layers: [R, S, H] → [R, S, H]. For the arguments see `forward`."""
        for layer in self.layers:
            x = layer(x, mask, rotation, cache)
        return x

    def for_decoding(self, placement: Placement, least_rows: int) -> Self:
        """A copy for decoding, with packed weights (`packed_linear.PackedLinear`)."""
        network = copy.deepcopy(self)
        made = placement.frozen(network, (network.fc, *network.layers))
        if not made.features and isinstance(made.fc, nn.Linear):
            # with features, drafted tokens need a part of its columns
            made.fc = PackedLinear(made.fc.weight, made.fc.bias, least_rows)
        for layer in made.layers:
            pack(layer, least_rows)
        return made

    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
        features: tuple[int, ...] = (),
        **sizes: Any,
    ) -> Self:
        """An untrained draft for a target network.

        Args:
            network: the target's network.
            model: its name.
            vocab_size: number of image tokens; by default the network's vocabulary.
            identity: the target's identity; by default it is computed from the network's weights.
            features: see `DraftConfig`.
            sizes: further fields of the configuration.

        Raises:
            TemperaError: the network has no such layers, or a size is impossible.
        """
        check_layers(network, features)
        vocab = network.config.vocab_size if vocab_size is None else vocab_size
        config = cls.config_type(
            network.model.sizes,
            vocab,
            identity or identity_of(network),
            model,
            features,
            **cls.sizes | sizes,
        )
        return cls(config)

    @classmethod
    def of_other_layout(cls, directory: Path, target: Any) -> Self | None:
        """The network of a directory in another layout than ours; None if it is in ours.

        Raises:
            TemperaError: it is not of the target's sizes, or cannot be read.
        """
        return None

    def make_layers(self, count: int) -> list[DecoderLayer]:
        """New decoder layers of the target's sizes."""
        return [DecoderLayer(self.config.layer_sizes, index) for index in range(count)]


def inputs(embeds: Tensor, hidden: Tensor) -> Tensor:
    """What a draft's fc reads, from embeddings [..., S, H] and hidden states with the features of K
    layers or none, [..., S, (1 + K)·H]: [..., S, (2 + K)·H]. Features are normed, because layers
    differ in scale; zeros stay zeros.
    """
    return torch.cat([embeds, normed_features(hidden, embeds.shape[-1])], -1)


def normed_features(hidden: Tensor, width: int) -> Tensor:
    """Hidden states of H = `width` with the features of K layers, which are normed: [..., S,
    (1 + K)·H].
    """
    features = hidden[..., width:]
    if not features.shape[-1]:
        return hidden
    by_layer = features.unflatten(-1, (-1, width))
    features = nn.functional.rms_norm(by_layer, (width,)).flatten(-2)
    return torch.cat([hidden[..., :width], features], -1)


def shifted(hidden: Tensor, mask: Tensor) -> Tensor:
    """The hidden state before each token; zero at the start and after padding.

    Args:
        hidden: the target's hidden states from the first prefix token on, [R, S, H].
        mask: False on padded prefix tokens, bool [R, T], T ≤ S + 1.

    Returns:
        [R, S + 1, H]; entry t belongs to token t.
    """
    covered = min(mask.shape[1], hidden.shape[1])
    real = hidden[:, :covered] * mask[:, :covered, None]
    first = hidden.new_zeros(len(hidden), 1, hidden.shape[-1])
    return torch.cat([first, real, hidden[:, covered:]], 1)
