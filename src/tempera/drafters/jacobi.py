"""The Jacobi family: the target's distributions in one iteration are the draft distributions of the
next, so no draft model is needed.

A window of guesses follows the last emitted token. One forward pass gives the target's distribution
at every position of the window, given the guesses before it; these *stale* distributions are what
the next window's guesses are drawn from. The methods differ in how they draw guesses anew, the
*redraft*, and in their acceptance rule:

    method   redraft                                                       rule
    jacobi   `FixedDraw`: one fixed uniform draw per position              `rules.standard.Match`
    sjd      `Redraw`: independent draws                                   exact
    sjd reuse=τ  `Reuse`: keep guesses that did not become improbable      exact
    scd      `SharedNoise`: argmax(log p + g), one Gumbel g per position   exact
    sjd_pac  `AdaptiveContinuation`: keep or resample, by the exact rule   exact, on a tree

`Match` accepts a token if the target draws the same one with the same random draw. The tree of
sjd_pac is `jacobi_window.Window`.

**One window**, of S = 4 guesses, in an image of which 10 tokens are emitted:

    position in the image           9    10   11   12   13   14   15   16
    round r: the window            root  a    b    c    d
             node                         0    1    2    3
             place                        0    1    2    3    4
             p is read at          10 ↤ root, 11 ↤ a, 12 ↤ b, 13 ↤ c, 14 ↤ d

A *place* counts positions from the round's first undecided one, here 10 (`base`). p after node n
is that of place n + 1, so one pass gives the p of places 0 … S. Say a and b are accepted and 12 is
resampled: 3 tokens are `emitted`, 12 is the root, and 13 is the first undecided position.

    round r + 1: the window                                 root 13   14   15   16
             its places in round r (3 + `ahead`)                 3    4    5    6
             guesses are drawn from the stale p of place         3    4    new  new

Positions 15 and 16 enter the window: `jacobi_window.WindowInit` starts them. With a tree, a walk
may stop beside the spine; then `Window.reading[stop]` says after which node p is read for each
place, and `Window.columns` which candidate (guess) of a place each node is.

Each of them works with any rule that tests token by token: SJD with `Match` is what SJD's public
code calls Jacobi decoding, and `FixedDraw` with the exact rule is speculative coupled decoding with
another coupling. `rules.standard.BlockVerification` works with `Redraw` only: in it later guesses
influence the acceptance of earlier ones, which violates (1) below if guesses survive a round.

**Why all of them are exact.** Let F_k be the history of the positions before k over all iterations
so far: their guesses, draws and tests. (1) Whether position k is decided in a round, and the
distributions p_k (target's) and q_k (its guess's label) used for the test, are functions of F_k,
because the network is causal and because entering the window, being redrawn and being reached
depend only on the positions before k. (2) Given F_k, the guess of position k is distributed as q_k.
(3) A position is decided once. The test of position k is therefore a rejection-sampling step with
the correct q, and the emitted token is distributed as p_k given F_k, whatever was rejected before.
Condition (2) is the crucial one. It holds by induction over iterations, since the guess is drawn

- by `Redraw`: from q_k with an independent draw;
- by `FixedDraw` and `SharedNoise`: as a function of q_k and of a noise of position k that no test
  has used. The noise may serve many redrafts, but the first test of position k decides the
  position, and its noise is not used again;
- by `AdaptiveContinuation`: from the last guess x ~ q'_k, which is kept with probability
  min(1, q_k/q'_k) and otherwise resampled from Norm[q_k - q'_k]+. This is again a draw from q_k (a
  maximal coupling of the two), because q_k is a function of F_k and does not depend on x;
- by `Reuse`: by keeping x or drawing from q_k. This is a draw from neither; its law given F_k is
  q̃_k, a function of q_k, q'_k and τ, and the label;
- for positions that enter the window: as described in `jacobi_window.WindowInit`. A repeated token
  is not random given F_k, so its q is one-hot.

Exactness breaks if a kept guess keeps its old label q'_k, if a reused one is labelled q_k, if a
redraw or a continuation reuses the uniform draw that tested a position, or if a repeated token is
labelled with its neighbour's distribution. The papers of SJD (arXiv 2410.01699), SJD-PAC and
speculative coupled decoding (arXiv 2510.24211) describe exact methods. The public code of the last
two is not exact: docs/jacobi.md says in what.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tempera.decoding.compiled import kept
from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, Drafter, ImageTarget, Scores, Verdict, drafts
from tempera.decoding.probabilities import (
    at,
    excess,
    normalise,
    one_hot,
    ratio,
    sample,
    sample_without_replacement,
)
from tempera.decoding.random_streams import uniforms as hashed
from tempera.decoding.trees import take
from tempera.drafters.jacobi_window import Initialisation, Shape, Window, WindowInit, spine
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Guesses:
    """A window's spine: tokens, int64 [B, S], and the distributions q that they were drawn from,
    float32 [B, S, V].
    """

    tokens: Tensor
    q: Tensor


class Redraft(ABC):
    """How guesses are drawn from the stale distributions.

    Attributes:
        fresh: whether all guesses are drawn anew in every round; see `interfaces.Draft`.
        continues: whether it looks at the last window's guesses.
        state: what it remembers of a batch, if anything; any shape.
    """

    fresh: bool = False
    continues: bool = False
    state: Tensor | None = None

    @abstractmethod
    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Number of uniform draws for an image as a whole, and for each of its rounds.

        Args:
            window: S.
            length: tokens of an image.
        """

    def begin(self, uniforms: Tensor, rows: Tensor | None) -> None:  # noqa: B027
        """Start images with the uniform draws for each as a whole, [M, ...]; for `rows` see
        `interfaces.Drafter.begin`.
        """

    @abstractmethod
    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Draw a window.

        Args:
            q: the distribution of every position, float32 [B, S, V].
            last: the last window, if it `continues`.
            places: index of each position in the last window, int64 [B, S]; S or more if it was not
                in it.
            positions: index in the image, int64 [B, S]; past its end in the last rounds.
            uniforms: this round's uniform draws.

        Returns:
            tokens int64 [B, S], drawn from q.
        """

    def label(self, q: Tensor, last: Guesses, places: Tensor) -> Tensor:
        """The distribution that `tokens` has drawn from, float32 [B, S, V], if that is not q. For
        the arguments see `tokens`.
        """
        return q

    def draws(self, positions: Tensor) -> Tensor | None:
        """Fixed uniform draws of positions int64 [B, M], for `Match`: [B, M], or None if the method
        has no fixed draws.
        """
        return None


class Redraw(Redraft):
    """Draw every guess independently (SJD, Eq. 3)."""

    fresh = True

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """One per position."""
        return 0, window

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Redraft.tokens`."""
        return sample(q, uniforms)


