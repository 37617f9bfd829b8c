"""The Jacobi family: the target's distributions in one iteration are the draft distributions of the
next, so no draft model is needed.

A window of guesses follows the last emitted token. One forward pass gives the target's distribution
at every position of the window, given the guesses before it; these *stale* distributions are what
the next window's guesses are drawn from. The methods differ in how they draw guesses anew, the
*redraft*, and in their acceptance rule:

    method       redraft                                                       rule
    jacobi       `by_fixed_draws`: one fixed uniform draw per position         `Match`
    sjd          `redraw`: independent draws                                   exact
    sjd reuse=τ  `reused`: keep guesses that did not become improbable         exact
    scd          `by_shared_noise`: argmax(log p + g), one Gumbel g a position exact
    sjd_pac      `continued`: keep or resample, by the exact rule              exact, on a tree

`rules.standard.Match` accepts a token if the target draws the same one with the same random draw.
The tree of sjd_pac is `jacobi_window.Window`.

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
code calls Jacobi decoding, and `by_fixed_draws` with the exact rule is speculative coupled decoding
with another coupling. `rules.standard.BlockVerification` works with `redraw` only: in it later
guesses influence the acceptance of earlier ones, which violates (1) below if guesses survive a
round.

**Why all of them are exact.** Let F_k be the history of the positions before k over all iterations
so far: their guesses, draws and tests. (1) Whether position k is decided in a round, and the
distributions p_k (target's) and q_k (its guess's label) used for the test, are functions of F_k,
because the network is causal and because entering the window, being redrawn and being reached
depend only on the positions before k. (2) Given F_k, the guess of position k is distributed as q_k.
(3) A position is decided once. The test of position k is therefore a rejection-sampling step with
the correct q, and the emitted token is distributed as p_k given F_k, whatever was rejected before.
Condition (2) is the crucial one. It holds by induction over iterations, since the guess is drawn

- by `redraw`: from q_k with an independent draw;
- by `by_fixed_draws` and `by_shared_noise`: as a function of q_k and of a noise of position k that
  no test has used. The noise may serve many redrafts, but the first test of position k decides the
  position, and its noise is not used again;
- by `continued`: from the last guess x ~ q'_k, which is kept with probability
  min(1, q_k/q'_k) and otherwise resampled from Norm[q_k - q'_k]+. This is again a draw from q_k (a
  maximal coupling of the two), because q_k is a function of F_k and does not depend on x;
- by `reused`: by keeping x or drawing from q_k. This is a draw from neither; its law given F_k is
  q̃_k, a function of q_k, q'_k and τ, and the label;
- for positions that enter the window: as described in `jacobi_window.WindowInit`. A repeated token
  is not random given F_k, so its q is one-hot.

Exactness breaks if a kept guess keeps its old label q'_k, if a reused one is labelled q_k, if a
redraw or a continuation reuses the uniform draw that tested a position, or if a repeated token is
labelled with its neighbour's distribution. The papers of SJD (arXiv 2410.01699), SJD-PAC and
speculative coupled decoding (arXiv 2510.24211) describe exact methods. The public code of the last
two (commits 4fbc099 and 7322379) is not exact: docs/jacobi.md says in what.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tempera.decoding.compiled import persistent
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
from tempera.decoding.sequences import Sequences
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


@dataclass(frozen=True)
class Stale:
    """What guesses are redrawn from.

    Attributes:
        q: the stale distribution of every position of the window, float32 [B, S, V].
        last: the last window, if the redraft `continues`.
        indices: index of each position in the last window, int64 [B, S]; S or more if it was not in
            it.
        positions: index in the image, int64 [B, S]; past its end in the last rounds.
        uniforms: this round's uniform draws, [B, `Redraft.draws`·S].
        noise: those of the image as a whole, float64 [B, `Redraft.noise`].
    """

    q: Tensor
    last: Guesses
    indices: Tensor
    positions: Tensor
    uniforms: Tensor
    noise: Tensor

    @property
    def before(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which positions have a guess, bool [B, S], that guess, and its q; anything where there is
        none.
        """
        length = self.q.shape[1]
        source = self.indices.clamp(max=length - 1)
        token = self.last.tokens.gather(1, source)
        return self.indices < length, token, take(self.last.q, source)


