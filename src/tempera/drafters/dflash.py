"""DFlash (arXiv 2602.06036): a block of the last emitted token, the root, and masks is drafted in
one pass, in which all tokens of the block see each other. The target's hidden states at the tokens
before the root are injected: they become keys and values of every draft layer, by the layer's own
projections, and are kept in the draft's cache.

With c_j = norm(fc[h_j ; features_j]) for the tokens j before the root, a layer computes

    x ← x + attention(Q·norm(x), [K·c_j ; K·norm(x)], [V·c_j ; V·norm(x)]),  x ← x + MLP(norm(x)),

and each token of the block predicts the target's hidden state at its own position, whose logits are
those of the token after it. DSpark's Markov head (arXiv 2607.05147) can be put behind it.

Shapes: R rows (2B under guidance), T prefix tokens, S positions, L slots, H hidden size, K
features.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.drafters.draft_files import builder_of, draft_to_train
from tempera.drafters.draft_network import normed_features
from tempera.drafters.parallel import SlotDraft
from tempera.drafters.parallel_network import LENGTH, ParallelConfig, SlotNetwork
from tempera.targets.attention import SharedMask
from tempera.targets.cache import Keys
from tempera.targets.products import RMSNorm


class DFlashDraft(SlotDraft):
    """The distributions of a `DFlashModel`, for chains and static trees; arguments and errors are
    those of `parallel.SlotDraft`. A block is as long as those that it has learned from, also where
    fewer tokens are drafted.
    """

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Inject the prefix and draft the first block; the target must have started the same
        prompts.
        """
        run = self.run
        prefix = run.started
        self.depth = sequences.depth
        self.greedy = run.head.sampling.greedy
        run.runner.begin_cache(run.cache, self.depth + self.longest, prefix.mask)
        first = run.runner.roots(prefix.rows) * 0
        self._inject(run.before_prefix(prefix.mask)[:, 1:], first, prefix.rows)
        block = self._block(prefix.embeds[:, -1:], prefix.rows)
        self._slots = persistent(self._slots, block, prefix.rows)

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Inject the true hidden states at the last root and at the tokens accepted behind it, and
        draft the next block. What is injected of others lies in slots of the block, which
        overwrites it.
        """
        hidden = self.run.before_emitted(draft, verdict, scores)
        self._inject(hidden, self.run.prompt.start_of(sequences.emitted) - 1)
        self._slots.copy_(self._block(self.run.head.embed(verdict.next_token[:, None])))

    def _inject(self, hidden: Tensor, start: Tensor, rows: Tensor | None = None) -> None:
        """Write the keys and values of hidden states [R, S, (1 + K)·H] into the cache, from slot
        `start`, int64 [R], on; of all rows, or of some.
        """
        cache = self.run.cache
        slots = start[:, None] + torch.arange(hidden.shape[1], device=start.device)
        cache.write(slots, self.run.runner.kv_length(cache), rows)
        rotation = self.run.runner.turns_at(slots, rows).to(cache.dtype)
        cast(DFlashModel, self.run.network).inject(hidden.to(cache.dtype), rotation, cache)

    def _block(self, root: Tensor, rows: Tensor | None = None) -> Tensor:
        """The states of a block behind the root's embedding, [R, 1, H], for the tokens that are
        drafted; of all rows, or of some.
        """
        run = self.run
        layout = run.runner.layout_of(run.in_a_row(self.longest), run.cache)
        mask, rotation = run.runner.prepare(layout, None, run.cache, rows)
        root = root.to(run.cache.dtype)
        states: Tensor = run.network(root, root[:, :0], mask, rotation, run.cache)
        return states[:, : self.depth]


class DFlashModel(SlotNetwork):
    """The projection of the target's hidden states, and decoder layers.

    Not as in the public code: a token of the block predicts the token after it, as those of all
    drafts here do, so the root predicts the first drafted token and a block of L has L − 1 masks
    (there a mask predicts the token in its own place, and the root none); the target's last hidden
    state is injected beside the features, whose norms are equal; and no norm follows the last
    layer.
    """

    sizes: ClassVar[dict[str, int]] = {"layers": 2, "rank": 0, "length": LENGTH}
    drafter = "dflash"
    draft_model = DFlashDraft

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        width = config.layer_sizes.width
        self.fc = nn.Linear((1 + len(config.features)) * width, width, bias=False)
        self.norm = RMSNorm(width, config.layer_sizes.eps)
        self.initialise(self.mask_embed)

    @override
    def visible(self, count: int) -> Tensor:
        """All tokens of a block see each other."""
        return torch.ones(count, count, dtype=torch.bool)

    def inject(self, hidden: Tensor, rotation: Tensor, cache: Keys) -> None:
        """Add the keys and values of the target's hidden states [R, S, (1 + K)·H] at tokens with
        `rotation` [2, R, S, D] to a cache.
        """
        x = self.norm(self.fc(normed_features(hidden, self.config.layer_sizes.width)))
        for layer in self.layers:
            _, keys, values = layer.self_attn.project(x, rotation)
            cache.update(keys, values, layer.self_attn.index)

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: Keys | None = None,
    ) -> Tensor:
        """The states of blocks. In decoding, with a cache that has what was injected: of one block,
        whose root has `embeds`, [R, 1, H], and without `hidden`. In training, without a cache: of
        the block behind every token; the arguments are those of `TeacherForcedBatch.unrolled`, and
        copy k at a position is its token in the block whose root lies k before.
        """
        if cache is None:
            assert isinstance(mask, SharedMask)
            length = hidden.shape[1]
            cache = _Injected()
            later = nn.functional.pad(hidden[:, 1:], (0, 0, 0, 1))  # at each token, not before
            self.inject(later, rotation[:, :, :length], cache)
            mask = _with_injected(mask, length)
        else:
            length = 1
        count = rotation.shape[2] - length
        masks = self.mask_embed.expand(len(embeds), count, -1)
        x = torch.cat([embeds[:, :length], masks.to(embeds.dtype)], 1)
        return self.corrected(self.run_layers(x, mask, rotation, cache), embeds[:, length:])


class _Injected:
    """The keys and values of a lesson's injected states."""

    reached: Tensor | None = None

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """See `cache.Keys.update`."""
        if layer_idx in self._entries:
            keys, values = self._entries[layer_idx]
            key_states = torch.cat([keys, key_states], 2)
            value_states = torch.cat([values, value_states], 2)
        self._entries[layer_idx] = key_states, value_states
        return key_states, value_states


