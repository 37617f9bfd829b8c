"""Exactness on tables: does the real decoding loop emit the claimed law?

Target and draft are random tables of conditional distributions over a tiny vocabulary, so the law
of a whole image can be enumerated. The loop decodes a batch of 10⁵ images, whose frequencies are
compared with that law. One line shows whether a rule is exact:

    >>> from tempera import exactness
    >>> from tempera.decoding.trees import Tree
    >>> from tempera.rules.schedules import uniform
    >>> from tempera.rules.standard import Exact, Relaxed
    >>> exactness.check(Exact(), Tree.chain(3)).agrees
    True
    >>> exactness.check(Relaxed(uniform(2.0, 3)), Tree.chain(3)).agrees
    False
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from scipy.stats import chi2, poisson
from torch import Tensor

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, Drafter, DraftModel, Rule, Scores, Verdict
from tempera.decoding.loop import Output, decode
from tempera.decoding.probabilities import Sampling, Tables, total_variation
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes, Tree, take
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.theory import sequence_law

UNGUIDED = Sampling(guidance=1.0)

LEVEL = 1e-4
"""A law is rejected where its p-value is at most this."""


class TableTarget:
    """A target whose conditional distributions are random: independent normal logits after every
    prefix. Implements `interfaces.Target`.

    Prefixes are numbered as in a V-ary heap: the empty one is 0, and prefix s followed by token x
    is s·V + 1 + x.

    Args:
        vocab_size: V.
        length: tokens per image, T.
        sampling: applied to a conditional and an unconditional table of logits as to a network's
            output.
        seed: of the tables.
        spread: standard deviation of the logits.
        forced: forced tokens by position.
        grid: rows and columns of the image, for drafters that use neighbours; by default one line.
    """

    identity = "tables"
    dtype = torch.float32
    compiled = False

    def __init__(
        self,
        vocab_size: int = 3,
        length: int = 4,
        sampling: Sampling = UNGUIDED,
        seed: int = 0,
        spread: float = 1.5,
        forced: dict[int, int] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.length = length
        self.grid = grid or (1, length)
        self.sampling = sampling
        prefixes = sum(vocab_size**t for t in range(length))
        generator = torch.Generator().manual_seed(seed)
        self.logits = spread * torch.randn(sampling.rows, prefixes, vocab_size, generator=generator)
        self.forced = torch.full((1, prefixes), -1)
        for position, token in (forced or {}).items():
            first = sum(vocab_size**t for t in range(position))
            self.forced[0, first : first + vocab_size**position] = token
        self.tabulate()
        self._roots = torch.zeros(0, dtype=torch.int64)

    def tabulate(self) -> None:
        """Make the tables of the logits, which may have been replaced."""
        self.table = self.sampling.distribution(self.logits, self.forced)[0]
        self._soft = self.sampling.untempered.distribution(self.logits, self.forced)[0]

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """There is no text encoder."""
        return nullcontext()

    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None = None) -> None:
        """Every row starts at the empty prefix, whatever its prompt."""
        self._roots = persistent(self._roots, torch.zeros(len(prompts), dtype=torch.int64), rows)

    def score(self, draft: Draft, longest: int) -> Scores:
        """Look the root and every node up; the hidden states are empty, [B, 1 + N, 0]."""
        prefixes = self._roots.unsqueeze(1).expand(-1, 1 + draft.tree.nodes)
        for _ in range(draft.tree.max_depth):
            nodes = _follow(take(prefixes, (1 + draft.tree.parents)), draft.tokens, self.vocab_size)
            prefixes = torch.cat([self._roots.unsqueeze(1), nodes], 1)
        soft = lookup(self._soft, prefixes) if self.sampling.greedy else None
        return Scores(lookup(self.table, prefixes), torch.zeros(*prefixes.shape, 0), soft)

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Append the emitted tokens to each row's prefix."""
        self._roots = _advance(self._roots, verdict, emitted, self.vocab_size)

    def conditionals(self) -> Tables:
        """The sampled distributions by prefix length, for `tempera.exactness.theory`."""
        return by_length(self.table, self.length)

    def law(self) -> Tensor:
        """The law of a whole image, float64 [V^T]."""
        return sequence_law(self.conditionals(), self.length)