def redraw(stale: Stale) -> Guesses:
    """Draw every guess independently (SJD, Eq. 3)."""
    return Guesses(sample(stale.q, stale.uniforms), stale.q)


def continued(stale: Stale) -> Guesses:
    """Keep or resample each guess by the exact rule against the stale distributions (SJD-PAC's
    adaptive continuation): keep x with probability min(1, q/q'), else draw from Norm[q - q']+.

    This is the maximal coupling of arXiv 2510.24211: of all couplings of the last and the next
    distribution, the one under which guesses change least often.
    """
    q = stale.q
    test, draw = stale.uniforms.chunk(2, 1)
    held, token, old = stale.before
    stays = held & (test < ratio(at(q, token), at(old, token)))
    probs = torch.where(held.unsqueeze(-1), excess(q, old), q)
    return Guesses(torch.where(stays, token, sample(probs, draw)), q)


def reused(stale: Stale, threshold: float) -> Guesses:
    """Keep the guesses whose probability did not fall much, q(x) > τ·q'(x), and draw the others
    from q (the token reuse of SJD++, arXiv 2512.07503).

    A guess x that is kept because of its value is no draw from q. The law of the guess, given the
    positions before it, is

        q̃(y) = q'(y)·1[q(y) > τ·q'(y)] + (1 - Σ_z q'(z)·1[q(z) > τ·q'(z)])·q(y)

    where q' is the label so far. With q̃ as its label the guess is tested exactly; with q, as
    published, it is not (`examples/published_code/sjd.py`).
    """
    q = stale.q
    held, token, old = stale.before
    retained = (q > threshold * old) & held.unsqueeze(-1)
    still = old.masked_fill(~retained, 0.0)
    label = still + (1 - still.sum(-1, keepdim=True)).clamp(min=0) * q
    return Guesses(torch.where(at(retained, token), token, sample(q, stale.uniforms)), label)


def by_fixed_draws(stale: Stale) -> Guesses:
    """The inverse CDF at each position's fixed uniform draw (Jacobi decoding).

    The draws are the first of the prompt's random stream, one per position, as in plain
    autoregression. With the rule `Match` the image is therefore that of `method=ar` with the same
    seed (up to rounding), at any temperature.
    """
    return Guesses(sample(stale.q, fixed_draws(stale.noise, stale.positions)), stale.q)


def fixed_draws(noise: Tensor, positions: Tensor) -> Tensor:
    """The draws [B, T] of positions int64 [B, M], as [B, M]; past the end of the image, the draw of
    the last token.
    """
    return noise.gather(1, positions.clamp(max=noise.shape[1] - 1))


def by_shared_noise(stale: Stale) -> Guesses:
    """argmax(log q + g) with a Gumbel noise g [V] per position that all iterations share
    (speculative coupled decoding).

    Computed as argmax(q / E) with E = exp(-g) standard exponential. A row's noise is a hash of a
    64-bit key (of the first 24 bits of three draws), the position and the token. It is recomputed
    in each round, so nothing of size V is stored.
    """
    q = stale.q
    first, second, third = (stale.noise * 2.0**24).long().unsqueeze(-1).split(1, 1)
    key = (first << 40) + (second << 20) + third
    vocabulary = torch.arange(q.shape[-1], device=q.device)
    # even numbers alone, as docs/results/ were drawn
    draws = hashed(key, 2 * (stale.positions.unsqueeze(-1) * q.shape[-1] + vocabulary))
    # above 0 and finite, so that only a token that has mass can win
    exponential = -torch.log1p(-draws.clamp(min=2.0**-54))
    return Guesses((q / exponential).argmax(-1), q)


