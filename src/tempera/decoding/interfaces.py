"""The data types of speculative decoding, and the protocols of targets, drafters, draft models and
rules.

Shapes: B rows (prompts), N drafted nodes of a round, V vocabulary, H hidden size, L depth of the
draft tree. The first dimension of every tensor is B.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

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
        draws: uniform draws of the positions after the root and after every node, float32
            [B, 1 + N], if the method fixes them for all rounds (Jacobi decoding); otherwise None.
        fresh: whether all tokens are drawn with new randomness in this round. If rejected guesses
            survive into later rounds (the coupled methods of the Jacobi family), the acceptance of
            a token must not depend on later tokens.
    """

    tokens: Tensor
    q: Tensor
    tree: Tree
    draws: Tensor | None = None
    fresh: bool = True

    @property
    def health(self) -> Tensor:
        """A number for each row, NaN if the draft model gave NaN, float32 [B]; a NaN makes a whole
        distribution NaN.
        """
        return self.q[..., :1].sum((-2, -1))


class OneHotDraft(Draft):
    """A proposal that is a function of the context (EAGLE-2): the q of every node is one-hot, and
    siblings differ. q is only made when something asks for it.

    Args:
        tokens, tree: see `Draft`.
        vocab_size: V.
        health: see `Draft.health`.
    """

    def __init__(self, tokens: Tensor, tree: Tree, vocab_size: int, health: Tensor) -> None:
        for name, value in (("tokens", tokens), ("tree", tree), ("_vocab_size", vocab_size)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_health", health)

    _vocab_size: int
    _health: Tensor

    @cached_property
    def q(self) -> Tensor:
        """One-hot distributions, [B, N, V]; NaN in rows where the draft model's were."""
        blank = (0 * self._health)[:, None, None]
        return blank.repeat(1, self.tokens.shape[1], self._vocab_size).scatter_(
            -1, self.tokens.unsqueeze(-1), (1 + blank).expand(*self.tokens.shape, 1)
        )

    @property
    def health(self) -> Tensor:
        """See `Draft.health`."""
        return self._health


@dataclass(frozen=True)
class Scores:
    """The target's scores of a draft from one forward pass; index 0 is the root (the last emitted
    token), 1 + n is node n.

    Attributes:
        p: the target's sampled distribution after the root and after every node, float32 [B, 1 + N,
            V].
        hidden: the target's last hidden states, [R, 1 + N, H]; R = B, or 2B under guidance
            (conditional rows first).
        soft: in greedy decoding, where p is one-hot, the distribution at temperature 1; otherwise
            None.
    """

    p: Tensor
    hidden: Tensor
    soft: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of verification.

    Attributes:
        stop: where the walk ended, counted 0..N with the root first, int64 [B].
        visited: the node before each emitted token, counted 0..N with the root first, int64
            [B, 1 + L]: 0, then the accepted path; 0 past the end.
        accepted: number of accepted drafted tokens τ, int64 [B], 0..L.
        tokens: the emitted tokens, int64 [B, L + 1]: the accepted path, then the drawn token at
            index τ; undefined after it.
        next_token: the token drawn from the last residual, or from p at a leaf, int64 [B]. It is
            `tokens[b, accepted[b]]`.
    """

    stop: Tensor
    visited: Tensor
    accepted: Tensor
    tokens: Tensor
    next_token: Tensor

    @property
    def path(self) -> Tensor:
        """Accepted nodes from the root down, int64 [B, L], -1 past the end."""
        return self.visited[:, 1:] - 1


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
        """Short hash of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The network's dtype."""

    @property
    def compiled(self) -> bool:
        """Whether the steps of a round are compiled."""

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """Encode these prompts now and reuse the result inside the `with` block."""


class TokenModel(Protocol):
    """The sizes of discrete images, for drafters without a network."""

    @property
    def vocab_size(self) -> int:
        """V, the number of different tokens."""

    @property
    def length(self) -> int:
        """T, tokens per image."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the token grid; rows × columns = T."""


class Target(ImageModel, TokenModel, Protocol):
    """The model to accelerate. It owns its prompt state and its cache; `begin` starts a batch of B
    rows.
    """

    longest: int
    """Tokens of the batch's longest image, which the loop sets after each round: attention needs no
    more keys than this image has.
    """

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Start a batch with one image per prompt and at most `nodes` drafted nodes per round."""

    def score(self, draft: Draft) -> Scores:
        """One forward pass over the root and all nodes of the draft."""

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Keep the accepted path, roll back the rest, and make the drawn token the root.

        Args:
            draft: the draft.
            verdict: its verdict.
            emitted: tokens that each row emits in this round, int64 [B]: τ + 1, less if the image
                ends inside the draft, 0 for a finished row.
        """


class Drafter(Protocol):
    """Proposes a draft for every row."""

    @property
    def nodes(self) -> int:
        """N, drafted nodes per round."""

    @property
    def depth(self) -> int:
        """L, depth of the deepest node."""

    @property
    def uniforms(self) -> int:
        """Uniform draws per row that `propose` needs in the next round."""

    @property
    def tree(self) -> Tree | None:
        """The static tree drafted in every round; None if trees are dynamic."""

    @property
    def identity(self) -> str | None:
        """Short hash of the draft's weights; None if it has no weights."""

    def begin(self, prompts: list[str]) -> None:
        """Start a batch, after the target's `begin`."""

    def propose(self, uniforms: Tensor) -> Draft:
        """Draft the next round; `uniforms` float32 [B, self.uniforms] in [0, 1)."""

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Update the drafter's state with the outcome of a round; for `emitted` see
        `Target.commit`.
        """


@runtime_checkable
class RoundState(Protocol):
    """A target or a part of a drafter whose rounds can be recorded and replayed
    (`round_graph.RoundGraphs`): from the second round of a batch on, all rounds are the same
    operations on the same memory.
    """

    def carried(self) -> tuple[Tensor, ...]:
        """What the next round reads and this batch has made, apart from the memory that `expect`
        names and every round writes to, such as a cache; called after the first round. All other
        memory counts as constant in recorded rounds.
        """

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """Use these tensors, with the same values, in place of `carried`."""

    def expect(self, longest: int) -> Hashable:
        """Prepare for a round before which no row has more than `longest` tokens.

        Returns:
            what else the round depends on: the identity of its memory, and Python values. Rounds
            for which it is equal are the same.
        """


@runtime_checkable
class StaticRounds(Protocol):
    """A `Drafter` whose rounds may be recorded."""

    @property
    def states(self) -> tuple[RoundState, ...] | None:
        """The parts that carry something from round to round; None if one of them is no
        `RoundState`.
        """


class DraftModel(Protocol):
    """A cheap model of the target's distributions, queried level by level of a tree.
    `drafters.static_tree` and `drafters.dynamic_tree` draft with it; `drafters.eagle.EagleDraft` is
    one.
    """

    @property
    def identity(self) -> str | None:
        """See `Drafter.identity`."""

    @property
    def greedy(self) -> bool:
        """Whether a static tree takes the most probable tokens of Q instead of drawing from it: in
        greedy decoding, where Q is the distribution at temperature 1.
        """

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Start a batch, after the target's `begin`. At most `nodes` tokens per round are drafted,
        and at most `nodes` are passed to `expand`.
        """

    def roots(self) -> Tensor:
        """Q after the root, the last emitted token: float32 [B, V]. Discards the last round's
        `expand` calls.
        """

    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """Q after the inner nodes of a level, with tokens int64 [B, P]: float32 [B, P, V].

        Levels are passed in order; a level without inner nodes is skipped. `level.inner_parents`
        is the inner node of the level above that each node continues, `level.ancestors` the inner
        nodes of all levels so far that it attends to.
        """

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """See `Drafter.observe`."""


@runtime_checkable
class Rule(Protocol):
    """An acceptance rule: the acceptance probability f and its residual. Arguments broadcast over
    leading dimensions `...`; `depth` is 1-based, int64 [...].

    A rule is exact only as a pair; `tempera.exactness.check` compares the law of its output with
    the target's.
    """

    def accept_prob(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """f(token; p, q, depth): p and q [..., V], token and depth [...] -> [...], in [0, 1]."""

    def accept_probs(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """f at every token that q can draw, anything in [0, 1] at others: [..., V] -> [..., V]."""

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The distribution that replaces a rejected `token`, [..., V], sums to 1."""

    def mean_residual(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The mean residual over rejected x ~ q: Σ_x q(x)·(1 - f(x))·residual(x), normalised; any
        distribution if nothing is ever rejected. [..., V] -> [..., V]. See `SharedResidual`.
        """


@runtime_checkable
class OneHotRule(Protocol):
    """A `Rule` that needs no distribution over the vocabulary to test a token x whose q is one-hot:
    p(x) decides, and a rejection changes the residual at x alone.
    """

    def accept_one_hot(self, p: Tensor, depth: Tensor) -> Tensor:
        """f of a token that q proposes for certain, p its target probability: [...] -> [...]."""

    def residual_share(self, depth: Tensor) -> Tensor:
        """Which share of p(x) the residual keeps at a rejected x, before it is normalised: [...] ->
        [...]; it keeps p elsewhere.
        """


class SharedResidual(ABC):
    """Base of rules whose residual does not depend on the rejected token."""

    @abstractmethod
    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """See `Rule.residual`; it must not depend on `token`."""

    def mean_residual(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The residual."""
        return self.residual(p, q, torch.zeros_like(depth), depth)


@runtime_checkable
class JointRule(Protocol):
    """A rule that verifies a draft as a whole, because its tests at different depths are coupled
    (block verification).
    """

    lossless: ClassVar[bool]
    """Whether the rule is exact, so that no position adds to the bounds on TV and KL."""

    def walk(self, draft: Draft, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Verify a whole draft, as `verification.verify` does test by test.

        Args:
            draft: the proposal; N nodes.
            p: the target's distribution after the root and every node, float32 [B, 1 + N, V].
            uniforms: draws in [0, 1), [B, N + 1]; the last one is reserved for the drawn token.

        Returns:
            the last accepted node, counted 0..N with the root first, int64 [B]; and the
            distribution of the token after it, [B, V].
        """


@runtime_checkable
class GreedyRule(Protocol):
    """A rule that, in greedy decoding, accepts more than the target's argmax, based on the
    distribution at temperature 1.
    """

    def keeps(self, p: Tensor, token: Tensor) -> Tensor:
        """Whether a drafted token is accepted: p at temperature 1 [..., V], token [...] -> bool
        [...]. All siblings are tested against the same p.
        """

    def keeps_each(self, p: Tensor) -> Tensor:
        """The same for every token of the vocabulary: [..., V] -> bool [..., V]."""


@runtime_checkable
class ProximityRule(Protocol):
    """A rule that keeps a token for the sake of a set of tokens near it."""

    def proximity(self, p: Tensor, token: Tensor) -> Tensor:
        """How many tokens the set of `token` holds, itself included: p [..., V], token [...] ->
        int64 [...].
        """