class AdaptiveContinuation(Redraft):
    """Keep or resample each guess by the exact rule against the stale distributions (SJD-PAC).

    This is the maximal coupling of arXiv 2510.24211: of all couplings of the last and the next
    distribution, the one under which guesses change least often.
    """

    continues = True

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Two per position: one for the test, one to resample."""
        return 0, 2 * window

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Keep x with probability min(1, q/q'), else draw from Norm[q - q']+."""
        keep, draw = uniforms.chunk(2, 1)
        held = places < q.shape[1]
        source = places.clamp(max=q.shape[1] - 1)
        old = take(last.q, source)
        token = last.tokens.gather(1, source)
        stays = held & (keep < ratio(at(q, token), at(old, token)))
        probs = torch.where(held.unsqueeze(-1), excess(q, old), q)
        return torch.where(stays, token, sample(probs, draw))


class Reuse(Redraft):
    """Keep the guesses whose probability did not fall much, q(x) > τ·q'(x), and draw the others
    from q (the token reuse of SJD++, arXiv 2512.07503).

    A guess x that is kept because of its value is no draw from q. The law of the guess, given the
    positions before it, is

        q̃(y) = q'(y)·1[q(y) > τ·q'(y)] + (1 - Σ_z q'(z)·1[q(z) > τ·q'(z)])·q(y)

    where q' is the label so far. With q̃ as its label the guess is tested exactly; with q, as
    published, it is not (`examples/published_code/sjd.py`).

    Args:
        threshold: τ, 0 or more; infinity is `Redraw`.
    """

    continues = True

    def __init__(self, threshold: float) -> None:
        if not threshold >= 0:
            raise TemperaError(
                f"reuse={threshold} is no ratio of probabilities; give 0 (keep every possible "
                "guess) or more",
                option="reuse",
            )
        self.threshold = threshold

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """One per position."""
        return 0, window

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Keep x if q(x) > τ·q'(x), else draw from q."""
        token = last.tokens.gather(1, places.clamp(max=q.shape[1] - 1))
        stays = at(self._held(q, last, places)[1], token)
        return torch.where(stays, token, sample(q, uniforms))

    def label(self, q: Tensor, last: Guesses, places: Tensor) -> Tensor:
        """q̃."""
        old, keeps = self._held(q, last, places)
        still = old.masked_fill(~keeps, 0.0)
        return still + (1 - still.sum(-1, keepdim=True)).clamp(min=0) * q

    def _held(self, q: Tensor, last: Guesses, places: Tensor) -> tuple[Tensor, Tensor]:
        """q', and which guesses would be kept, bool: [B, S, V] each."""
        old = take(last.q, places.clamp(max=q.shape[1] - 1))
        return old, (q > self.threshold * old) & (places < q.shape[1]).unsqueeze(-1)


