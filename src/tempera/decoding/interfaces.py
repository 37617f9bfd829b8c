"""The nouns of speculative decoding, and the protocols of its parts: targets, drafters and the
models that draft, rules.

Shapes: B rows (prompts), N drafted nodes in a round, V vocabulary, H hidden size, L depth of the
draft tree. Every tensor leads with B.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tempera.decoding.trees import Frontier, Tree


@dataclass(frozen=True)
class Draft:
    """One round's proposal.

    Attributes:
        tokens: drafted token of every node, int64 [B, N].
        q: the distribution each node was *really drawn from*, float32 [B, N, V]. For siblings drawn
            without replacement this is the parent's draft distribution with the earlier siblings
            removed, renormalised.
        tree: topology, shared by all rows (`Tree.parents` [N]) or one per row ([B, N]). N = 0 is
            plain autoregression.
        draws: uniform draws that belong to the positions after the root and after every node,
            float32 [B, 1 + N], where the method fixes them for all rounds (Jacobi decoding); else
            none.
        fresh: whether the tokens are drawn with randomness of this round alone. Where a rejected
            guess lives on in a later round (the coupled methods of the Jacobi family), a rule may
            not let a token decide on those before it.
    """

    tokens: Tensor
    q: Tensor
    tree: Tree
    draws: Tensor | None = None
    fresh: bool = True


@dataclass(frozen=True)
class Scores:
    """What one target forward pass says about a draft; index 0 is the root (the last emitted
    token), 1 + n is node n.

    Attributes:
        p: the target's sampled distribution after the root and after every node, float32 [B, 1 + N,
            V].
        hidden: the target's last hidden states, [R, 1 + N, H]; R = B, or 2B under guidance
            (conditional rows first).
        soft: in greedy decoding, where p is one-hot, the distribution whose largest entry that is
            (temperature 1); else none.
    """

    p: Tensor
    hidden: Tensor
    soft: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: accepted nodes from the top, int64 [B, L], -1 past the end.
        visited: the node before each emitted token, counted 0..N with the root first, int64
            [B, 1 + L]: 0, then 1 + `path`; 0 past the end.
        accepted: number of accepted drafted tokens τ, int64 [B], 0..L.
        tokens: the emitted tokens, int64 [B, L + 1]: the accepted path, then the drawn token at
            index τ; what follows is undefined.
        next_token: the token drawn from the last residual, or from p at a leaf, int64 [B]. It is
            `tokens[b, accepted[b]]`.
    """

    path: Tensor
    visited: Tensor
    accepted: Tensor
    tokens: Tensor
    next_token: Tensor


class ImageModel(Protocol):
    """A model of images as sequences of tokens, discrete (`Target`) or continuous
    (`tempera.continuous.loop.Model`).
    """

    @property
    def length(self) -> int:
        """T, tokens per image."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the token grid; rows × columns = T."""

    @property
    def identity(self) -> str:
        """Short name of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the network computes."""

    @property
    def compiled(self) -> bool:
        """Whether the steps of a round are compiled."""

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """Run the text encoder on these prompts now, and not again inside the `with` block."""


class TokenModel(Protocol):
    """Sizes of discrete images, which drafters without a network need to know."""

    @property
    def vocab_size(self) -> int:
        """V, different tokens."""

    @property
    def length(self) -> int:
        """T, tokens per image."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the token grid; rows × columns = T."""


class Target(ImageModel, TokenModel, Protocol):
    """A model being accelerated. It owns its prompt state and its cache, and works on B rows
    between one `begin` and the next.
    """

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Start one image per prompt; at most `nodes` drafted nodes will be scored a round."""

    def score(self, draft: Draft) -> Scores:
        """One forward pass over the root and all nodes of the draft."""

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Keep the accepted path, forget the rest; the drawn token becomes the root. `emitted` [B]
        counts the tokens really kept this round (0 for a finished row, less than τ + 1 where the
        image ended inside the draft).
        """


