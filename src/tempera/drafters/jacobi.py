"""The Jacobi family: the target's distributions in one iteration are the draft distributions of the
next, so no draft model is needed.

A window of guesses follows the last emitted token. One forward pass gives the target's distribution
at every position of the window, given the guesses before it; these *stale* distributions are what
the next window's guesses are drawn from. The methods differ in how they draw guesses, the
*refresh*, and in their acceptance rule:

    method   refresh                                                       rule
    jacobi   `FixedDraw`: one fixed uniform draw per position              `rules.standard.Match`
    sjd      `Redraw`: independent draws                                   exact
    scd      `SharedNoise`: argmax(log p + g), one Gumbel g per position   exact
    sjd_pac  `Continue`: keep or resample, by the exact rule               exact, on a tree

`Match` accepts a token if the target draws the same one with the same random draw. The tree of
sjd_pac is `jacobi_window.Shape.proactive`.

Each of them works with any rule that tests token by token: SJD with `Match` is what SJD's public
code calls Jacobi decoding, and `FixedDraw` with the exact rule is speculative coupled decoding with
another coupling. `rules.standard.BlockVerification` works with `Redraw` only: in it later guesses
influence the acceptance of earlier ones, which violates (1) below if guesses survive a round.

**Why all of them are exact.** Let F_k be the history of the positions before k over all iterations
so far: their guesses, draws and tests. (1) Whether position k is decided in a round, and the
distributions p_k (target's) and q_k (its guess's label) used for the test, are functions of F_k,
because the network is causal and because entering the window, being redrawn and being reached
depend only on the positions before k. (2) Given F_k, the guess of position k has the law q_k.
(3) A position is decided once. The test of position k is therefore a rejection-sampling step with
the correct q, and the emitted token has the law p_k given F_k, whatever was rejected before.
Condition (2) is the crucial one. It holds by induction over iterations, since the guess is drawn

- by `Redraw`: from q_k with an independent draw;
- by `FixedDraw` and `SharedNoise`: as a function of q_k and of a noise of position k that no test
  has used. The noise may serve many refreshes, but the first test of position k decides the
  position, and its noise is not used again;
- by `Continue`: from the last guess x ~ q'_k, which is kept with probability min(1, q_k/q'_k) and
  otherwise resampled from Norm[q_k - q'_k]+. This is again a draw from q_k (a maximal coupling of
  the two), because q_k is a function of F_k and does not depend on x;
- for positions that enter the window: as described in `jacobi_window.Entrance`. A repeated token is
  not random given F_k, so its q is one-hot.

Exactness breaks, as the tests show, if a kept guess keeps its old label q'_k, if a redraw or a
continuation reuses the uniform draw that tested a position, or if a repeated token is labelled with
its neighbour's distribution. SJD (arXiv 2410.01699), both parts of SJD-PAC and speculative coupled
decoding (arXiv 2510.24211) are exact as published.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, TokenModel, Verdict
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
from tempera.drafters.jacobi_window import Branching, Entrance, Initialisation, Shape
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Guesses:
    """A window's spine: tokens, int64 [B, S], and the distributions q that they were drawn from,
    float32 [B, S, V].
    """

    tokens: Tensor
    q: Tensor


class Refresh(ABC):
    """How guesses are drawn from the stale distributions.

    Attributes:
        fresh: whether all guesses are drawn anew in every round; see `interfaces.Draft`.
        state: what it remembers of a batch, if anything; any shape.
    """

    fresh: bool = False
    state: Tensor | None = None

    @abstractmethod
    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Number of uniform draws per row in the first round, and in each later one.

        Args:
            window: S.
            length: tokens of an image.
        """

    def begin(self, uniforms: Tensor) -> None:  # noqa: B027
        """Start a batch with the first round's uniform draws, [B, ...]."""

    @abstractmethod
    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Draw a window.

        Args:
            q: the distribution of every position, float32 [B, S, V].
            last: the last window.
            places: index of each position in the last window, int64 [B, S]; S or more if it was not
                in it.
            positions: index in the image, int64 [B, S]; past its end in the last rounds.
            uniforms: this round's uniform draws.

        Returns:
            tokens int64 [B, S], drawn from q.
        """

    def draws(self, positions: Tensor) -> Tensor | None:
        """Fixed uniform draws of positions int64 [B, M], for `Match`: [B, M], or None if the method
        has no fixed draws.
        """
        return None


class Redraw(Refresh):
    """Draw every guess independently (SJD, Eq. 3)."""

    fresh = True

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """One per position."""
        return window, window

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Refresh.tokens`."""
        return sample(q, uniforms)


