"""The data types of speculative decoding, and the interfaces of targets, drafters, draft models and
rules.

- *target*: the model to accelerate; p is its sampled distribution. *draft*: a round's proposal, a
  tree of tokens below the *root*, the last emitted token; q is what each was drawn from.
- *accepted* tokens: those of the path from the root on which every test passed.
- *resampled* token: drawn from the residual where the path stops. *bonus* token: drawn from p after
  a path that reached a leaf. Every round emits the accepted tokens and one of these two.
- *accepted length*: emitted tokens per round.

Shapes: B rows (prompts), N drafted nodes of a round, V vocabulary, H hidden size, L depth of the
draft tree. The first dimension of every tensor is B.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from tempera.decoding.probabilities import one_hot
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes, Tree, take

BONUS, RESAMPLED, ACCEPTED = 0, 1, 2
"""Origin of a token: the bonus token drawn from the target at a leaf, a token drawn from a
residual, or an accepted draft.
"""
Build = TypeVar("Build", bound=Callable[..., Any])


@dataclass(frozen=True)
class Draft:
    """One round's proposal.

    Attributes:
        tokens: drafted token of every node, int64 [B, N].
        q: the distribution each node was *really drawn from*, float32 [B, N, V]. For siblings drawn
            without replacement this is the parent's draft distribution with the earlier siblings
            removed, renormalised. None if nothing was drawn: each token is then *certain*, and its
            q is one-hot.
        tree: topology, shared by all rows (`Tree.parents` [N]) or one per row ([B, N]). N = 0 is
            plain autoregression.
        draws: uniform draws of the positions after the root and after every node, float64
            [B, 1 + N], if the method fixes them for all rounds (Jacobi decoding); otherwise None.
        fresh: whether all tokens are drawn with new randomness in this round. If rejected guesses
            survive into later rounds (the coupled methods of the Jacobi family), the acceptance of
            a token must not depend on later tokens.
        shared: whether the candidates of a depth are the same under different parents (windows of
            several levels), so that they are not drawn independently.
        broken: whether the draft model gave NaN for a row, bool [B]; by default read from q.
    """

    tokens: Tensor
    q: Tensor | None
    tree: Tree
    draws: Tensor | None = None
    fresh: bool = True
    shared: bool = False
    broken: Tensor | None = None

    def drawn_from(self, vocab_size: int) -> Tensor:
        """q, also of certain tokens, float32 [B, N, V]."""
        return one_hot(self.tokens, vocab_size) if self.q is None else self.q

    def at(self, nodes: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, M, V], token and depth [B, M] of some nodes, int64 [M] for all rows or [B, M] for
        each; of an arbitrary node for -1.
        """
        token = take(self.tokens, nodes)
        q = one_hot(token, vocab_size) if self.q is None else take(self.q, nodes)
        return q, token, take(self.tree.depths.expand_as(self.tokens), nodes)

    @property
    def has_nan(self) -> Tensor:
        """Whether the draft model gave NaN for a row, which makes a whole q NaN, bool [B]."""
        if self.broken is not None:
            return self.broken
        if self.q is None or not self.tree.nodes:
            return torch.zeros(len(self.tokens), dtype=torch.bool, device=self.tokens.device)
        return self.q[..., 0].isnan().any(-1)


