"""EAGLE-1 as a draft model: it grows a tree level by level on its own predicted hidden states.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Frontier, Tree, take
from tempera.drafters.cache_slots import Places, last_emitted
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle_network import EagleModel, shifted
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.runtime.pretrained import RANDOM
from tempera.targets.masks import causal_mask
from tempera.targets.transformer import TransformerTarget


class EagleDraft:
    """Draft distributions of a draft network beside its target, for chains and trees.

    The hidden states of accepted tokens come true with the target's forward pass. `observe` keeps
    them, and the next round's first forward pass reruns all pairs of the accepted tokens at once
    (see `cache_slots`); the predicted ones in the cache are overwritten. Under guidance there are
    two rows per prompt, combined as the target combines its own.

    Args:
        model: the draft network.
        target: the target, begun before this.
        draw_from: the sampling that makes the draft's distributions, from the target's; the
            target's own unless given.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        draw_from: Callable[[Sampling], Sampling] | None = None,
    ) -> None:
        model.check(target)
        self.model = model.drafting(target.device, target.dtype)
        self.session, self.head, self.draw_from = target.session, target.head, draw_from
        self.identity = model.identity
        self._places = Places(target.session)
        self._shape: tuple[int, int] | None = None

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the pairs of the prefix; the target has begun with the same prompts."""
        session, prompt = self.session, self.session.prompt
        self._sampling = None if self.draw_from is None else self.draw_from(self.head.sampling)
        self._allocate(nodes)
        positions = torch.arange(prompt.prefix, device=session.device).expand(prompt.rows, -1)
        self.cache.place(positions, prompt.prefix)
        mask = causal_mask(prompt.keep, prompt.prefix, session.dtype)
        hidden = shifted(session.prefix_hidden, prompt.keep)
        rotation = self.model.rotation(hidden, positions)
        self._above = self._forward(prompt.embeds, hidden, mask, *rotation, self.cache.where)[
            :, -1:
        ]
        self._true: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        self._places.start()
        if self._true is None:
            self._rotation = self._rotate(self._places.first[:, None] + self._ahead)
        else:
            self._above = self._replay(*self._true)
            self._true = None
        return self._distribution(self._zero)[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, whose tokens are `tokens`
        int64 [B, P]: float32 [B, P, V].
        """
        layout = self._places.layout_of(level)
        above = self._above if layout.parents is None else take(self._above, layout.parents)
        mask = self._places.level(layout)
        cos, sin = (part[:, level.depth - 1 : level.depth] for part in self._rotation)
        self._above = self._step(self.head.embed(tokens), above, mask, cos, sin, self.cache.where)
        return self._distribution(layout.ahead)

    @torch.inference_mode()
    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Keep the emitted tokens and the hidden states before them for the next round."""
        hidden = scores.hidden
        if not draft.tree.is_chain:
            hidden = take(hidden, verdict.visited.repeat(self.session.prompt.copies, 1))
        self._true = verdict.tokens, hidden, emitted

    def _replay(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        """Run the pairs of the last round's tokens with their true hidden states -> the prediction
        at each row's root, [R, 1, H].

        Rotates at once for these and for the levels to come.
        """
        count = tokens.shape[1]
        slots, mask = self._places.decided(count, emitted)
        cos, sin = self._rotate(torch.cat([slots, self._places.first[:, None] + self._ahead], 1))
        self._rotation = cos[:, count:], sin[:, count:]
        predicted = self._step(
            self.head.embed(tokens),
            hidden,
            mask,
            cos[:, :count],
            sin[:, :count],
            self.cache.where,
        )
        return last_emitted(predicted, emitted)

    def _distribution(self, ahead: Tensor) -> Tensor:
        """What the predicted hidden states say, `ahead` tokens beyond the roots: [B, M, V]."""
        return self.head.distribution(
            self._above, self.session.prompt.lengths, ahead, self._sampling
        )

    def _forward(
        self, embeds: Tensor, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, where: Tensor
    ) -> Tensor:
        """The network, over the tokens of a step; `where` is the cache's."""
        self.cache.where = where
        return self.model(embeds, hidden, mask, (cos, sin), self.cache)

    def _rotate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.rotation(self._above, slots.clamp_(max=self.session.prompt.last_slot))

    def _allocate(self, nodes: int) -> None:
        """A cache of one layer for the target's rows: the last one if it has the same shape."""
        session = self.session
        shape = session.prompt.rows, session.capacity(nodes)
        if self._shape != shape:
            self._shape, self.cache = shape, session.new_cache(1, shape[1])
            self._zero = torch.zeros(1, dtype=torch.int64, device=session.device)
            self._step = session.step(self._forward)
        self._places.begin(self.cache)
        self._ahead = torch.arange(max(1, nodes), device=session.device)


def load(path: str, target: TransformerTarget) -> EagleModel:
    """The draft in a directory or, where `path` is `random`, an untrained one of the target's
    sizes, which is said.
    """
    if path != RANDOM:
        return EagleModel.from_pretrained(path)
    print(
        "draft: random weights, to measure what drafting costs; hardly anything that it proposes "
        "is accepted"
    )
    return EagleModel.untrained(target)


def build_eagle(path: str, target: TransformerTarget, tree: Tree) -> StaticTreeDrafter:
    """The EAGLE drafter of a trained draft.

    Args:
        path: directory with `config.json` and `model.safetensors`, or `random`.
        target: the target it was trained for.
        tree: static tree drafted every round.

    Raises:
        TemperaError: the directory holds no sound draft, or one for another target.
    """
    return StaticTreeDrafter(EagleDraft(load(path, target), target), tree)


def confidence(sampling: Sampling) -> Sampling:
    """What candidates are ranked by: the guided distribution at the target's temperature, cut
    nowhere.

    Nothing is drawn from it, so it may differ from the target's. Cut at the draft's top-k or top-p,
    it would give tokens no chance that the target keeps; at temperature 0 it would have no second
    choice at all, so there it is that of temperature 1.
    """
    return replace(sampling, temperature=sampling.temperature or 1.0, top_k=0, top_p=1.0)


def build_eagle2(
    path: str, target: TransformerTarget, branches: int = 10, depth: int = 5, nodes: int = 59
) -> DynamicTreeDrafter:
    """The EAGLE-2 drafter of a trained EAGLE draft. See `dynamic_tree.DynamicTreeDrafter` and
    `build_eagle`.

    Raises:
        TemperaError: the directory holds no sound draft, or one for another target; or the tree is
            not possible.
    """
    model = EagleDraft(load(path, target), target, confidence)
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