@dataclass(frozen=True)
class Redraft:
    """How guesses are drawn from the stale distributions, and what that needs.

    Attributes:
        draw: the guesses of a window, and what they were drawn from.
        draws: uniform draws of each position in a round.
        noise: uniform draws of each image as a whole; None: one for each of its tokens, by which
            `rules.standard.Match` tests.
        fresh: whether all guesses are drawn anew in every round; see `interfaces.Draft`.
        continues: whether it looks at the last window's guesses.
    """

    draw: Callable[[Stale], Guesses]
    draws: int = 0
    noise: int | None = 0
    fresh: bool = False
    continues: bool = False


REDRAW = Redraft(redraw, draws=1, fresh=True)
CONTINUE = Redraft(continued, draws=2, continues=True)
FIXED_DRAWS = Redraft(by_fixed_draws, noise=None)
SHARED_NOISE = Redraft(by_shared_noise, noise=3)


def reuse_above(threshold: float) -> Redraft:
    """`reused` with a threshold τ, 0 or more; infinity is `redraw`.

    Raises:
        TemperaError: the threshold is negative.
    """
    if not threshold >= 0:
        raise TemperaError(
            f"reuse={threshold} is not a ratio of probabilities; give 0 (keep every possible "
            "guess) or more",
            option="reuse",
        )
    return Redraft(partial(reused, threshold=threshold), draws=1, continues=True)


class Jacobi(Drafter):
    """A window of guesses that the target refines (`interfaces.Drafter`).

    Args:
        target: the target; only its sizes are used.
        window: the nodes.
        redraft: how guesses are drawn.
        initialisation: how new positions of the window start; see `jacobi_window.WindowInit`.
        refinement: draw unaccepted guesses from the stale distributions; if false, they start anew
            like new positions (for `redraw`).

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
        self.first_uniforms = target.length if redraft.noise is None else redraft.noise
        self.uniforms = self._further + redraft.draws * window.length
        self._noise = torch.empty(0)  # of each image, [B, self.first_uniforms]
        # of the last round: the spine's tokens and q; and the target's distributions of places
        # -lookback … S, and a uniform one, [B, lookback + S + 2, V]
        self._guesses = Guesses(torch.empty(0, dtype=torch.int64), torch.empty(0))
        self._stale = torch.empty(0)
        self._emitted = torch.empty(0)  # tokens of the round before, [B, 1]

    def begin(
        self, prompts: list[str], sequences: Sequences, uniforms: Tensor, rows: Tensor | None
    ) -> None:
        """Start images. All positions of their first windows are new."""
        self._noise = persistent(self._noise, uniforms, rows)
        self.window = self.window.to(sequences.device)
        length = self.window.length
        vocab_size = self.target.vocab_size
        stale = len(prompts), self.init.lookback + length + 2, vocab_size
        uniform = torch.full(stale, 1 / vocab_size, device=sequences.device)
        self._stale = persistent(self._stale, uniform, rows)
        tokens = sequences.tokens.new_zeros(len(prompts), length)
        if self.redraft.continues:
            self._guesses = Guesses(
                persistent(self._guesses.tokens, tokens, rows),
                persistent(self._guesses.q, uniform[:, :length], rows),
            )
        self._emitted = persistent(self._emitted, tokens[:, :1], rows)

    def propose(self, sequences: Sequences, uniforms: Tensor) -> Draft:
        """Redraft the guesses and append new positions. See `interfaces.Drafter.propose`."""
        further, draws = uniforms.split([self._further, uniforms.shape[1] - self._further], 1)
        # before the first round all positions are new, as if a whole window had been emitted
        emitted = torch.where(sequences.lengths > 0, sequences.emitted, self.window.length + 1)
        self._emitted.copy_(emitted.unsqueeze(1))
        base = sequences.lengths.unsqueeze(1) - self._emitted  # position of place 0
        indices = self._emitted + self.window.ahead
        positions = base + indices
        new, sources, found = self.init.neighbours(indices, base)
        q = self._distributions(indices, new, sources, found)
        stale = Stale(q, self._guesses, indices, positions, draws, self._noise)
        guesses = self.redraft.draw(stale)
        if self.init.repeats:
            image = sequences.tokens.scatter(1, positions, guesses.tokens)
            copies = image.gather(1, (base + sources).clamp(min=0))
            tokens = torch.where(found, copies, guesses.tokens)
            one = one_hot(copies, q.shape[-1])
            guesses = Guesses(tokens, torch.where(found.unsqueeze(-1), one, guesses.q))
        if self.redraft.continues:
            self._guesses.tokens.copy_(guesses.tokens)
            self._guesses.q.copy_(guesses.q)
        return self._draft(guesses, further, positions[:, :1])

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Store the target's distributions."""
        lookback = self.init.lookback
        window = self.window
        if lookback:
            before = self._emitted + torch.arange(lookback, device=sequences.device)
            self._stale[:, :lookback] = take(self._stale, before)
        p = scores.p
        if not window.tree.is_chain:
            p = take(p, window.reading[verdict.stop])
        self._stale[:, lookback:-1] = p

    def _distributions(
        self, indices: Tensor, new: Tensor, sources: Tensor, found: Tensor
    ) -> Tensor:
        """The distribution of every position of the window, [B, S, V]: the stale one, or for a new
        position the uniform one, unless it samples from its neighbour's. For the arguments see
        `WindowInit.neighbours`.
        """
        if self.init.samples:
            indices = torch.where(found, sources, indices)
            new = new & ~found
        lookback = self.init.lookback
        last = lookback + self.window.length  # behind it stands the uniform distribution
        return take(self._stale, torch.where(new, last + 1, (indices + lookback).clamp(0, last)))

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
            ranked = further.view(len(further), window.levels, -1)
            others, their_q = sample_without_replacement(rest, ranked)
            tokens = torch.cat([tokens, others.flatten(1)], 1)[:, window.columns]
            q = torch.cat([q, their_q.flatten(1, 2)], 1)[:, window.columns]
        draws = None
        if self.redraft.noise is None:
            draws = fixed_draws(self._noise, start + window.depths)
        shared = window.levels > 1
        return Draft(tokens, q, window.tree, draws, self.redraft.fresh, shared)