def _with_injected(mask: SharedMask, length: int) -> SharedMask:
    """The mask of `TeacherForcedBatch.unrolled` for K copies of S = `length` positions, whose
    tokens before a root are injected states, not tokens of copy 0: [K·S, S + K·S].
    """
    indices = torch.arange(len(mask.visible), device=mask.visible.device)
    root = indices % length - indices // length
    injected = root[:, None] > indices[:length]
    block = mask.visible & (root[:, None] == root)
    padding = torch.cat([mask.padding[:, :length], mask.padding], 1)
    return SharedMask(torch.cat([injected, block], 1), padding)


def spread(layers: int, count: int) -> tuple[int, ...]:
    """The layers of a target of so many whose inputs `count` draft layers read, as in the public
    code: evenly from the third to the last but one, and one behind the middle.
    """
    if count == 1:
        return (layers // 2 + 1,)
    steps = [2 + round(index * (layers - 4) / (count - 1)) for index in range(count)]
    return tuple(min(max(step, 0), layers - 1) for step in steps)


def dflash_network(
    target: Any,
    model: str,
    start: str | None = None,
    features: Sequence[int] | None = None,
    layers: int = 2,
    rank: int = 0,
    length: int = LENGTH,
) -> DFlashModel:
    """`draft=dflash`: see `draft_to_train` and `ParallelConfig`; without `features` they are those
    of `spread`.
    """
    if features is None:
        features = spread(len(target.network.model.layers), layers)
    sizes = {"layers": layers, "rank": rank, "length": length}
    return draft_to_train(DFlashModel, target, model, start, features, **sizes)


build_dflash = builder_of(DFlashModel)
"""The drafter of a trained draft: see `draft_files.builder_of`."""
