"""An independent draft: a smaller model of the same image tokens with its own text encoder
(Leviathan et al. 2023).

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import Block, InnerNodes, Tree
from tempera.drafters.draft_files import DraftDtype, torch_dtype
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.runtime.network_identity import identity_of
from tempera.runtime.processor import draft_placement
from tempera.targets.transformer import TransformerTarget


class IndependentDraft(DraftModel):
    """The distributions of a complete smaller model, for chains and trees.

    It samples like the target (`Sampling.drafting`): same temperature, top-k and top-p, and with
    guidance a conditional and an unconditional row per prompt. It reads only the tokens that the
    target emits, at the end of the round that emits them.

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
                f"the draft has a vocabulary of {draft.vocab_size} tokens, but the target has "
                f"{target.vocab_size}: give a draft with the target's image tokenizer."
            )
        if draft.grid != target.grid:
            sizes = ["×".join(map(str, model.grid)) for model in (draft, target)]
            raise TemperaError(
                f"the draft generates {sizes[0]} tokens, but the target generates {sizes[1]}: "
                "give a draft of the same image size."
            )
        self.draft = draft
        self.target = target
        self.identity = draft.identity
        self._states = torch.empty(0)  # at each row's root, [R, 1, H]
        self._emitted: Block  # what a round emits

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Run the draft's own prefix, with its last token, the first root."""
        self.greedy = self.target.sampling.greedy
        self.draft.sampling = self.target.sampling.drafting
        self.draft.begin(prompts, nodes, rows)
        if rows is None:
            self._emitted = Tree.chain(sequences.depth).to(sequences.device).block
        runner = self.draft.runner
        self._states = persistent(self._states, runner.run_root(), runner.prefix.rows)

    def roots(self, sequences: Sequences) -> tuple[Tensor, None]:
        """The draft's distribution after each row's root, float32 [B, V]; `expand` has what it
        needs in the draft's cache.
        """
        return self._distribution(self._states, 0)[:, 0], None

    def expand(self, above: None, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, None]:
        """The draft's distributions after the inner nodes of a level, float32 [B, P, V]."""
        layout = self.draft.runner.layout_of(level.block)
        states = self.draft.runner.run(self.draft.head.embed(tokens), layout)
        return self._distribution(states, level.depth), None

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Run the emitted tokens, which overwrites rejected drafts in the cache."""
        tokens = verdict.tokens
        emitted = sequences.emitted
        runner = self.draft.runner
        self.draft.advance(verdict.next_token, emitted, self.target.runner.prompt.longest)
        layout = runner.layout_of(self._emitted)
        start = runner.prompt.start_of(emitted)
        states = runner.run(self.draft.head.embed(tokens), layout, start)
        self._states.copy_(runner.prompt.from_root(states, emitted))

    def _distribution(self, states: Tensor, depth: int) -> Tensor:
        lengths = self.draft.runner.prompt.lengths
        return self.draft.head.distribution(states, lengths, depth)


@dataclass(frozen=True)
class SmallerModel:
    """A smaller model of the target's tokens.

    Attributes:
        network: its network.
        text_encoder: the module whose `encode` is its conditioner.
    """

    network: Any
    text_encoder: Any


def build_independent(
    smaller: SmallerModel | None,
    target: TransformerTarget,
    tree: Tree,
    dtype: DraftDtype | None = None,
) -> StaticTreeDrafter:
    """The drafter of a smaller model.

    Args:
        smaller: the smaller model that the target's configuration names (`model.independent`).
        target: the target.
        tree: static tree drafted every round.
        dtype: of the smaller model's weights, see `processor.draft_placement`.

    Raises:
        TemperaError: there is no smaller model, or draft and target do not generate the same
            tokens.
    """
    if smaller is None:
        raise TemperaError(
            "this model has no smaller model to draft for it: choose another model or drafter "
            "(model=shapes and llamagen_3b_c2i have one)",
            option="drafter",
        )
    placement = draft_placement(torch_dtype(dtype), target.dtype, target.device)
    identity = identity_of(smaller.network)  # before it is rounded, as the target's
    network = placement.frozen(smaller.network, smaller.network.model.layers)
    text_encoder = placement.frozen(smaller.text_encoder)
    draft = TransformerTarget(network, text_encoder.encode, target.sampling, identity=identity)
    if target.runner.packed:
        draft.pack()
    if target.compiled:
        draft.compile()
    return StaticTreeDrafter(IndependentDraft(draft, target), tree)