@drafts(lambda window, **_: window)
def jacobi(
    target: ImageTarget, window: int = 32, initialisation: Initialisation = "random"
) -> Jacobi:
    """The drafter of Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427), whose rule is
    `rules.standard.Match`. For `initialisation` see `jacobi_window.WindowInit`.

    Raises:
        TemperaError: the window does not fit into the image.
    """
    return Jacobi(target, Window(window), FIXED_DRAWS, initialisation)


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
    anew (Appendix H). `reuse` is the threshold of SJD++'s token reuse: see `reused`.

    Raises:
        TemperaError: the window does not fit into the image, or guesses cannot be reused.
    """
    if reuse is None:
        return Jacobi(target, Window(window), REDRAW, initialisation, refinement)
    if not refinement:
        raise TemperaError(
            f"reuse={reuse} keeps guesses, but refinement=false starts all of them over: leave "
            "one of the two out",
            option="reuse",
        )
    return Jacobi(target, Window(window), reuse_above(reuse), initialisation)


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
    redraft = SHARED_NOISE if coupling == "gumbel" else CONTINUE
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

    *Adaptive continuation*: see `continued`. With both parts, the first candidate of a
    level is the continued guess, drawn from the stale distribution too. The others are drawn
    without it, so that together they are drawn without replacement.

    Both are exact as the paper has them (see the module's docstring; its Theorems 1 and 2 treat a
    single position), and not as its public code has them (docs/jacobi.md).

    Raises:
        TemperaError: the tree does not fit into the window, or the window not into the image.
    """
    nodes = Window(window, branches, levels, shape) if proactive else Window(window)
    redraft = CONTINUE if continuation else REDRAW
    return Jacobi(target, nodes, redraft, initialisation)
