"""EAGLE as a draft model: it drafts a tree level by level from its own predicted hidden states.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size.
"""

import torch
from torch import Tensor

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.draft_pass import DraftPass
from tempera.targets.transformer import TransformerTarget


class EagleDraft(DraftModel):
    """The distributions of a draft network that drafts from its own predictions, for chains and
    trees: one pass of the network for each level. Arguments and errors are those of `DraftPass`.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        dtype: torch.dtype | None = None,
        ranks: bool = False,
    ) -> None:
        self.run = DraftPass(model, target, dtype, ranks)
        self.identity = model.identity
        self._predicted = torch.empty(0)  # states at each row's root, [R, 1, H]

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Run the prefix; the target must have started the same prompts."""
        prefix = self.run.started
        self.greedy = self.run.head.sampling.greedy
        embeds, real, seen = self.run.network.prefix(prefix.embeds, prefix.mask)
        states = self.run.prefix(embeds, self.run.before_prefix(real), nodes, seen)
        self._predicted = persistent(self._predicted, states[:, -1:], prefix.rows)

    def roots(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The draft's distribution after each row's root, float32 [B, V], and the hidden state that
        it predicts there, [R, 1, H].
        """
        logits = self.run.logits(self._predicted)
        return self.run.distribution(logits, 0)[:, 0], self._predicted

    def expand(self, above: Tensor, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, Tensor]:
        """The draft's distributions after the inner nodes of a level, float32 [B, P, V], and the
        hidden states that it predicts there, [R, P, H].
        """
        predicted = self.run.level(above, tokens, level)
        logits = self.run.logits(predicted)
        return self.run.distribution(logits, level.depth), predicted

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Run the emitted tokens with the true hidden states before them."""
        hidden = self.run.before_emitted(draft, verdict, scores)
        embeds = self.run.embed(verdict.tokens)
        self._predicted.copy_(self.run.rerun(embeds, hidden, sequences.emitted))