class Continue(Refresh):
    """Keep or resample each guess by the exact rule against the stale distributions (SJD-PAC's
    adaptive continuation).

    This is the maximal coupling of arXiv 2510.24211: of all couplings of the last and the next
    distribution, the one under which guesses change least often.
    """

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Two per position: one for the test, one to resample."""
        return 2 * window, 2 * window

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Keep x with probability min(1, q/q'), else draw from Norm[q - q']+."""
        keep, draw = uniforms.chunk(2, 1)
        held = places < q.shape[1]
        source = places.clamp(max=q.shape[1] - 1)
        old, token = take(last.q, source), last.tokens.gather(1, source)
        kept = held & (keep < ratio(at(q, token), at(old, token)))
        law = torch.where(held.unsqueeze(-1), excess(q, old), q)
        return torch.where(kept, token, sample(law, draw))


class FixedDraw(Refresh):
    """The inverse CDF at each position's fixed uniform draw (Jacobi decoding).

    The draws are the first of the prompt's random stream, one per position, as in plain
    autoregression. With the rule `Match` the image is therefore that of `method=ar` with the same
    seed (up to rounding), at any temperature.
    """

    state: Tensor  # the draws, [B, T]

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """All in the first round."""
        return length, 0

    def begin(self, uniforms: Tensor) -> None:
        """Remember the draws, [B, T]."""
        self.state = uniforms.clone()

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Refresh.tokens`."""
        return sample(q, self.draws(positions))

    def draws(self, positions: Tensor) -> Tensor:
        """The fixed draws of positions int64 [B, M], as [B, M]; past the end of the image, the draw
        of the last token.
        """
        return self.state.gather(1, positions.clamp(max=self.state.shape[1] - 1))


class SharedNoise(Refresh):
    """argmax(log q + g) with a Gumbel noise g [V] per position that all iterations share
    (speculative coupled decoding).

    Computed as argmax(q / E) with E = exp(-g) standard exponential. A row's noise is a hash of a
    64-bit key from its random stream, the position and the token. It is recomputed in each round,
    so nothing of size V is stored.
    """

    state: Tensor  # the keys, int64 [B, 1, 1]

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Three in the first round, for the key."""
        return 3, 0

    def begin(self, uniforms: Tensor) -> None:
        """Compute each row's key from 3 draws of 24 bits, [B, 3]."""
        bits = (uniforms * 2.0**24).long()
        self.state = (bits << torch.tensor([40, 20, 0], device=bits.device)).sum(1).view(-1, 1, 1)

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Gumbel-max. See `Refresh.tokens`."""
        vocabulary = torch.arange(q.shape[-1], device=q.device)
        counters = 2 * (positions.unsqueeze(-1) * q.shape[-1] + vocabulary)
        coarse, fine = hashed(self.state, counters), hashed(self.state, counters + 1)
        # two draws: the minimum over V tokens decides and needs more than 24 bits
        exponential = -torch.log1p(-(coarse + fine * 2.0**-24))
        return (q / exponential.clamp_(min=1e-30)).argmax(-1)


class Jacobi:
    """A window of guesses that the target refines (`interfaces.Drafter`).

    Args:
        target: the target; only its sizes are used.
        shape: the window's shape.
        refresh: how guesses are drawn.
        initialisation: how new positions of the window start; see `jacobi_window.Entrance`.
        refinement: draw unaccepted guesses from the stale distributions; if false, they start anew
            like new positions (for `Redraw`).

    Attributes:
        uniforms: uniform draws per row that `propose` needs; the first round may need more.

    Raises:
        TemperaError: the window is longer than the image, or the initialisation is unknown.
    """

    tree = None
    identity = None
    _is_first: bool  # whether the next round is the first one of a batch
    _emitted: Tensor  # tokens emitted by the last round, [B, 1]; at first a whole window
    _base: Tensor  # position of the last round's first token, [B, 1]
    _p: Tensor  # the last round's distributions, [B, 1 + N, V]
    _reading: Tensor  # index into them for each place, [B, S + 1]
    _guesses: Guesses
    # distributions of the `lookback` positions before the last round, for vertical sampling,
    # [B, lookback, V]
    _history: Tensor
    # tokens by position, [B, T + S + 1]: emitted ones, then the window's; used by repeats only
    _image: Tensor

    def __init__(
        self,
        target: TokenModel,
        shape: Shape,
        refresh: Refresh,
        initialisation: Initialisation = "random",
        refinement: bool = True,
    ) -> None:
        self.nodes, self.depth = shape.tree.nodes, shape.length
        if self.nodes > target.length:
            raise TemperaError(
                f"window={self.nodes} is longer than the image of {target.length} tokens; give "
                f"{target.length} or less"
            )
        self.target, self.shape, self.refresh = target, shape, refresh
        self.entrance = Entrance(initialisation, target, shape.length, refinement)
        self._further = shape.levels * (shape.branches - 1)
        self._first_draws, self._later_draws = refresh.uniforms(shape.length, target.length)
        self.uniforms = self._further + self._first_draws

    def begin(self, prompts: list[str]) -> None:
        """Start a batch. All positions of the first window are new."""
        self.uniforms = self._further + self._first_draws
        self._is_first = True

    def propose(self, uniforms: Tensor) -> Draft:
        """Refresh the guesses and append new positions. See `interfaces.Drafter.propose`."""
        if self._is_first:
            self._start(uniforms)
        places = self._emitted + self.shape.ahead
        positions = self._base + places
        sources, found = self.entrance.sources(places, self._base)
        further, uniforms = uniforms.split([self._further, uniforms.shape[1] - self._further], 1)
        q = self._laws(places, sources, found)
        tokens = self.refresh.tokens(
            q, self._guesses, places, positions, uniforms[:, : self._later_draws]
        )
        if self.entrance.kind.endswith("repeat"):
            self._image.scatter_(1, positions, tokens)
            copies = self._image.gather(1, (self._base + sources).clamp(min=0))
            tokens = torch.where(found, copies, tokens)
            q = torch.where(found.unsqueeze(-1), one_hot(copies, q.shape[-1]), q)
        self._guesses = Guesses(tokens, q)
        return self._draft(further, positions[:, :1])

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Store the target's distributions and each row's progress."""
        self._is_first = False
        self.uniforms = self._further + self._later_draws
        if self.entrance.lookback:
            known = torch.cat([self._history, take(self._p, self._reading)], 1)
            self._history = take(
                known, self._emitted + torch.arange(self.entrance.lookback, device=known.device)
            )
        self._base = self._base + self._emitted
        self._emitted = emitted.unsqueeze(1)
        if self.entrance.kind.endswith("repeat"):
            self._image.scatter_(
                1,
                self._base + torch.arange(verdict.tokens.shape[1], device=emitted.device),
                verdict.tokens,
            )
        self._p = scores.p
        self._reading = self.shape.reading[verdict.stop]

    def _start(self, uniforms: Tensor) -> None:
        """Set the state in which every position of the window is new and has no neighbour."""
        batch, device = len(uniforms), uniforms.device
        length, vocab_size = self.shape.length, self.target.vocab_size
        self.shape = self.shape.to(device)
        self.refresh.begin(uniforms[:, self._further :])
        self._emitted = torch.full((batch, 1), length + 1, device=device)
        self._base = -self._emitted
        uniform = torch.full((), 1 / vocab_size, device=device)
        self._p = uniform.expand(batch, 1 + self.nodes, vocab_size)
        self._reading = self.shape.reading[0].expand(batch, -1)
        self._guesses = Guesses(
            torch.zeros(batch, length, dtype=torch.int64, device=device), self._p[:, :length]
        )
        self._history = self._p[:, :1].expand(-1, self.entrance.lookback, -1)
        self._image = torch.zeros(
            batch, self.target.length + length + 1, dtype=torch.int64, device=device
        )

    def _laws(self, places: Tensor, sources: Tensor, found: Tensor) -> Tensor:
        """The distribution of every position of the window, [B, S, V]: the stale one, or for a new
        position the uniform one, unless it samples from its neighbour's.
        """
        length = self.shape.length
        new = self.entrance.is_new(places)
        if self.entrance.kind.endswith("sample"):
            places, new = torch.where(found, sources, places), new & ~found
        q = take(self._p, self._reading.gather(1, places.clamp(0, length)))
        if self.entrance.lookback:
            earlier = take(
                self._history,
                (places + self.entrance.lookback).clamp(0, self.entrance.lookback - 1),
            )
            q = torch.where((places < 0).unsqueeze(-1), earlier, q)
        return q.masked_fill(new.unsqueeze(-1), 1 / self.target.vocab_size)

    def _draft(self, further: Tensor, start: Tensor) -> Draft:
        """The window as a draft; further candidates of its first places are drawn without
        replacement.
        """
        shape, (tokens, q) = self.shape, (self._guesses.tokens, self._guesses.q)
        if self._further:
            first, law = tokens[:, : shape.levels], q[:, : shape.levels]
            rest = normalise(law.scatter(-1, first.unsqueeze(-1), 0.0), otherwise=law)
            drawn, laws = sample_without_replacement(
                rest, further.view(len(further), shape.levels, -1)
            )
            tokens = torch.cat([tokens, drawn.flatten(1)], 1)[:, shape.columns]
            q = torch.cat([q, laws.flatten(1, 2)], 1)[:, shape.columns]
        return Draft(
            tokens, q, shape.tree, self.refresh.draws(start + shape.depths), self.refresh.fresh
        )


def jacobi(
    target: TokenModel, window: int = 32, initialisation: Initialisation = "random"
) -> Jacobi:
    """The drafter of Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427), whose rule is
    `rules.standard.Match`. For `initialisation` see `jacobi_window.Entrance`.

    Raises:
        TemperaError: the window does not fit into the image.
    """
    return Jacobi(target, Shape.chain(window), FixedDraw(), initialisation)


def sjd(
    target: TokenModel,
    window: int = 32,
    initialisation: Initialisation = "random",
    refinement: bool = True,
) -> Jacobi:
    """The drafter of speculative Jacobi decoding (Teng et al. 2024, arXiv 2410.01699). For
    `initialisation` see `jacobi_window.Entrance`. Without `refinement` unaccepted guesses start
    anew (Appendix H).

    Raises:
        TemperaError: the window does not fit into the image.
    """
    return Jacobi(target, Shape.chain(window), Redraw(), initialisation, refinement)


def scd(
    target: TokenModel,
    window: int = 32,
    initialisation: Initialisation = "random",
    coupling: Literal["gumbel", "maximal"] = "gumbel",
) -> Jacobi:
    """The drafter of speculative coupled decoding (So et al. 2025, arXiv 2510.24211), with a Gumbel
    or a maximal coupling of successive iterations.

    Raises:
        TemperaError: the coupling is unknown, or the window does not fit into the image.
    """
    if coupling not in ("gumbel", "maximal"):
        raise TemperaError(f"coupling={coupling} is not known; choose gumbel or maximal")
    return Jacobi(
        target,
        Shape.chain(window),
        SharedNoise() if coupling == "gumbel" else Continue(),
        initialisation,
    )


def sjd_pac(
    target: TokenModel,
    window: int = 64,
    initialisation: Initialisation = "random",
    branches: int = 4,
    levels: int = 3,
    proactive: bool = True,
    continuation: bool = True,
    branching: Branching = "ranked",
) -> Jacobi:
    """The drafter of SJD-PAC; with both parts off it is SJD.

    *Proactive drafting*: the first D = `levels` positions have K = `branches` candidates each,
    drawn without replacement from the stale distributions. They form a tree whose first path
    continues as a chain. The tree is drafted in every round, because the last emitted token is
    always newly drawn (from a residual, or from the target if the whole window was accepted), so no
    guess was conditioned on it. The candidates of a level are the same under every parent, since
    they share one stale distribution. Tree and chain share the window; see
    `jacobi_window.Shape.proactive`. After a walk that left the first path, the stale distributions
    are read along the walk's path, and below its end along the first path.

    *Adaptive continuation*: see `Continue`. With both parts, the first candidate of a level is the
    continued guess, whose law is the stale distribution too. The others are drawn without it, so
    that together they are drawn without replacement.

    Both are exact as published (see the module's docstring; Theorems 1 and 2 of the paper treat a
    single position).

    Raises:
        TemperaError: the tree does not fit into the window, or the window not into the image.
    """
    shape = (
        Shape.proactive(window, branches, levels, branching) if proactive else Shape.chain(window)
    )
    return Jacobi(target, shape, Continue() if continuation else Redraw(), initialisation)