@dataclass(frozen=True)
class Scores:
    """The target's scores of a draft from one forward pass; index 0 is the root (the last emitted
    token), 1 + n is node n.

    Attributes:
        p: the target's sampled distribution after the root and after every node, float32 [B, 1 + N,
            V].
        hidden: the target's last hidden states, [R, 1 + N, H]; R = B, or 2B under guidance
            (conditional rows first).
        untempered: in greedy decoding, where p is one-hot, the distribution at temperature 1;
            otherwise None.
    """

    p: Tensor
    hidden: Tensor
    untempered: Tensor | None = None

    @property
    def has_nan(self) -> Tensor:
        """Whether the target gave NaN for a row, which makes a whole p NaN, bool [B]."""
        return self.p[..., 0].isnan().any(-1)


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
        origin: of each token, `BONUS`, `RESAMPLED` or `ACCEPTED`, int8 [B, L + 1]; undefined as
            `tokens` are.
        logprob: its log-probability under p, float32 [B, L + 1].
        broken: in which rows the target and the draft gave NaN, and the rule no distribution to
            draw from, bool [3, B].
    """

    stop: Tensor
    visited: Tensor
    accepted: Tensor
    tokens: Tensor
    next_token: Tensor
    origin: Tensor
    logprob: Tensor
    broken: Tensor

    @property
    def path(self) -> Tensor:
        """Accepted nodes from the root down, int64 [B, L], -1 past the end."""
        return self.visited[:, 1:] - 1


@dataclass(frozen=True)
class Round:
    """One round of decoding, as `loop.rounds` yields it. It is valid until the next one is asked
    for: compiled rounds use its memory again.

    Attributes:
        sequences: all tokens so far; the round emitted `sequences.emitted` of each row.
        draft: what was proposed.
        scores: the target's scores of it.
        verdict: what was accepted, and the token after it.
    """

    sequences: Sequences
    draft: Draft
    scores: Scores
    verdict: Verdict

    @property
    def tokens(self) -> Tensor:
        """The images so far, int64 [B, T]; 0 where there is no token yet."""
        sequences = self.sequences
        indices = torch.arange(sequences.length, device=sequences.device)
        written = indices < sequences.lengths.unsqueeze(1)
        return torch.where(written, sequences.tokens[:, : sequences.length], 0)


Watcher = Callable[[Any], object]
"""Looks at every round from outside: a `Round`, or of continuous tokens a
`continuous.loop.ContinuousRound`. `sequences.prompts` says which prompt each row decodes, and
`sequences.finished` which rows the round has completed; later rounds give them to other prompts.
"""


class NeedsNewBatch(Exception):
    """Raised by a target's `begin` if a prompt does not fit into the running batch: it waits for a
    new one. Nothing has changed then.
    """


@runtime_checkable
class Target(Protocol):
    """The model to accelerate, as `decode` runs it. It owns its prompt state and its cache; `begin`
    starts a batch of B rows, and later gives rows that have finished to other prompts.
    """

    @property
    def length(self) -> int:
        """T, tokens per image."""

    @property
    def vocab_size(self) -> int:
        """V, the number of different tokens."""

    @property
    def compiled(self) -> bool:
        """Whether the steps of a round are compiled."""

    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None) -> None:
        """Start one image per prompt, with at most `nodes` drafted nodes per round: in a new batch,
        or in these rows of the running one, int64 [M], whose state begins anew while the others
        keep theirs.

        Raises:
            NeedsNewBatch: a prompt does not fit into the running batch.
        """

    def score(self, draft: Draft, longest: int) -> Scores:
        """One forward pass over the root and all nodes of the draft. `longest` is the number of
        tokens of the longest image so far: attention needs no more keys than that one has.
        """

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Keep the accepted path, roll back the rest, and make the drawn token the root.

        Args:
            draft: the draft.
            verdict: its verdict.
            emitted: tokens that each row emits in this round, int64 [B]: τ + 1, less if the image
                ends inside the draft, 0 for a finished row.
        """


class ImageModel(Protocol):
    """A model of images as sequences of tokens, discrete (`ImageTarget`) or continuous
    (`tempera.continuous.loop.Model`), as evaluations run it.
    """

    @property
    def length(self) -> int:
        """T, tokens per image."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the token grid, which are the last rows × columns of the T tokens:
        a model may draw a preview first (GLM-Image).
        """

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


class ImageTarget(Target, ImageModel, Protocol):
    """A target with a grid, weights and prompts of its own."""


