"""The Jacobi family: the target's own distributions of one iteration are the draft of the next, so
that nothing has to be trained.

A window of guesses follows the last emitted token. One forward pass gives the target's distribution
at every position of the window, given the guesses before it; these *stale* distributions are what
the next window's guesses are drawn from. The methods differ in how they are drawn, the *refresh*,
and in the rule that keeps guesses:

    method   refresh                                                       rule
    jacobi   `FixedDraw`: each position's one random draw, kept for good   `rules.standard.Match`
    sjd      `Redraw`: afresh                                              exact
    scd      `SharedNoise`: argmax(log p + g), each position's Gumbel g    exact
    sjd_pac  `Continue`: keep, or replace, by the exact rule               exact, on a tree

`Match` accepts a token if the target draws the same one with the same random draw. The tree of
sjd_pac is `jacobi_window.Shape.proactive`.

Any rule that tests token by token goes with any of them: SJD with `Match` is what SJD's public code
calls Jacobi decoding, and `FixedDraw` with the exact rule is speculative coupled decoding with
another coupling. `rules.standard.BlockVerification` goes with `Redraw` alone: it lets later guesses
decide on earlier ones, which (1) below forbids where they live on.

**Why all of them are exact.** Let F_k be what has happened, in all iterations so far, at the
positions before k: their guesses, draws and tests. (1) Whether position k is decided in a round,
and the distributions p_k (target's) and q_k (its guess's label) that it is decided with, are
functions of F_k, because the network is causal and because entering the window, being redrawn and
being reached depend on the positions before k alone. (2) Given F_k, the guess of position k has the
law q_k. (3) A position is decided once. So the test of position k is a rejection sampling step with
the right q, and the token that it emits has the law p_k given F_k, whatever the rejections before
it. Everything hangs on (2); it holds by induction over iterations, since the guess is drawn

- by `Redraw` from q_k with a draw of its own;
- by `FixedDraw` and `SharedNoise` as a function of q_k and of a noise of position k that no test
  has looked at before: a test of position k decides the position and is the end of its noise,
  however often the guess was refreshed with it;
- by `Continue` from the last guess x ~ q'_k: kept with probability min(1, q_k/q'_k), else replaced
  from Norm[q_k - q'_k]+, which is again a draw from q_k (a maximal coupling of the two) because q_k
  is a function of F_k and knows nothing of x;
- on entering the window as `jacobi_window.Entrance` says; a repeated token is not random given F_k,
  and its q is one-hot.

What breaks it, and what the tests break: a kept guess that keeps its old label q'_k, a redraw or a
continuation that reuses the uniform draw with which a position was tested, a repeated token
labelled with its neighbour's distribution. Neither SJD (arXiv 2410.01699), nor SJD-PAC's two parts,
nor speculative coupled decoding (arXiv 2510.24211) as published need a change: their laws hold.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, TokenModel, Verdict
from tempera.decoding.probabilities import (
    at,
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
    """A window's spine: tokens int64 [B, S] and the distributions that they were drawn from,
    float32 [B, S, V].
    """

    tokens: Tensor
    q: Tensor


class Refresh(Protocol):
    """How guesses are drawn from the stale distributions."""

    fresh: bool
    """Whether no guess lives on from one round to the next, see `interfaces.Draft`."""

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Uniform draws a row that are wanted in the first round, and in each later one, for a
        window of S = `window` positions.
        """

    def begin(self, uniforms: Tensor) -> None:
        """Start new rows with the first round's draws."""

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Draw a window.

        Args:
            q: the distribution of every position, float32 [B, S, V].
            last: the last window.
            places: where each position stood in the last window, int64 [B, S]; from S on it was not
                in it.
            positions: place in the image, int64 [B, S]; past the end of the image in the last
                rounds.
            uniforms: this round's draws.

        Returns:
            int64 [B, S], drawn from q.
        """

    def draws(self, positions: Tensor) -> Tensor | None:
        """The positions' fixed draws [B, M], for `Match`; none where the method has none."""