class Drafter(Protocol):
    """Proposes continuations of every row."""

    @property
    def nodes(self) -> int:
        """N, drafted nodes per round."""

    @property
    def depth(self) -> int:
        """L, depth of the deepest node."""

    @property
    def uniforms(self) -> int:
        """Uniform draws per row that `propose` consumes in the coming round."""

    @property
    def tree(self) -> Tree | None:
        """The tree it was given to draft in every round; None if it shapes its own."""

    @property
    def identity(self) -> str | None:
        """Short name of the draft's weights; None if it has no trained ones."""

    def begin(self, prompts: list[str]) -> None:
        """Start new rows, after the target's own `begin`."""

    def propose(self, uniforms: Tensor) -> Draft:
        """Draft the next round; `uniforms` float32 [B, self.uniforms] in [0, 1)."""

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Learn what the target decided."""


class DraftModel(Protocol):
    """A model that says cheaply what comes next, level by level of a tree. `drafters.static_tree`
    and `drafters.dynamic_tree` draft with it; `drafters.eagle.EagleDraft` is one.
    """

    @property
    def identity(self) -> str | None:
        """See `Drafter.identity`."""

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Start new rows, after the target's own `begin`. A round drafts at most `nodes` tokens and
        passes at most as many to `expand`.
        """

    def roots(self) -> Tensor:
        """Q after the root, the last emitted token: float32 [B, V]. Forgets what `expand` added in
        the last round.
        """

    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """Q after the inner nodes of a level of the tree, whose tokens are given: [B, P] -> float32
        [B, P, V].

        `level.inner_parents` says which inner node of the level above each continues,
        `level.ancestors` which of the inner nodes passed in so far (levels in order) it may attend
        to. Levels come in order; a level without inner nodes is skipped.
        """

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Learn what the target decided: see `Drafter.observe`."""


class Rule(Protocol):
    """An acceptance rule: the acceptance probability f and the residual that belongs to it.
    Arguments broadcast over leading dimensions `...`; `depth` is 1-based, int64 [...].

    A rule is exact only as a pair; `tempera.exactness.check` compares what it emits with the
    target's law.
    """

    def accept_prob(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """f(token; p, q, depth): p and q [..., V], token and depth [...] -> [...], in [0, 1]."""

    def accept_probs(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """f at every token of the vocabulary: [..., V] -> [..., V]."""

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The distribution that replaces a rejected `token`, [..., V], sums to 1."""

    def mean_residual(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The law of what replaces a rejected draft x ~ q: Σ_x q(x)·(1 - f(x))·residual(x),
        normalised; any law where nothing is ever rejected. [..., V] -> [..., V]. See
        `SharedResidual`.
        """


class SharedResidual(ABC):
    """Base of the rules whose residual is the same for every rejected token."""

    @abstractmethod
    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """See `Rule.residual`; `token` must not matter."""

    def mean_residual(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The residual itself."""
        return self.residual(p, q, torch.zeros_like(depth), depth)


@runtime_checkable
class JointRule(Protocol):
    """A rule that decides on a draft as a whole, because its tests at different depths are coupled
    (block verification).
    """

    lossless: bool
    """Whether emitted tokens follow the target's law, so that no position adds to the bounds on
    TV and KL.
    """

    def walk(self, draft: Draft, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Decide on a whole draft, as `verification.verify` does test by test.

        Args:
            draft: the proposal; N nodes.
            p: the target's distribution after the root and every node, float32 [B, 1 + N, V].
            uniforms: draws in [0, 1), [B, N + 1]; the last one is reserved for the drawn token.

        Returns:
            the accepted nodes, bool [B, N]: with each all its ancestors, at most one per depth; and
            the distribution of the token after the deepest of them, [B, V].
        """


@runtime_checkable
class GreedyRule(Protocol):
    """A rule that in greedy decoding keeps more than the target's own choice, judging by the
    distributions from which that choice was made.
    """

    def keeps(self, p: Tensor, token: Tensor) -> Tensor:
        """Whether a drafted token is kept: untempered p [..., V], token [...] -> bool [...]. All
        siblings are tested against the same p.
        """

    def keeps_each(self, p: Tensor) -> Tensor:
        """The same for every token of the vocabulary: [..., V] -> bool [..., V]."""
