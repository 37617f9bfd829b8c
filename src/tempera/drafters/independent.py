"""An independent draft: a smaller model of the same image tokens with its own text encoder
(Leviathan et al. 2023).

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.trees import Frontier, Tree
from tempera.drafters.cache_slots import Places, last_emitted
from tempera.drafters.draft_network import DraftDtype, torch_dtype
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.runtime.processor import arithmetic
from tempera.targets.transformer import TransformerTarget


class IndependentDraft:
    """The distributions of a complete smaller model, for chains and trees.

    It samples like the target (`Sampling.drafting`): same temperature, top-k and top-p, and with
    guidance a conditional and an unconditional row per prompt. It reads only the tokens that the
    target emits. `observe` stores them, and the first pass of the next round runs them at once (see
    `cache_slots`), which overwrites rejected drafts in the cache.

    Args:
        draft: the smaller model, with its own network, conditioner and grid; its sampling is set to
            the target's.
        target: the target.

    Raises:
        TemperaError: the two have different vocabularies or image lengths.
    """

    def __init__(self, draft: TransformerTarget, target: TransformerTarget) -> None:
        if draft.vocab_size != target.vocab_size:
            raise TemperaError(
                f"the draft has a vocabulary of {draft.vocab_size} tokens, the target of "
                f"{target.vocab_size}: give a draft with the "
                "target's image tokenizer."
            )
        if draft.grid != target.grid:
            sizes = ["×".join(map(str, model.grid)) for model in (draft, target)]
            raise TemperaError(
                f"the draft generates {sizes[0]} tokens, the target {sizes[1]}: give a draft of "
                "the same image size."
            )
        self.draft, self.target = draft, target
        self._places = Places(draft.session)
        self._root = torch.zeros(1, dtype=torch.int64, device=draft.device)

    @property
    def identity(self) -> str:
        """Identity of the draft model's weights."""
        return self.draft.identity

    @property
    def greedy(self) -> bool:
        """See `DraftModel.greedy`."""
        return self.target.sampling.greedy

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the draft's own prefix."""
        self.draft.sampling = self.target.sampling.drafting
        self.draft.begin(prompts, nodes)
        self._places.begin(self.draft.session.cache)
        self._decided: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        session, head, prompt = self.draft.session, self.draft.head, self.draft.session.prompt
        self.draft.longest = self.target.longest
        self._places.start()
        if self._decided is None:
            rows = torch.empty(len(prompt.lengths), 0, device=session.device)
            return self.draft.score(NoDraft().propose(rows)).p[:, 0]
        tokens, emitted = self._decided
        slots, mask = self._places.decided(tokens.shape[1], emitted)
        hidden = session.run(head.embed(tokens), mask, slots.clamp(max=prompt.last))
        hidden = last_emitted(hidden, emitted)
        return head.distribution(hidden, prompt.lengths, self._root)[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, with tokens int64 [B, P]:
        float32 [B, P, V].
        """
        session, head, prompt = self.draft.session, self.draft.head, self.draft.session.prompt
        layout = self._places.layout_of(level)
        mask = self._places.level(layout)
        positions = (prompt.root_slots[:, None] + layout.ahead).clamp_(max=prompt.last)
        hidden = session.run(head.embed(tokens), mask, positions)
        return head.distribution(hidden, prompt.lengths, layout.ahead)

    @torch.inference_mode()
    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Store the emitted tokens for the next round."""
        self.draft.advance(verdict.next_token, emitted, verdict.tokens.shape[1])
        self._decided = verdict.tokens, emitted


class Smaller:
    """A smaller model.

    Args:
        network: its network.
        text_encoder: the module whose `encode` is its conditioner.
        target: makes a target of network, conditioner and sampling.
    """

    def __init__(
        self,
        network: Any,
        text_encoder: Any,
        target: Callable[..., TransformerTarget] = TransformerTarget,
    ) -> None:
        self.network, self.text_encoder, self.target = network, text_encoder, target


def build_independent(
    smaller: Smaller | None,
    target: TransformerTarget,
    tree: Tree,
    dtype: DraftDtype | None = None,
) -> StaticTreeDrafter:
    """The drafter of a smaller model.

    Args:
        smaller: the smaller model that the target's configuration names (`model.independent`).
        target: the target.
        tree: static tree drafted every round.
        dtype: of the smaller model's weights (see `processor.arithmetic`); by default the target's.

    Raises:
        TemperaError: there is no smaller model, or draft and target do not generate the same
            tokens.
    """
    if smaller is None:
        raise TemperaError(
            "this model names no smaller one to draft for it: choose another model or drafter "
            "(model=shapes and llamagen_3b_c2i have one)",
            option="drafter",
        )
    device, wanted = target.device, torch_dtype(dtype) or target.dtype
    network, text_encoder = (
        part.to(device, wanted).to(arithmetic(wanted, device))
        for part in (smaller.network, smaller.text_encoder)
    )
    draft = smaller.target(
        network=network,
        conditioner=text_encoder.encode,
        sampling=target.sampling,
    )
    if target.fused:
        draft.fuse()
    if target.compiled:
        draft.compile()
    return StaticTreeDrafter(IndependentDraft(draft, target), tree)