class Redraw:
    """Afresh (SJD, Eq. 3)."""

    fresh = True

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """One a position."""
        return window, window

    def begin(self, uniforms: Tensor) -> None:
        """Nothing to remember."""

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Refresh.tokens`."""
        return sample(q, uniforms)

    def draws(self, positions: Tensor) -> Tensor | None:
        """None."""
        return None


class Continue:
    """Keep a guess or replace it, by the exact rule against the stale distributions (SJD-PAC's
    adaptive continuation).

    This is the coupling of the last and the next distribution under which a guess changes least
    often (the maximal coupling of arXiv 2510.24211).
    """

    fresh = False

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Two a position: one to keep, one to draw with."""
        return 2 * window, 2 * window

    def begin(self, uniforms: Tensor) -> None:
        """Nothing to remember."""

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Keep x with probability min(1, q/q'), else draw from Norm[q - q']+."""
        keep, draw = uniforms.chunk(2, 1)
        held = places < q.shape[1]
        source = places.clamp(max=q.shape[1] - 1)
        old, token = take(last.q, source), last.tokens.gather(1, source)
        kept = held & (keep < ratio(at(q, token), at(old, token)))
        law = torch.where(held.unsqueeze(-1), normalise((q - old).clamp(min=0), otherwise=q), q)
        return torch.where(kept, token, sample(law, draw))

    def draws(self, positions: Tensor) -> Tensor | None:
        """None."""
        return None


class FixedDraw:
    """The inverse CDF of each position's fixed draw (Jacobi decoding).

    The draws are the first of the prompt's stream, one a position, which are those that plain
    autoregression uses: with the rule `Match` the image is the very one of `method=ar` with the
    same seed (up to rounding), at any temperature.
    """

    fresh = False

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """All in the first round."""
        return length, 0

    def begin(self, uniforms: Tensor) -> None:
        """Remember the draws, [B, T]."""
        self._draws = uniforms.clone()

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Inverse CDF. See `Refresh.tokens`."""
        return sample(q, self.draws(positions))

    def draws(self, positions: Tensor) -> Tensor:
        """The positions' fixed draws [B, M]; past the image those of its last token."""
        return self._draws.gather(1, positions.clamp(max=self._draws.shape[1] - 1))


class SharedNoise:
    """argmax(log q + g) with a Gumbel noise g [V] per position that all iterations share
    (speculative coupled decoding).

    It is computed as argmax(q / E), E = exp(-g) standard exponential. The noise of a row is a hash
    of a 64-bit key from the row's stream, the position and the token, made anew in each round:
    nothing of size V is kept.
    """

    fresh = False

    def uniforms(self, window: int, length: int) -> tuple[int, int]:
        """Enough for a key, once."""
        return 3, 0

    def begin(self, uniforms: Tensor) -> None:
        """Make the rows' keys of 3 draws of 24 bits, [B, 3]."""
        bits = (uniforms * 2.0**24).long()
        self._keys = (bits << torch.tensor([40, 20, 0], device=bits.device)).sum(1).view(-1, 1, 1)

    def tokens(
        self, q: Tensor, last: Guesses, places: Tensor, positions: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Gumbel-max. See `Refresh.tokens`."""
        vocabulary = torch.arange(q.shape[-1], device=q.device)
        counters = 2 * (positions.unsqueeze(-1) * q.shape[-1] + vocabulary)
        coarse, fine = hashed(self._keys, counters), hashed(self._keys, counters + 1)
        exponential = -torch.log1p(
            -(coarse + fine * 2.0**-24)
        )  # two draws: the smallest of V decides, so it must not be rounded
        return (q / exponential.clamp_(min=1e-30)).argmax(-1)

    def draws(self, positions: Tensor) -> Tensor | None:
        """None."""
        return None


class Jacobi:
    """A window of guesses that the target refines (`interfaces.Drafter`).

    Args:
        target: the target, or what is known of it.
        shape: the window.
        refresh: how guesses are drawn.
        initialisation: how positions start that enter the window; see `jacobi_window.Entrance`.

    Attributes:
        uniforms: draws that `propose` takes; the first round may want more than the later ones.

    Raises:
        TemperaError: the window is longer than the image, or the initialisation is not known.
    """

    tree = None
    identity = None
    _emitted: Tensor  # tokens of the last round, [B, 1]; as if all had been before the first round
    _base: Tensor  # position of the last round's first token, [B, 1]
    _p: Tensor  # the last round's distributions, [B, 1 + N, V]
    _reading: Tensor  # which of them to read for each place, [B, S + 1]
    _guesses: Guesses
    # distributions of the positions before the last round, as many as vertical sampling looks back,
    # [B, H, V]
    _history: Tensor
    # tokens by position, [B, T + S + 1]: emitted, then the window's; kept for repeats only
    _image: Tensor

    def __init__(
        self,
        target: TokenModel,
        shape: Shape,
        refresh: Refresh,
        initialisation: Initialisation = "random",
    ) -> None:
        self.nodes, self.depth = shape.tree.nodes, shape.length
        if self.nodes > target.length:
            raise TemperaError(
                f"window={self.nodes} is longer than the image of {target.length} tokens; give "
                f"{target.length} or less"
            )
        self.target, self.shape, self.refresh = target, shape, refresh
        self.entrance = Entrance(initialisation, target, shape.length)
        self._further = shape.levels * (shape.branches - 1)
        self.uniforms = self._count(0)

    def begin(self, prompts: list[str]) -> None:
        """Start new rows. Nothing is known yet, so that the first window is drawn as if it had
        entered whole.
        """
        self.uniforms = self._count(0)
        self._fresh = True

    def propose(self, uniforms: Tensor) -> Draft:
        """Refresh the window and let new positions enter."""
        if self._fresh:
            self._start(uniforms)
        places = self._emitted + self._ahead
        positions = self._base + places
        sources, found = self.entrance.sources(places, self._base)
        further, uniforms = uniforms.split([self._further, uniforms.shape[1] - self._further], 1)
        q = self._laws(places, sources, found)
        tokens = self.refresh.tokens(
            q, self._guesses, places, positions, uniforms[:, : self._count(1) - self._further]
        )
        if self.entrance.kind.endswith("repeat"):
            self._image.scatter_(1, positions, tokens)
            copies = self._image.gather(1, (self._base + sources).clamp(min=0))
            tokens = torch.where(found, copies, tokens)
            q = torch.where(found.unsqueeze(-1), one_hot(copies, q.shape[-1]), q)
        self._guesses = Guesses(tokens, q)
        return self._draft(further, positions[:, :1])

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Remember the target's distributions and how far each row went."""
        self._fresh = False
        self.uniforms = self._count(1)
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
        stop = verdict.visited.gather(1, verdict.accepted.unsqueeze(1))
        self._reading = self.shape.reading[stop.squeeze(1)]

    def _count(self, round: int) -> int:
        """Draws for the first round (0) or a later one (1)."""
        return self._further + self.refresh.uniforms(self.shape.length, self.target.length)[round]

    def _start(self, uniforms: Tensor) -> None:
        """A state in which every position of the window is new and has no neighbour."""
        batch, device = len(uniforms), uniforms.device
        length, vocab_size = self.shape.length, self.target.vocab_size
        self.shape = self.shape.to(device)
        self.refresh.begin(uniforms[:, self._further :])
        self._ahead = torch.arange(length, device=device)
        self._depths = torch.nn.functional.pad(self.shape.tree.depths, (1, 0))
        self._emitted = torch.full((batch, 1), length + 1, device=device)
        self._base = -self._emitted
        self._uniform = torch.full((), 1 / vocab_size, device=device)
        self._p = self._uniform.expand(batch, 1 + self.nodes, vocab_size)
        self._reading = self.shape.reading[0].expand(batch, -1)
        self._guesses = Guesses(
            torch.zeros(batch, length, dtype=torch.int64, device=device), self._p[:, :length]
        )
        self._history = self._p[:, :1].expand(-1, self.entrance.lookback, -1)
        self._image = torch.zeros(
            batch, self.target.length + length + 1, dtype=torch.int64, device=device
        )

    def _laws(self, places: Tensor, sources: Tensor, found: Tensor) -> Tensor:
        """The distribution of every position of the window, [B, S, V]: stale, or that of a new one,
        which is uniform unless sampled.
        """
        length = self.shape.length
        known = places <= length
        if self.entrance.kind.endswith("sample"):
            places, known = torch.where(found, sources, places), known | found
        q = take(self._p, self._reading.gather(1, places.clamp(0, length)))
        if self.entrance.lookback:
            earlier = take(
                self._history,
                (places + self.entrance.lookback).clamp(0, self.entrance.lookback - 1),
            )
            q = torch.where((places < 0).unsqueeze(-1), earlier, q)
        return torch.where(known.unsqueeze(-1), q, self._uniform)

    def _draft(self, further: Tensor, start: Tensor) -> Draft:
        """The window as a draft, with the further candidates of its first places drawn without
        replacement, after the spine's.
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
            tokens, q, shape.tree, self.refresh.draws(start + self._depths), self.refresh.fresh
        )


def jacobi(
    target: TokenModel, window: int = 32, initialisation: Initialisation = "random"
) -> Jacobi:
    """Jacobi decoding's drafter; its rule is `rules.standard.Match`. See `jacobi_window.Entrance`
    for the initialisations.
    """
    return Jacobi(target, Shape.chain(window), FixedDraw(), initialisation)


def sjd(target: TokenModel, window: int = 32, initialisation: Initialisation = "random") -> Jacobi:
    """Speculative Jacobi decoding's drafter (arXiv 2410.01699). See `jacobi_window.Entrance` for
    the initialisations.
    """
    return Jacobi(target, Shape.chain(window), Redraw(), initialisation)


def scd(
    target: TokenModel,
    window: int = 32,
    initialisation: Initialisation = "random",
    coupling: Literal["gumbel", "maximal"] = "gumbel",
) -> Jacobi:
    """Speculative coupled decoding's drafter (arXiv 2510.24211), with Gumbel or with maximal
    coupling of one iteration to the next.
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
    """SJD-PAC's drafter; with both parts off it is SJD.

    *Proactive drafting*: the first D = `levels` positions after the token that was resampled have K
    = `branches` candidates each, drawn without replacement from the stale distributions; they form
    a tree, whose first path goes on as a chain. The tree stands in every round: the last emitted
    token is always one that was just drawn (from a residual or, after a window that was kept whole,
    from the target), and that no guess below it has seen. The candidates of a level are the same
    ones under every parent, as their stale distribution is, and tree and chain share the window;
    `jacobi_window.Shape.proactive` says how. After a walk that left the first path, the stale
    distributions are read along the path that it took as far as this goes, then along the first
    path.

    *Adaptive continuation*: see `jacobi.Continue`. With both, the first candidate of a level is the
    continued guess, whose law is the stale distribution as well, and the others are drawn without
    it, so that together they are still drawn without replacement.

    Both are exact as published (`jacobi` says why; Theorems 1 and 2 of the paper argue for a single
    position).

    Raises:
        TemperaError: the tree does not fit into the window, or the window not into the image.
    """
    shape = (
        Shape.proactive(window, branches, levels, branching) if proactive else Shape.chain(window)
    )
    return Jacobi(target, shape, Continue() if continuation else Redraw(), initialisation)