class FixedDraw(Redraft):
    """The inverse CDF at each position's fixed uniform draw (Jacobi decoding).

    The draws are the first of the prompt's random stream, one per position, as in plain
    autoregression. With the rule `Match` the image is therefore that of `method=ar` with the same
    seed (up to rounding), at any temperature.
    """

    state: Tensor = torch.empty(0)  # the draws, [B, T]

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """All at the beginning."""
        return length, 0

    def begin(self, uniforms: Tensor, rows: Tensor | None) -> None:
        """Remember the draws, [M, T]."""
        self.state = kept(self.state, uniforms, rows)

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Redraft.tokens`."""
        return sample(q, self.draws(positions))

    def draws(self, positions: Tensor) -> Tensor:
        """The fixed draws of positions int64 [B, M], as [B, M]; past the end of the image, the draw
        of the last token.
        """
        return self.state.gather(1, positions.clamp(max=self.state.shape[1] - 1))


class SharedNoise(Redraft):
    """argmax(log q + g) with a Gumbel noise g [V] per position that all iterations share
    (speculative coupled decoding).

    Computed as argmax(q / E) with E = exp(-g) standard exponential. A row's noise is a hash of a
    64-bit key from its random stream, the position and the token. It is recomputed in each round,
    so nothing of size V is stored.
    """

    state: Tensor = torch.empty(0)  # the keys, int64 [B, 1, 1]

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Three at the beginning, for the key."""
        return 3, 0

    def begin(self, uniforms: Tensor, rows: Tensor | None) -> None:
        """Compute each row's key from the first 24 bits of 3 draws, [M, 3]."""
        bits = (uniforms * 2.0**24).long()
        key = (bits << torch.tensor([40, 20, 0], device=bits.device)).sum(1)
        self.state = kept(self.state, key.view(-1, 1, 1), rows)

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Gumbel-max. See `Redraft.tokens`."""
        vocabulary = torch.arange(q.shape[-1], device=q.device)
        # even numbers alone, as docs/results/ were drawn
        draws = hashed(self.state, 2 * (positions.unsqueeze(-1) * q.shape[-1] + vocabulary))
        # above 0 and finite, so that only a token that has mass can win
        exponential = -torch.log1p(-draws.clamp(min=2.0**-54))
        return (q / exponential).argmax(-1)


class Jacobi(Drafter):
    """A window of guesses that the target refines (`interfaces.Drafter`).

    Args:
        target: the target; only its sizes are used.
        window: the nodes.
        redraft: how guesses are drawn.
        initialisation: how new positions of the window start; see `jacobi_window.WindowInit`.
        refinement: draw unaccepted guesses from the stale distributions; if false, they start anew
            like new positions (for `Redraw`).

    Raises:
        TemperaError: the window is longer than the image.
    """

    def __init__(
        self,
        target: ImageTarget,
        window: Window,
        redraft: Redraft,
        initialisation: Initialisation = "random",
        refinement: bool = True,
    ) -> None:
        self.nodes = window.tree.nodes
        self.depth = window.length
        if self.nodes > target.length:
            raise TemperaError(
                f"window={self.nodes} is longer than the image of {target.length} tokens; give "
                f"{target.length} or less"
            )
        self.target = target
        self.window = window
        self.redraft = redraft
        self.init = WindowInit(initialisation, target.grid, window.length, refinement)
        self._further = window.levels * (window.branches - 1)
        self.first_uniforms, draws = redraft.uniforms(window.length, target.length)
        self.uniforms = self._further + draws
        # of the last round: the spine's tokens and q; and the target's distributions of places
        # -lookback … S, and a uniform one, [B, lookback + S + 2, V]
        self._guesses = Guesses(torch.empty(0, dtype=torch.int64), torch.empty(0))
        self._stale = torch.empty(0)
        self._emitted = torch.empty(0)  # tokens of the round before, [B, 1]

    def begin(
        self, prompts: list[str], images: Images, uniforms: Tensor, rows: Tensor | None
    ) -> None:
        """Start images. All positions of their first windows are new."""
        self.redraft.begin(uniforms, rows)
        self.window = self.window.to(images.device)
        length = self.window.length
        vocab_size = self.target.vocab_size
        stale = len(prompts), self.init.lookback + length + 2, vocab_size
        uniform = torch.full(stale, 1 / vocab_size, device=images.device)
        self._stale = kept(self._stale, uniform, rows)
        tokens = images.tokens.new_zeros(len(prompts), length)
        if self.redraft.continues:
            self._guesses = Guesses(
                kept(self._guesses.tokens, tokens, rows),
                kept(self._guesses.q, uniform[:, :length], rows),
            )
        self._emitted = kept(self._emitted, tokens[:, :1], rows)

    def propose(self, images: Images, uniforms: Tensor) -> Draft:
        """Redraft the guesses and append new positions. See `interfaces.Drafter.propose`."""
        further, draws = uniforms.split([self._further, uniforms.shape[1] - self._further], 1)
        # before the first round all positions are new, as if a whole window had been emitted
        emitted = torch.where(images.lengths > 0, images.emitted, self.window.length + 1)
        self._emitted.copy_(emitted.unsqueeze(1))
        base = images.lengths.unsqueeze(1) - self._emitted  # position of place 0
        places = self._emitted + self.window.ahead
        positions = base + places
        new, sources, found = self.init.neighbours(places, base)
        q = self._distributions(places, new, sources, found)
        tokens = self.redraft.tokens(q, self._guesses, places, positions, draws)
        q = self.redraft.label(q, self._guesses, places)
        if self.init.repeats:
            image = images.tokens.scatter(1, positions, tokens)
            copies = image.gather(1, (base + sources).clamp(min=0))
            tokens = torch.where(found, copies, tokens)
            q = torch.where(found.unsqueeze(-1), one_hot(copies, q.shape[-1]), q)
        if self.redraft.continues:
            self._guesses.tokens.copy_(tokens)
            self._guesses.q.copy_(q)
        return self._draft(Guesses(tokens, q), further, positions[:, :1])

    def observe(self, images: Images, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Store the target's distributions."""
        lookback = self.init.lookback
        window = self.window
        if lookback:
            before = self._emitted + torch.arange(lookback, device=images.device)
            self._stale[:, :lookback] = take(self._stale, before)
        p = scores.p
        if not window.tree.is_chain:
            p = take(p, window.reading[verdict.stop])
        self._stale[:, lookback:-1] = p

    def _distributions(self, places: Tensor, new: Tensor, sources: Tensor, found: Tensor) -> Tensor:
        """The distribution of every position of the window, [B, S, V]: the stale one, or for a new
        position the uniform one, unless it samples from its neighbour's. For the arguments see
        `WindowInit.neighbours`.
        """
        if self.init.samples:
            places = torch.where(found, sources, places)
            new = new & ~found
        lookback = self.init.lookback
        last = lookback + self.window.length  # behind it stands the uniform distribution
        return take(self._stale, torch.where(new, last + 1, (places + lookback).clamp(0, last)))

    def _draft(self, guesses: Guesses, further: Tensor, start: Tensor) -> Draft:
        """The window as a draft; further candidates of its first places are drawn without
        replacement.

        Args:
            guesses: of the spine.
            further: uniform draws of the further candidates, [B, D·(K - 1)].
            start: position of place 0, [B, 1].
        """
        window = self.window
        tokens = guesses.tokens
        q = guesses.q
        if self._further:
            first = tokens[:, : window.levels]
            probs = q[:, : window.levels]
            rest = normalise(probs.scatter(-1, first.unsqueeze(-1), 0.0), otherwise=probs)
            draws = further.view(len(further), window.levels, -1)
            others, their_q = sample_without_replacement(rest, draws)
            tokens = torch.cat([tokens, others.flatten(1)], 1)[:, window.columns]
            q = torch.cat([q, their_q.flatten(1, 2)], 1)[:, window.columns]
        draws_of = self.redraft.draws(start + window.depths)
        shared = window.levels > 1
        return Draft(tokens, q, window.tree, draws_of, self.redraft.fresh, shared)


@drafts(lambda window, **_: window)
def jacobi(
    target: ImageTarget, window: int = 32, initialisation: Initialisation = "random"
) -> Jacobi:
    """The drafter of Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427), whose rule is
    `rules.standard.Match`. For `initialisation` see `jacobi_window.WindowInit`.

    Raises:
        TemperaError: the window does not fit into the image.
    """
    return Jacobi(target, Window(window), FixedDraw(), initialisation)


@drafts(lambda window, **_: window)
def sjd(
    target: ImageTarget,
    window: int = 32,
    initialisation: Initialisation = "random",
    refinement: bool = True,
    reuse: float | None = None,
) -> Jacobi:
    """The drafter of speculative Jacobi decoding (Teng et al. 2024, arXiv 2410.01699). For
    `initialisation` see `jacobi_window.WindowInit`. Without `refinement` unaccepted guesses start
    anew (Appendix H). `reuse` is the threshold of SJD++'s token reuse: see `Reuse`.

    Raises:
        TemperaError: the window does not fit into the image, or guesses cannot be reused.
    """
    if reuse is None:
        return Jacobi(target, Window(window), Redraw(), initialisation, refinement)
    if not refinement:
        raise TemperaError(
            f"reuse={reuse} keeps guesses, but refinement=false starts all of them anew: leave one "
            "of the two out",
            option="reuse",
        )
    return Jacobi(target, Window(window), Reuse(reuse), initialisation)


@drafts(lambda window, **_: window)
def scd(
    target: ImageTarget,
    window: int = 32,
    initialisation: Initialisation = "random",
    coupling: Literal["gumbel", "maximal"] = "gumbel",
) -> Jacobi:
    """The drafter of speculative coupled decoding (So et al. 2025, arXiv 2510.24211), with a Gumbel
    or a maximal coupling of successive iterations.

    Raises:
        TemperaError: the window does not fit into the image.
    """
    redraft = SharedNoise() if coupling == "gumbel" else AdaptiveContinuation()
    return Jacobi(target, Window(window), redraft, initialisation)


def _spine(window: int, branches: int, levels: int, shape: Shape, proactive: bool, **_: Any) -> int:
    """The places of SJD-PAC's window."""
    return spine(window, branches, levels, shape) if proactive else window


@drafts(_spine)
def sjd_pac(
    target: ImageTarget,
    window: int = 64,
    initialisation: Initialisation = "random",
    branches: int = 4,
    levels: int = 3,
    shape: Shape = "ranked",
    proactive: bool = True,
    continuation: bool = True,
) -> Jacobi:
    """The drafter of SJD-PAC; with both parts off it is SJD.

    *Proactive drafting*: the first D = `levels` positions have K = `branches` candidates each,
    drawn without replacement from the stale distributions. They form a tree whose first path
    continues as a chain. The tree is drafted in every round, because the last emitted token is
    always newly drawn (from a residual, or from the target if the whole window was accepted), so no
    guess was conditioned on it. The candidates of a level are the same under every parent, since
    they share one stale distribution. Tree and chain share the window; for `shape` see
    `jacobi_window.Window`. After a walk that left the first path, the stale
    distributions are read along the walk's path, and below its end along the first path.

    *Adaptive continuation*: see `AdaptiveContinuation`. With both parts, the first candidate of a
    level is the continued guess, drawn from the stale distribution too. The others are drawn
    without it, so that together they are drawn without replacement.

    Both are exact as the paper has them (see the module's docstring; its Theorems 1 and 2 treat a
    single position), and not as its public code has them (docs/jacobi.md).

    Raises:
        TemperaError: the tree does not fit into the window, or the window not into the image.
    """
    nodes = Window(window, branches, levels, shape) if proactive else Window(window)
    redraft = AdaptiveContinuation() if continuation else Redraw()
    return Jacobi(target, nodes, redraft, initialisation)
