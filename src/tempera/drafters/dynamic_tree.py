"""Dynamic draft trees (EAGLE-2): for each row, the most probable continuations under the draft
model. Nothing is drawn, so every proposal has a one-hot q.

Shapes: B rows, k branches, M candidates of a level, P of them expanded, N nodes of the tree, V
vocabulary.
"""

import torch
from torch import Tensor

from tempera.decoding.checks import predicted
from tempera.decoding.interfaces import Draft, Drafter, DraftModel, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes, Tree, take
from tempera.errors import TemperaError


class DynamicTreeDrafter(Drafter):
    """Dynamic draft trees (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

    *Expansion* (Section 4.1): at each level, the k candidates with the highest cumulative draft
    probability get their k most probable children. *Reranking* (Section 4.2): the N candidates with
    the highest cumulative probability form the tree. They are connected, because a child is never
    more probable than its parent and ties go to the upper level.

    The tree is a function of the draft's distributions. The exact rule accepts a proposed x with
    probability p(x); after a rejection the residual is p without x. This is lossless for any tree,
    because the tree is fixed before any draw that tests it.

    Args:
        model: the draft model; its distributions only rank the candidates.
        vocab_size: V.
        branches: k.
        depth: depth L of the deepest candidates.
        nodes: N.

    Raises:
        TemperaError: the tree is empty, or k exceeds V, or N the number of candidates.
    """

    def __init__(
        self,
        model: DraftModel,
        vocab_size: int,
        branches: int = 10,
        depth: int = 5,
        nodes: int = 59,
    ) -> None:
        if depth < 1:
            raise TemperaError(
                f"depth={depth} drafts nothing; give 1 or more, or method=ar", option="depth"
            )
        if not 1 <= branches <= vocab_size:
            raise TemperaError(
                f"branches={branches} is not possible with a vocabulary of {vocab_size} tokens; "
                f"give 1 to {vocab_size}"
            )
        most = branches + (depth - 1) * branches**2
        if not 1 <= nodes <= most:
            raise TemperaError(
                f"nodes={nodes} is not valid: branches={branches} and depth={depth} expand to "
                f"{most}; give 1 to {most}"
            )
        self.model = model
        self.identity = model.identity
        self.branches = branches
        self.nodes = nodes
        self.depth = min(depth, nodes)  # every node of a path counts

    def begin(
        self, prompts: list[str], sequences: Sequences, uniforms: Tensor, rows: Tensor | None
    ) -> None:
        """See `Drafter.begin`."""
        nodes = max(self.nodes, self.branches * (self.depth - 1))
        self.model.begin(prompts, nodes, sequences, rows)

    def propose(self, sequences: Sequences, uniforms: Tensor) -> Draft:
        """Grow the trees: tokens int64 [B, N] and parents [B, N]. Nothing is drawn, so
        `uniforms` are not used.
        """
        tokens, scores, parents, has_nan = self._expand(sequences)
        best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.nodes].sort(-1).values
        chosen = take(tokens, best)
        above = take(parents, best)
        parent_nodes = torch.where(above < 0, -1, torch.searchsorted(best, above))
        tree = Tree(parent_nodes, self.depth, min(self.branches, self.nodes))
        return Draft(chosen, None, tree, broken=has_nan)

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Pass the verdict to the draft model."""
        self.model.observe(sequences, draft, verdict, scores)

    def _expand(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All candidates level by level: tokens, cumulative log-probabilities and the indices of
        their parents (-1 for the root), [B, M] each; and whether the model gave NaN, bool [B].
        """
        roots = self.model.roots(sequences)
        probs, above = predicted(self.model, "roots", roots, len(sequences.lengths))
        probs = probs.unsqueeze(1)
        tokens, scores = self._children(probs, torch.zeros_like(probs[..., 0]))
        found = [(tokens, scores, torch.full_like(tokens, -1))]
        has_nan = probs[..., 0].isnan().any(-1)
        ancestors = tokens.new_zeros((len(tokens), 1, 0), dtype=torch.bool)
        itself = torch.eye(self.branches, dtype=torch.bool, device=tokens.device)
        itself = itself.expand(len(tokens), -1, -1)
        first = 0  # index of the level's first candidate
        for depth in range(1, self.depth):
            best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.branches]
            # a level lists the k children of each expanded node of the level above
            grown_from = best // self.branches
            ancestors = torch.cat([take(ancestors, grown_from), itself], -1)
            level = InnerNodes(depth, grown_from, ancestors)
            inner = take(tokens, best)
            below = self.model.expand(above, inner, level)
            probs, above = predicted(self.model, "expand", below, *inner.shape)
            parents = (first + best).unsqueeze(-1).expand(-1, -1, self.branches).flatten(1)
            first += tokens.shape[1]
            tokens, scores = self._children(probs, take(scores, best))
            found.append((tokens, scores, parents))
            has_nan = has_nan | probs[..., 0].isnan().any(-1)
        tokens = torch.cat([level_tokens for level_tokens, _, _ in found], 1)
        scores = torch.cat([level_scores for _, level_scores, _ in found], 1)
        parents = torch.cat([level_parents for _, _, level_parents in found], 1)
        return tokens, scores, parents, has_nan

    def _children(self, probs: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The k most probable children of each node.

        Args:
            probs: distributions after the nodes, [B, P, V].
            scores: cumulative log-probabilities of the nodes, [B, P].

        Returns:
            the children's tokens and cumulative log-probabilities, [B, P·k] each.
        """
        p, tokens = probs.topk(self.branches, -1)
        return tokens.flatten(1), (scores.unsqueeze(-1) + p.nan_to_num(0.0).log()).flatten(1)
