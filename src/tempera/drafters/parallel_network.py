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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_files import builder_of, draft_to_train
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.parallel import ParallelDraft
from tempera.errors import TemperaError
from tempera.targets.attention import SharedMask
from tempera.targets.cache import KVCache
from tempera.targets.decoder_layer import start_small

RANK = 64
LENGTH = 5
SLOTS = 32
"""Most tokens that one pass drafts."""


@dataclass(frozen=True)
class ParallelConfig(DraftConfig):
    """Configuration of a parallel draft.

    Attributes:
        length: L, tokens that one pass drafts.
        layers: number of decoder layers.
        rank: r of the Markov head; with 0 there is none, and the slots are independent.

    Raises:
        TemperaError: a number is too small or too large.
    """

    length: int = field(kw_only=True)
    layers: int = field(kw_only=True)
    rank: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least("layers", self.layers, 1)
        _check_least("rank", self.rank, 0)
        check_length(self.length)


def check_length(length: int) -> None:
    """Refuse a number of tokens that one pass cannot draft.

    Raises:
        TemperaError: it is too small or too large.
    """
    _check_least("length", length, 2)
    if length > SLOTS:
        raise TemperaError(
            f"length={length} is too large: give {SLOTS} or fewer, because a training step "
            "processes that many copies of every image."
        )


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise TemperaError(f"{name}={value} is not valid: give {least} or more.")


class SlotNetwork(DraftNetwork):
    """What networks with several slots have: decoder layers, the embedding of a mask, and a Markov
    head.

    The Markov head adds U·A·norm(E[x]) to the predicted hidden state, E[x] being the target's
    embedding of the token x before. The target's head W is linear, so this adds W2·W1[x] to the
    logits, with W2 = W·U [V, r] and W1 = A·norm(E) [V, r]; decoding computes both tables once.
    """

    config: ParallelConfig
    config_type = ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.slots = config.length
        width = config.layer_sizes.width
        self.layers = nn.ModuleList(self.make_layers(config.layers))
        self.mask_embed = nn.Parameter(torch.empty(width))
        self.markov_in = nn.Linear(width, config.rank, bias=False) if config.rank else None
        self.markov_out = nn.Linear(config.rank, width, bias=False) if config.rank else None

    def initialise(self, *vectors: nn.Parameter) -> None:
        """As EAGLE's draft, and so do the mask's vectors; the Markov head starts at zero."""
        start_small(self)
        for vector in vectors:
            nn.init.normal_(vector, std=0.02)
        if self.markov_in is not None and self.markov_out is not None:
            nn.init.normal_(self.markov_in.weight, std=self.config.layer_sizes.width**-0.5)
            nn.init.zeros_(self.markov_out.weight)

    def corrected(self, x: Tensor, embeds: Tensor) -> Tensor:
        """Predicted states [R, S + M, H] with the Markov head's correction of the last M, which are
        those of slots after the first one: by the embeddings of their tokens, [R, M, H].
        """
        count = embeds.shape[1]
        if not count or self.markov_out is None:
            return x
        return torch.cat([x[:, :-count], x[:, -count:] + self.markov_out(self.markov(embeds))], 1)

    def markov(self, embeds: Tensor) -> Tensor:
        """W1: embeddings of tokens [..., H] → [..., r], on the embeddings' device."""
        assert self.markov_in is not None
        normed = nn.functional.rms_norm(embeds, embeds.shape[-1:])
        return nn.functional.linear(normed, self.markov_in.weight.to(embeds.device))


class ParallelModel(SlotNetwork):
    """The projection, or that of the mask's vectors, and decoder layers."""

    sizes: ClassVar[dict[str, int]] = {"layers": 1, "rank": RANK, "length": LENGTH}
    drafter = "parallel"
    draft_model = ParallelDraft

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        states = 1 + len(config.features)
        self.mask_hidden = nn.Parameter(torch.empty(states * config.layer_sizes.width))
        self.initialise(self.mask_embed, self.mask_hidden)

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """As `DraftNetwork.forward`. The positions past the end of `hidden` are slots after the
        first one; of their embeddings only the Markov head reads anything.
        """
        real = hidden.shape[1]
        x = self.project(embeds[:, :real], hidden)
        behind = embeds[:, real:]
        if behind.shape[1]:
            blank = self.project(self.mask_embed, self.mask_hidden)
            x = torch.cat([x, blank.expand(len(x), behind.shape[1], -1)], 1)
        return self.corrected(self.run_layers(x, mask, rotation, cache), behind)


def parallel_network(
    target: Any,
    model: str,
    start: str | None = None,
    features: Sequence[int] = (),
    layers: int = 1,
    rank: int = RANK,
    length: int = LENGTH,
) -> ParallelModel:
    """`draft=parallel`: see `draft_to_train` and `ParallelConfig`."""
    sizes = {"layers": layers, "rank": rank, "length": length}
    return draft_to_train(ParallelModel, target, model, start, features, **sizes)


build_parallel = builder_of(ParallelModel)
"""The drafter of a trained draft: see `draft_files.builder_of`."""
