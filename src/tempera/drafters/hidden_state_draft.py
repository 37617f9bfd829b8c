"""What draft models share whose network reads the target's hidden states: cache, slots, and the
tokens that the last round emitted.

Shapes: B prompts, R rows (2B under guidance), L depth of the draft, H hidden size, K features.
"""

from typing import Self

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.trees import take
from tempera.drafters.cache_slots import Places
from tempera.drafters.draft_network import DraftNetwork
from tempera.runtime.processor import arithmetic
from tempera.targets.cache import KVCache
from tempera.targets.compiled import StepFunction
from tempera.targets.transformer import TransformerTarget


class HiddenStateDraft:
    """Base of draft models that run a `DraftNetwork` beside its target.

    The target's forward pass gives the true hidden states of accepted tokens. `observe` stores
    them, and the first pass of the next round reruns all accepted tokens with them (see
    `cache_slots`), which overwrites the draft's own entries in the cache. With guidance there are
    two rows per prompt, combined as in the target.

    Args:
        model: the draft network.
        target: the target; start each batch on it first.
        dtype: of the draft's weights, in which it computes (see `processor.arithmetic`); by
            default the target's. A coarser one changes q, not the law of exact rules: tokens are
            drawn from the q that they are tested with.

    Attributes:
        cache: keys and values of the draft's layers.
        identity: see `Drafter.identity`.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    cache: KVCache
    _step: StepFunction
    _shape: tuple[int, int] | None
    _true: tuple[Tensor, Tensor, Tensor] | None

    def __init__(
        self, model: DraftNetwork, target: TransformerTarget, dtype: torch.dtype | None = None
    ) -> None:
        model.check(target)
        dtype = dtype or target.dtype
        self.dtype = arithmetic(dtype, target.device)
        self.model = model.drafting(target.device, dtype)
        target.head.copy_to(self.dtype)
        self.session, self.head = target.session, target.head
        self.identity = model.identity
        self._width = (1 + len(model.features)) * target.head.hidden_size
        if model.features:
            self.session.capture_hidden_states(model.features)
        self._like = torch.zeros(1, device=target.device, dtype=self.dtype)
        self._cached_layers = model.cached_layers
        self._forget()

    @property
    def greedy(self) -> bool:
        """See `DraftModel.greedy`."""
        return self.head.sampling.greedy

    def for_depth(self, depth: int) -> Self:
        """The same draft for trees whose deepest node is at `depth`."""
        return self

    @torch.inference_mode()
    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Store the emitted tokens and the hidden states before them for the next round."""
        hidden = scores.hidden[..., : self._width]
        if not draft.tree.is_chain:
            hidden = take(hidden, self.session.prompt.by_row(verdict.visited))
        self._true = verdict.tokens, hidden, emitted

    def release(self) -> None:
        """Free the memory of a decoded batch at once; the draft cannot be used any more. It and its
        step refer to each other, so otherwise the memory stays occupied until Python's garbage
        collector runs.
        """
        del self._step, self.cache
        self._places = Places(self.session, self.dtype)

    def _forget(self) -> None:
        """Have no cache, and nothing of a last round."""
        self._places = Places(self.session, self.dtype)
        self._shape, self._true = None, None

    def _forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_index: Tensor,
    ) -> Tensor:
        """The network's forward pass that can be compiled; `write_index` is the cache's."""
        self.cache.write_index = write_index
        embeds, hidden = embeds.to(self.dtype), hidden.to(self.dtype)
        predicted: Tensor = self.model(embeds, hidden, mask, (cos, sin), self.cache)
        return predicted

    def _rotate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding of the tokens in these slots, int64 [R, S]."""
        prompt = self.session.prompt
        return self.model.rotation(self._like, slots.clamp(max=prompt.last))

    def _allocate(self, nodes: int) -> bool:
        """Set a cache for the target's rows with room for `nodes` tokens behind an image, reusing
        one of the same shape; otherwise the last one is freed first. Returns whether it is new.
        """
        session = self.session
        self._true = None
        shape = session.prompt.rows, session.capacity(nodes)
        is_new = self._shape != shape
        if is_new:
            if self._shape is not None:
                self._shape = None  # until there is a new cache, for which memory may not suffice
                del self.cache
                self._places = Places(self.session, self.dtype)
            self.cache = session.new_cache(self._cached_layers, shape[1], self.dtype)
            self._shape = shape
            self._step = session.step(self._forward)
        else:
            self.cache.reset()
        self._places.begin(self.cache)
        return is_new
