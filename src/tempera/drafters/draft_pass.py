"""Passes of a draft network beside its target: over the prefix, over what the last round emitted,
and over a level of a tree.

The tokens that a round emits run once more at its end, in one pass, with the true hidden states
that the target's pass gave. This overwrites the cache entries of the draft, so nothing is moved or
rolled back. It also runs accepted tokens that the draft network has not run yet, such as a leaf.
The next tree grows in the slots after the root.

Shapes: B prompts, R rows (2B under guidance), M tokens of a pass, L depth of the draft, H hidden
size, K features, V vocabulary.
"""

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.trees import Block, InnerNodes, take
from tempera.drafters.draft_files import check_target
from tempera.drafters.draft_network import DraftNetwork, shifted
from tempera.runtime.processor import draft_placement
from tempera.targets.cache import KVCache
from tempera.targets.prompt_state import Prefix, PromptState
from tempera.targets.transformer import TransformerTarget


class DraftPass:
    """A draft network with its cache, beside the target whose embedding, head and prompts it
    shares. With guidance there are two rows per prompt, combined as in the target.

    Args:
        model: the draft network.
        target: the target, compiled or not; start each batch on it first.
        dtype: of the draft's weights, see `processor.draft_placement`. A coarser one changes q, not
            what exact rules emit: tokens are drawn from the q that they are tested with.
        ranks: whether its distributions only rank candidates: they are `Sampling.ranking` then,
            else `Sampling.drafting`.

    Attributes:
        network: the draft network, a copy for decoding.
        cache: keys and values of its layers.
        head: the target's embedding, head and sampling.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        dtype: torch.dtype | None = None,
        ranks: bool = False,
    ) -> None:
        check_target(model, target)
        placement = draft_placement(dtype, target.dtype, target.device)
        self.dtype = placement.arithmetic
        self.network = model.for_decoding(placement, target.sampling.rows)
        self.runner = target.runner
        self.head = target.head
        self.head.copy_to(self.dtype)
        self._width = (1 + len(model.features)) * self.head.hidden_size
        if model.features:
            self.runner.capture_hidden_states(model.features)
        self.cache = self.runner.new_cache(len(self.network.layers), self.dtype)
        self._ranks = ranks
        self._in_a_row: dict[int, Block] = {}

    @property
    def prompt(self) -> PromptState:
        """The positions of the batch's rows."""
        return self.runner.prompt

    @property
    def started(self) -> Prefix:
        """The prefix of the rows that began last."""
        return self.runner.prefix

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, int64 [B, ...] -> [R, ..., H]."""
        return self.head.embed(tokens, self.network.embed_tokens)

    def before_prefix(self, mask: Tensor) -> Tensor:
        """The target's hidden state before each prefix token of the rows that began last, [R', T,
        (1 + K)·H]; zero behind tokens that are not in `mask`, bool [R', T].
        """
        return shifted(self.runner.prefix_hidden[..., : self._width], mask)

    def before_emitted(self, draft: Draft, verdict: Verdict, scores: Scores) -> Tensor:
        """The target's hidden state before each token of a round, [R, L + 1, (1 + K)·H]."""
        hidden = scores.hidden[..., : self._width]
        return hidden if draft.tree.is_chain else take(hidden, self.prompt.by_row(verdict.visited))

    def prefix(self, embeds: Tensor, hidden: Tensor, nodes: int, mask: Tensor) -> Tensor:
        """Start the rows that began last, in a cache with room for `nodes` tokens behind the image,
        with their first tokens, [R', M, ...]; returns the predicted states, [R', M, H]. Prefix
        tokens that are not in `mask`, bool [R', T], are hidden.
        """
        self.runner.begin_cache(self.cache, nodes, mask)
        prepared = self.runner.prepare_prefix(embeds.shape[1], self.cache, mask, self.started.rows)
        return _run(self.network, self.cache, embeds, hidden, *prepared)

    def rerun(self, embeds: Tensor, hidden: Tensor, emitted: Tensor, count: int = 1) -> Tensor:
        """Run the tokens that a round emitted, and those right behind them, [R, M, ...]; returns
        the predicted states at each row's root and behind it, [R, count, H]. `emitted` is the
        number of tokens, int64 [B]. Who sees whom says the network (`DraftNetwork.visible`).
        """
        layout = self.runner.layout_of(self.in_a_row(embeds.shape[1]), self.cache)
        prepared = self.runner.prepare(layout, self.prompt.start_of(emitted), self.cache)
        states = _run(self.network, self.cache, embeds, hidden, *prepared)
        return self.prompt.from_root(states, emitted, count)

    def in_a_row(self, count: int) -> Block:
        """So many tokens in a row that run in one pass, and who sees whom."""
        if count not in self._in_a_row:
            visible = self.network.visible(count)
            assert visible is not None
            self._in_a_row[count] = Block.in_a_row(visible.to(self.runner.device))
        return self._in_a_row[count]

    def level(self, above: Tensor, tokens: Tensor, level: InnerNodes) -> Tensor:
        """Run the inner nodes of a level, with tokens int64 [B, P], behind the predicted states of
        those above, [R, P', H]: [R, P, H].
        """
        parents = level.inner_parents
        hidden = take(above, self.prompt.by_row(parents) if level.per_row else parents)
        layout = self.runner.layout_of(level.block, self.cache)
        prepared = self.runner.prepare(layout, None, self.cache)
        return _run(self.network, self.cache, self.embed(tokens), hidden, *prepared)

    def logits(self, states: Tensor) -> Tensor:
        """The logits of predicted states after guidance, [R, M, H] -> [B, M, V]."""
        return self.head.guided_logits(states)

    def distribution(self, logits: Tensor, depth: int) -> Tensor:
        """The distributions of logits [B, M, V] at nodes of one depth, 0 the root: float32."""
        sampling = self.head.sampling
        sampling = sampling.ranking if self._ranks else sampling.drafting
        return self.head.distribution_of(logits, self.prompt.lengths, depth, sampling)


def _run(
    network: DraftNetwork,
    cache: KVCache,
    embeds: Tensor,
    hidden: Tensor,
    mask: Tensor,
    rotation: Tensor,
) -> Tensor:
    """The network's pass."""
    dtype = cache.dtype
    predicted: Tensor = network(embeds.to(dtype), hidden.to(dtype), mask, rotation, cache)
    return predicted
