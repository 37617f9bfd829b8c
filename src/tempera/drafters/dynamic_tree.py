"""Grow a tree of every row's own from a draft model: the most probable continuations, each proposed
for certain (EAGLE-2).

Shapes: B rows, k branches, M candidates of a level, P of them expanded, N nodes of the tree, V
vocabulary.
"""

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.trees import Frontier, Tree, take
from tempera.errors import EmptyDraft, TemperaError


class DynamicTreeDrafter:
    """Dynamic draft trees (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

    *Expansion* (Section 4.1): level by level, the k candidates of a level with the highest
    cumulative draft probability get their k most probable children. *Reranking* (Section 4.2): of
    all candidates the N with the highest cumulative probability are the tree. A child is never more
    probable than its parent, and ties go to the upper level, so that they hang together.

    The tree is a function of the draft's distributions: nothing is drawn, and the q of every node
    is one-hot. A proposed x is kept by the exact rule with probability p(x), and else replaced from
    p without x. That is lossless whatever the tree, because the tree is fixed before any draw that
    decides on it.

    Args:
        model: where the draft distributions come from; only their order and their products matter.
        vocab_size: V.
        branches: k.
        depth: depth L of the deepest candidates.
        nodes: N.

    Raises:
        TemperaError: the tree is empty, or there are not as many tokens or candidates.
    """

    uniforms = 0
    tree = None

    def __init__(
        self,
        model: DraftModel,
        vocab_size: int,
        branches: int = 10,
        depth: int = 5,
        nodes: int = 59,
    ) -> None:
        if depth < 1:
            raise EmptyDraft(f"depth={depth}")
        if not 1 <= branches <= vocab_size:
            raise TemperaError(
                f"branches={branches} is not possible with a vocabulary of {vocab_size} tokens; "
                f"give 1 to {vocab_size}"
            )
        most = branches + (depth - 1) * branches**2
        if not 1 <= nodes <= most:
            raise TemperaError(
                f"nodes={nodes} is not possible: branches={branches} and depth={depth} expand to "
                f"{most}; give 1 to {most}"
            )
        self.model, self.vocab_size, self.branches, self.depth, self.nodes = (
            model,
            vocab_size,
            branches,
            depth,
            nodes,
        )

    @property
    def identity(self) -> str | None:
        """The model's."""
        return self.model.identity

    def begin(self, prompts: list[str]) -> None:
        """Start new rows."""
        self.model.begin(prompts, max(self.nodes, self.branches * (self.depth - 1)))

    def propose(self, uniforms: Tensor) -> Draft:
        """Grow the trees: Draft with tokens [B, N], one-hot q [B, N, V] and parents [B, N];
        `uniforms` is not used.
        """
        tokens, scores, parents, sick = self._expand()
        best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.nodes].sort(-1).values
        chosen, above = take(tokens, best), take(parents, best)
        places = torch.where(above < 0, -1, torch.searchsorted(best, above))
        tree = Tree.from_parents(
            places, max_depth=self.depth, max_children=min(self.branches, self.nodes)
        )
        return Draft(chosen, _certain(chosen, self.vocab_size, sick), tree)

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Pass the verdict on to the model."""
        self.model.observe(draft, verdict, scores, emitted)

    def _expand(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All candidates: tokens, cumulative log-probabilities and parents' places among them (-1
        for the root), level by level, [B, M] together; and whether the draft was NaN anywhere, [B].
        """
        law = self.model.roots().unsqueeze(1)
        tokens, scores = self._children(law, torch.zeros_like(law[..., 0]))
        found = [(tokens, scores, torch.full_like(tokens, -1))]
        sick, ancestors, first = (
            law[..., 0].isnan().any(-1),
            tokens.new_zeros((len(tokens), 1, 0), dtype=torch.bool),
            0,
        )
        itself = torch.eye(self.branches, dtype=torch.bool, device=tokens.device).expand(
            len(tokens), -1, -1
        )
        for depth in range(1, self.depth):
            best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.branches]
            grown_from = (
                best // self.branches
            )  # a level holds the k children of each expanded node of the level above, in turn
            ancestors = torch.cat([take(ancestors, grown_from), itself], -1)
            law = self.model.expand(take(tokens, best), Frontier(depth, grown_from, ancestors))
            parents = (first + best).unsqueeze(-1).expand(-1, -1, self.branches).flatten(1)
            first += tokens.shape[1]
            tokens, scores = self._children(law, take(scores, best))
            found.append((tokens, scores, parents))
            sick = sick | law[..., 0].isnan().any(-1)
        tokens, scores, parents = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return tokens, scores, parents, sick

    def _children(self, law: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The k most probable tokens after nodes with distributions [B, P, V] and log-probabilities
        [B, P]: [B, P·k], and theirs.
        """
        p, tokens = law.topk(self.branches, -1)
        return tokens.flatten(1), (scores.unsqueeze(-1) + p.nan_to_num(0.0).log()).flatten(1)


def _certain(tokens: Tensor, vocab_size: int, sick: Tensor) -> Tensor:
    """One-hot distributions of tokens [B, N] -> [B, N, V]; NaN in rows that are `sick` [B], as the
    draft was.
    """
    blank = torch.where(sick, torch.nan, 0.0)[:, None, None]
    return blank.repeat(1, tokens.shape[1], vocab_size).scatter_(
        -1, tokens.unsqueeze(-1), (1 + blank).expand(*tokens.shape, 1)
    )