class TableDraft(DraftModel):
    """A draft for a `TableTarget`: its logits with normal noise on top.

    Args:
        target: the target it imitates, with its sampling (`Sampling.drafting`).
        noise: standard deviation of the noise; 0 is a perfect draft.
        seed: of the noise.
    """

    def __init__(self, target: TableTarget, noise: float = 1.5, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = target.logits + noise * torch.randn(target.logits.shape, generator=generator)
        self.vocab_size = target.vocab_size
        self.length = target.length
        self.grid = target.grid
        self.greedy = target.sampling.greedy
        self.table = target.sampling.drafting.distribution(logits)[0]
        self._roots = torch.zeros(0, dtype=torch.int64)

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Every row starts at the empty prefix."""
        self._roots = persistent(self._roots, torch.zeros(len(prompts), dtype=torch.int64), rows)

    def roots(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Q after the root, [B, V], and the prefixes up to it, [B, 1]."""
        return lookup(self.table, self._roots), self._roots.unsqueeze(1)

    def expand(self, above: Tensor, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, Tensor]:
        """Q after the inner nodes of a level, [B, P] -> [B, P, V], and the prefixes up to them."""
        prefixes = _follow(take(above, level.inner_parents), tokens, self.vocab_size)
        return lookup(self.table, prefixes), prefixes

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Append the emitted tokens to each row's prefix."""
        self._roots = _advance(self._roots, verdict, sequences.emitted, self.vocab_size)

    def conditionals(self) -> Tables:
        """The draft's distributions by prefix length, for `tempera.exactness.theory`."""
        return by_length(self.table, self.length)


def random_tables(seed: int, vocab_size: int = 5, length: int = 3) -> tuple[Tables, Tables]:
    """A target's distributions after prefixes of 0 … L tokens, and a draft's up to L - 1: what
    `tempera.exactness.theory` takes for chains of L.
    """
    target = TableTarget(vocab_size, length + 1, seed=seed)
    draft = TableDraft(target, seed=100 + seed).conditionals()
    return target.conditionals(), draft[:length]


def lookup(table: Tensor, prefixes: Tensor) -> Tensor:
    """Rows of a table, [...] -> [..., V]; a prefix past the end of the image (drafts that will be
    dropped) gets the first row.
    """
    return table[torch.where(prefixes < len(table), prefixes, 0)]


def by_length(table: Tensor, length: int) -> Tables:
    """Split a heap-ordered table by prefix length and renormalise it in float64."""
    vocab_size = table.shape[-1]
    table = table.double() / table.double().sum(-1, keepdim=True)
    return list(torch.split(table, [vocab_size**t for t in range(length)]))


def _follow(prefixes: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    return prefixes * vocab_size + 1 + tokens


def _advance(prefixes: Tensor, verdict: Verdict, emitted: Tensor, vocab_size: int) -> Tensor:
    for index, token in enumerate(verdict.tokens.unbind(1)):
        prefixes = torch.where(index < emitted, _follow(prefixes, token, vocab_size), prefixes)
    return prefixes


@dataclass(frozen=True)
class LawComparison:
    """Observed frequencies against a law.

    Attributes:
        p_value: of Pearson's χ² test, rare outcomes pooled; 0 where an impossible outcome was seen.
        tv: total variation between the frequencies and the law.
        noise: the TV that sampling alone would give on average.
        rows: number of observations.
    """

    p_value: float
    tv: float
    noise: float
    rows: int

    @property
    def agrees(self) -> bool:
        """Whether the law is not rejected at the level 10⁻⁴; a true law fails for one seed in
        10,000.
        """
        return self.p_value > LEVEL

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        test = f"p = {self.p_value:.2g} (rejects below {LEVEL:g})"
        distance = f"TV {self.tv:.4f} where chance alone gives {self.noise:.4f}"
        return f"{verdict}: {test}, {distance}, {self.rows} rows"


@dataclass(frozen=True)
class ExactnessReport(LawComparison):
    """A comparison of the loop's output with a law, and the length of its rounds.

    Attributes:
        accepted_length: mean tokens emitted per round.
    """

    accepted_length: float

    def __str__(self) -> str:
        return f"{super().__str__()}, accepted length {self.accepted_length:.2f}"


def compare(counts: Tensor, law: Tensor) -> LawComparison:
    """Pearson's χ² test and total variation of counts [K] against a law [K]."""
    counts = counts.double().cpu()
    law = law.double().cpu()
    rows = float(counts.sum())
    expected = rows * law
    tv = float(total_variation(counts / rows, law))
    # ½ Σ E|N(0, law(1 - law)/rows)|
    noise = float((law * (1 - law) / (2 * math.pi * rows)).sqrt().sum())
    if (counts[law <= 0] > 0).any():
        return LawComparison(0.0, tv, noise, int(rows))
    return LawComparison(_p_value(counts, expected), tv, noise, int(rows))


def _p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's χ² test on the outcomes expected at least 5 times and the pool of all others. A
    pool expected fewer than 5 times is tested separately, by the upper tail of the Poisson law;
    the result is then twice the smaller of the two p-values.
    """
    rare = expected < 5
    pool = expected[rare].sum(0, keepdim=True)
    observed_in_pool = counts[rare].sum(0, keepdim=True)
    cells = expected[~rare]
    observed = counts[~rare]
    if pool >= 5:
        cells = torch.cat([cells, pool])
        observed = torch.cat([observed, observed_in_pool])
    statistic = float(((observed - cells) ** 2 / cells).sum())
    p_value = float(chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0
    if 0 < pool < 5 and observed_in_pool > 0:
        of_pool = float(poisson.sf(observed_in_pool.item() - 1, pool.item()))
        return min(1.0, 2 * min(p_value, of_pool))
    return p_value


def emit(
    target: TableTarget,
    drafter: Drafter,
    rule: Rule,
    rows: int = 100_000,
    seed: int = 0,
    **options: Any,
) -> Output:
    """Decode `rows` images at once with the real loop, each row with its own random stream;
    `options` are those of `decode`.
    """
    streams = new_streams(rows, seed)
    return decode(target, drafter, rule, streams, streams.ids, **options)


def new_streams(rows: int, seed: int) -> RandomStreams:
    """A stream for each of `rows` rows. Keys are cached, because hashing the ids takes longer than
    many checks.
    """
    return copy.copy(_keyed(rows, seed))


@lru_cache(maxsize=2)
def _keyed(rows: int, seed: int) -> RandomStreams:
    return RandomStreams(seed, [str(row) for row in range(rows)])


def emitted_law(tokens: Tensor, vocab_size: int) -> Tensor:
    """Count each sequence: int64 [B, T] -> counts [V^T], in lexicographic order."""
    powers = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1, device=tokens.device)
    return torch.bincount((tokens * powers).sum(-1), minlength=vocab_size ** tokens.shape[1])


def check(
    rule: Rule,
    drafter: Tree | Callable[[TableTarget, TableDraft], Drafter],
    *,
    sampling: Sampling = UNGUIDED,
    vocab_size: int = 3,
    length: int = 4,
    forced: dict[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    law: Callable[[TableTarget, TableDraft], Tensor] | None = None,
    rows: int = 100_000,
    seed: int = 0,
) -> ExactnessReport:
    """Run a method on tables through the real loop and compare what it emits with a law.

    Args:
        rule: the acceptance rule.
        drafter: a static tree, or a function from a target and a draft model to a drafter.
        sampling: from the tables' logits to the law, as `TableTarget` takes it.
        vocab_size: V.
        length: T, tokens per image; V^T may be at most 10⁵, so that the test has power.
        forced: forced tokens by position.
        grid: rows and columns of the image; by default one line.
        law: the claimed law, [V^T]; by default the target's own (the method is exact).
        rows: images decoded.
        seed: of tables and draws.

    Raises:
        TemperaError: there are more than 10⁵ outcomes.
    """
    if vocab_size**length > 100_000:
        raise TemperaError(
            f"{vocab_size}^{length} outcomes are too many to tell distributions apart; choose a "
            "smaller vocab_size or length"
        )
    target = TableTarget(vocab_size, length, sampling, seed, forced=forced, grid=grid)
    draft = TableDraft(target, seed=seed + 1)
    maker = (
        StaticTreeDrafter(draft, drafter) if isinstance(drafter, Tree) else drafter(target, draft)
    )
    output = emit(target, maker, rule, rows, seed)
    claimed = target.law() if law is None else law(target, draft)
    result = compare(emitted_law(output.tokens, vocab_size), claimed)
    return ExactnessReport(
        **vars(result), accepted_length=float(output.trace.accepted_length.mean())
    )
