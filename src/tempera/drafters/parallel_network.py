"""A draft network that drafts a whole chain in one pass: the inputs of P-EAGLE (arXiv 2602.01469)
and the low-rank Markov head of DSpark (arXiv 2607.05147).

The first slot reads what EAGLE reads: the embedding of the last emitted token, the root, and the
target's hidden state before it. Each of the other slots reads two trained vectors in their place,
the same for all, and differs only by its position, the row and column of its token. A slot attends
to all real tokens and to the slots before it, and predicts the target's hidden state at its
position, without knowing the tokens drafted in between. The Markov head tells it one of them: it
adds a correction that depends on the drafted token before.

Shapes: R rows, S real tokens, L slots, H hidden size, V vocabulary, K features, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.eagle_fused import FastEagle, inputs
from tempera.drafters.eagle_network import EagleConfig
from tempera.errors import TemperaError
from tempera.targets.network import DecoderLayer, TargetNetwork, decoder_layer

RANK = 64
LENGTH = 5


@dataclass(frozen=True)
class ParallelConfig(DraftConfig):
    """Configuration of a parallel draft.

    Attributes:
        family, network, features: see `EagleConfig`.
        layers: number of decoder layers.
        rank: r of the Markov head; with 0 there is none, and the slots are independent.
        length: L, tokens that one pass drafts.

    Raises:
        TemperaError: a number is too small.
    """

    family: str
    network: dict[str, Any]
    features: tuple[int, ...]
    layers: int
    rank: int
    length: int

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("rank", 0), ("length", 2)):
            if getattr(self, name) < least:
                raise TemperaError(
                    f"{name}={getattr(self, name)} is not possible: give {least} or more."
                )


class ParallelModel(DraftNetwork):
    """fc: (2 + K)·H → H on [embedding ; hidden state ; features of K layers], or on the mask's
    vectors, then decoder layers of the target's class with the target's rotary embedding.

    The Markov head adds U·A·norm(E[x]) to the predicted hidden state, E[x] being the target's
    embedding of the token x before. The target's head W is linear, so this adds W2·W1[x] to the
    logits, with W2 = W·U [V, r] and W1 = A·norm(E) [V, r]; decoding computes both tables once.

    Args:
        config: sizes and target.
        make_layer: builds a decoder layer and its rotary embedding; by default
            `targets.network.decoder_layer` builds those of `config`.
    """

    config: ParallelConfig
    drafter = "parallel"

    def __init__(
        self, config: ParallelConfig, make_layer: Callable[[], DecoderLayer] | None = None
    ) -> None:
        super().__init__(config)
        self.features, self.slots = config.features, config.length
        self.cached_layers = config.layers
        width, reads = config.hidden_size, 1 + len(config.features)
        make = make_layer or partial(decoder_layer, config.family, config.network)
        layers, rotaries = zip(*(make() for _ in range(config.layers)), strict=True)
        self.fc = nn.Linear((1 + reads) * width, width)
        self.layers, self.rotary = nn.ModuleList(layers), rotaries[0]
        self.mask_embed = nn.Parameter(torch.empty(width))
        self.mask_hidden = nn.Parameter(torch.empty(reads * width))
        self.markov_in = nn.Linear(width, config.rank, bias=False) if config.rank else None
        self.markov_out = nn.Linear(config.rank, width, bias=False) if config.rank else None
        self._initialise()

    def _initialise(self) -> None:
        """As EAGLE's draft; the Markov head starts at zero."""
        self.initialise_linears()
        for vector in (self.mask_embed, self.mask_hidden):
            nn.init.normal_(vector, std=0.02)
        if self.markov_in is not None and self.markov_out is not None:
            nn.init.normal_(self.markov_in.weight, std=self.config.hidden_size**-0.5)
            nn.init.zeros_(self.markov_out.weight)

    @classmethod
    @override
    def configure(cls, values: dict[str, Any]) -> ParallelConfig:
        return ParallelConfig(**values | {"features": tuple(values["features"])})

    @override
    def forward(
        self, embeds: Tensor, hidden: Tensor, mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """As `DraftNetwork.forward`. The positions past the end of `hidden` are slots after the
        first one; of their embeddings only the Markov head reads anything.
        """
        real = hidden.shape[1]
        rotation = self.rotary(embeds, position_ids)
        x = self.fc(inputs(embeds[:, :real], hidden))
        if real < embeds.shape[1]:
            blank = self.fc(inputs(self.mask_embed, self.mask_hidden))
            x = torch.cat([x, blank.expand(len(x), embeds.shape[1] - real, -1)], 1)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=rotation, use_cache=False)
        return torch.cat([x[:, :real], x[:, real:] + self._correction(embeds[:, real:])], 1)

    def markov(self, embeds: Tensor) -> Tensor:
        """W1: embeddings of tokens [..., H] → [..., r]."""
        assert self.markov_in is not None
        normed: Tensor = self.markov_in(nn.functional.rms_norm(embeds, embeds.shape[-1:]))
        return normed

    def _correction(self, embeds: Tensor) -> Tensor:
        """What the Markov head adds to hidden states after tokens with these embeddings, [..., H];
        zero without one.
        """
        if self.markov_out is None:
            return torch.zeros_like(embeds)
        correction: Tensor = self.markov_out(self.markov(embeds))
        return correction

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
        layers: int = 1,
        rank: int = RANK,
        length: int = LENGTH,
    ) -> Self:
        """An untrained draft for a target network; see `EagleConfig.of` and `ParallelConfig`."""
        common = vars(EagleConfig.of(network, model, vocab_size, identity, features))
        config = ParallelConfig(**common, layers=layers, rank=rank, length=length)
        return cls(config, network.decoder_layer)


def parallel_network(
    target: Any,
    model: str,
    start: str | None = None,
    features: Sequence[int] = (),
    layers: int = 1,
    rank: int = RANK,
    length: int = LENGTH,
) -> ParallelModel:
    """`draft=parallel`: the parallel draft that training starts from.

    Args:
        target: a `TransformerTarget`.
        model: the target's name, shown in messages.
        start: directory of a trained draft; by default the weights are random.
        features, layers, rank, length: see `ParallelConfig`; a draft from `start` has its own.

    Raises:
        TemperaError: `length` exceeds the tokens of an image.
    """
    if start is not None:
        return ParallelModel.from_pretrained(start)
    if length > target.length:
        raise TemperaError(
            f"length={length} is not possible: an image has {target.length} tokens, so give 2 to "
            f"{target.length}."
        )
    return ParallelModel.of(
        target.network,
        model,
        target.vocab_size,
        target.identity,
        tuple(features),
        layers,
        rank,
        length,
    )