class Drafter(ABC):
    """Proposes a draft for every row. Set `nodes`, `depth` and `uniforms`, and write `propose`; the
    rest has defaults.

    What one round keeps for the next lies in tensors of B rows that `begin` makes with
    `compiled.persistent`. Where rounds are compiled, `propose` and `observe` become graphs that
    later rounds replay: they write these tensors in place; neither assigns to `self`, nor reads
    numbers on the host, such as `sequences.rounds`, which are constants of a graph. A drafter that
    has to do so says `compiles = False`.
    """

    nodes: int
    """N, drafted nodes per round."""

    depth: int
    """L, depth of the deepest node."""

    uniforms: int = 0
    """Uniform draws of each row that `propose` needs in a round."""

    first_uniforms: int = 0
    """Uniform draws that `begin` needs for each image."""

    tree: Tree | None = None
    """The static tree drafted in every round, which `rounds` moves to the images' device before
    `begin`; None if trees are dynamic.
    """

    compiles: bool = True
    """Whether `propose` and `observe` can be compiled. If not, they run as they are, between the
    target's compiled parts: for drafters that work on the host.
    """

    identity: str | None = None
    """Short hash of the draft's weights; None if it has no weights."""

    def begin(  # noqa: B027
        self, prompts: list[str], sequences: Sequences, uniforms: Tensor, rows: Tensor | None
    ) -> None:
        """Start images, after the target's `begin`.

        Args:
            prompts: M texts.
            sequences: of the batch; those that start have no tokens yet.
            uniforms: float64 [M, self.first_uniforms] in [0, 1).
            rows: which rows of the batch start, int64 [M], to be passed to `compiled.persistent`;
                None for all rows of a new batch.
        """

    @abstractmethod
    def propose(self, sequences: Sequences, uniforms: Tensor) -> Draft:
        """Draft the next round.

        Args:
            sequences: all tokens so far.
            uniforms: float64 [B, self.uniforms] in [0, 1); float32 cannot hold the largest.
        """

    def observe(  # noqa: B027
        self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Learn from a round, whose tokens `sequences` have and the target has committed."""


def drafts(depth: Callable[..., int]) -> Callable[[Build], Build]:
    """Declares how deep a function's drafter drafts, if the function takes no `tree`.

    Args:
        depth: from the function's options to `Drafter.depth`: a rule's schedule is made for so many
            depths.
    """

    def declare(build: Build) -> Build:
        build.depth = depth  # type: ignore[attr-defined]
        return build

    return declare


class DraftModel(ABC):
    """A cheap model of the target's distributions, queried level by level of a tree.
    `drafters.static_tree` and `drafters.dynamic_tree` draft with it; `drafters.eagle.EagleDraft` is
    one. Write `roots` and `expand`; the rest has defaults. What it keeps from round to round is
    kept as in a `Drafter`.
    """

    identity: str | None = None
    """See `Drafter.identity`."""

    longest: int | None = None
    """Most tokens in a row that it drafts; None: any number. `sequences.depth` is how many it is
    asked for.
    """

    greedy: bool = False
    """Whether a static tree takes the most probable tokens of Q instead of drawing from it: in
    greedy decoding, where Q is the distribution at temperature 1.
    """

    def begin(  # noqa: B027
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None
    ) -> None:
        """Start images, as `Drafter.begin`. At most `nodes` tokens per round are drafted, and at
        most `nodes` are passed to `expand`.
        """

    @abstractmethod
    def roots(self, sequences: Sequences) -> tuple[Tensor, Any]:
        """Q after the root, the last emitted token: float32 [B, V]; and what `expand` needs to know
        of the root, in any form.
        """

    @abstractmethod
    def expand(self, above: Any, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, Any]:
        """Q after the inner nodes of a level, and what `expand` needs to know of them.

        Levels are passed in order; a level without inner nodes is skipped.

        Args:
            above: what the last call returned beside Q: of the inner nodes of the level above.
            tokens: of the inner nodes of this level, int64 [B, P].
            level: `inner_parents` is the inner node of the level above that each node continues,
                `ancestors` the inner nodes of all levels so far that it attends to.

        Returns:
            Q float32 [B, P, V], and what the next call needs.
        """

    def observe(  # noqa: B027
        self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """See `Drafter.observe`."""


class Rule(ABC):
    """An acceptance rule: it decides which drafted tokens are kept and what the next one is drawn
    from. Most rules test tokens one by one: `tempera.decoding.verification.TokenRule`.

    `tempera.exactness.check` compares the law of a rule's output with the target's. `walk` may be
    compiled, so it neither branches on values nor reads from the device.
    """

    chains_only: ClassVar[bool] = False
    """Whether drafts may not branch."""

    @property
    def exact(self) -> bool:
        """Whether what is emitted follows the target's law, whatever the draft."""
        return False

    @abstractmethod
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Verify a whole draft of at least one node.

        Args:
            draft: the proposal; N nodes.
            scores: the target's scores of the root and every node. In greedy decoding p is one-hot,
                and `untempered` is the distribution at temperature 1.
            sequences: all tokens before this round; the node n drafts the token of place
                `sequences.lengths + draft.tree.depths[n] - 1`, counted from 0.
            uniforms: draws in [0, 1), [B, N + 1]; the last one is reserved for the drawn token.

        Returns:
            the last accepted node, counted 0..N with the root first, int64 [B]; and the
            distribution of the token after it, [B, V].
        """

    def figures(self, round: Round) -> dict[str, Tensor]:
        """Further columns of a trace (`decoding.trace.Trace`) that diagnostics record at the places
        of a round, float32 [B, 1 + L] each.
        """
        return {}

    def __repr__(self) -> str:
        """The rule with its options, by which runs tell rules apart."""
        named = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        options = ", ".join(f"{name}={value!r}" for name, value in named.items())
        return f"{type(self).__name__}({options})"
