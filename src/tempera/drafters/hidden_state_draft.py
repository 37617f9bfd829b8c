"""What draft models share whose network reads the target's hidden states: the cache, and what the
last round emitted.

A round starts by rerunning the tokens that the last round emitted, in one pass, with the true
hidden states that the target's pass gave. This overwrites the cache entries of the old draft, so
nothing is moved or rolled back. It also runs accepted tokens that the draft network has not run
yet, such as a leaf. The tree then grows in the slots after the root.

Shapes: B prompts, R rows (2B under guidance), M tokens of a pass, L depth of the draft, H hidden
size, K features.
"""

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Self

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import take
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.eagle_network import shifted
from tempera.runtime.processor import arithmetic
from tempera.targets.cache import KVCache, Layout
from tempera.targets.compiled import StepFunction
from tempera.targets.transformer import TransformerTarget


class HiddenStateDraft(DraftModel):
    """Base of draft models that run a `DraftNetwork` beside its target. With guidance there are two
    rows per prompt, combined as in the target.

    Args:
        model: the draft network.
        target: the target, compiled or not; start each batch on it first.
        dtype: of the draft's weights, in which it computes (see `processor.arithmetic`); by
            default the target's. A coarser one changes q, not what exact rules emit: tokens are
            drawn from the q that they are tested with.
        sampling_of: maps the target's sampling to the draft's; by default `Sampling.drafting`.

    Attributes:
        network: the draft network, a copy for decoding.
        cache: keys and values of its layers.
        identity: see `Drafter.identity`.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        dtype: torch.dtype | None = None,
        sampling_of: Callable[[Sampling], Sampling] = attrgetter("drafting"),
    ) -> None:
        model.check(target)
        dtype = dtype or target.dtype
        self.dtype = arithmetic(dtype, target.device)
        self.network = model.for_decoding(target.device, dtype)
        target.head.copy_to(self.dtype)
        self.session, self.head = target.session, target.head
        self.identity = model.identity
        self._width = (1 + len(model.features)) * target.head.hidden_size
        if model.features:
            self.session.capture_hidden_states(model.features)
        self.cache = self.session.new_cache(len(self.network.layers), self.dtype)
        # no method: a bound one would refer to this draft, which then outlives its last user
        self._step: StepFunction = self.session.step(_run)
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._ahead = torch.arange(model.slots + 1, device=target.device)
        self._sampling_of, self._sampling = sampling_of, target.sampling
        self._states = torch.empty(0)  # predicted at each row's root and, in slots, behind it

    @abstractmethod
    def _first(self, nodes: int) -> Tensor:
        """The states predicted in the first round of a batch, [R, 1 or more, H]."""

    @abstractmethod
    def _next(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        """The states predicted in later rounds, [R, 1 or more, H], from the last round's tokens and
        the true hidden states before them; `emitted` is their number, int64 [B].
        """

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the prefix; the target must have started a batch of the same prompts."""
        self._last, self.greedy = None, self.head.sampling.greedy
        self._sampling = self._sampling_of(self.head.sampling)
        self._states = self._first(nodes)

    def _predict(self) -> Tensor:
        """The logits of the states at the roots, after guidance, [B, 1 or more, V]."""
        if self._last is not None:
            last, self._last = self._last, None
            self._states = self._next(*last)
        return self.head.guided_logits(self._states)

    def _distribution(self, logits: Tensor, ahead: Tensor) -> Tensor:
        """From logits after guidance, `ahead` tokens after the roots: float32 [B, P, V]."""
        lengths = self.session.prompt.lengths
        return self.head.distribution_of(logits, lengths, ahead, self._sampling)

    def for_depth(self, depth: int) -> Self:
        """The same draft for trees whose deepest node is at `depth`."""
        return self

    @torch.inference_mode()
    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Store the emitted tokens and the hidden states before them for the next round."""
        hidden = scores.hidden[..., : self._width]
        if not draft.tree.is_chain:
            hidden = take(hidden, self.session.prompt.by_row(verdict.visited))
        self._last = verdict.tokens, hidden, emitted

    def _before_prefix(self, keep: Tensor) -> Tensor:
        """The target's hidden state before each prefix token, [R, T, (1 + K)·H]; zero behind tokens
        that are not in `keep`, bool [R, T].
        """
        return shifted(self.session.prefix_hidden[..., : self._width], keep)

    def _run_prefix(self, embeds: Tensor, hidden: Tensor, nodes: int, keep: Tensor) -> Tensor:
        """Start a batch, in a cache with room for `nodes` tokens behind the image, with the first
        tokens of every row, [R, M, ...]; returns the predicted states, [R, M, H]. Prefix tokens
        that are not in `keep`, bool [R, T], are hidden.
        """
        self.session.begin_cache(self.cache, nodes, keep)
        placed = self.session.place_prefix(embeds.shape[1], self.cache, keep)
        return _run(self.network, self.cache, embeds, hidden, *placed)

    def _rerun(self, embeds: Tensor, hidden: Tensor, emitted: Tensor, count: int = 1) -> Tensor:
        """Run the tokens that the last round emitted, and those right behind them, [R, M, ...];
        returns the predicted states at each row's root and behind it, [R, count, H].
        """
        prompt = self.session.prompt
        layout = self.session.layout_of(embeds.shape[1], self.cache)
        states = self._run_step(embeds, hidden, layout, prompt.start_of(emitted))
        return prompt.from_root(states, emitted, count)

    def _run_step(
        self, embeds: Tensor, hidden: Tensor, layout: Layout, start: Tensor | None = None
    ) -> Tensor:
        """Run the network on the tokens of a layout; for `start` see `forward.Session.place`."""
        placed = self.session.place(layout, start, self.cache)
        return self._step(self.network, self.cache, embeds, hidden, *placed)


def _run(
    network: DraftNetwork,
    cache: KVCache,
    embeds: Tensor,
    hidden: Tensor,
    mask: Tensor,
    positions: Tensor,
) -> Tensor:
    """The network's pass."""
    dtype = cache.dtype
    predicted: Tensor = network(embeds.to(dtype), hidden.to(dtype), mask, positions, cache)
    return predicted
