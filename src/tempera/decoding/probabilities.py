"""From logits to the distribution that tokens are drawn from, and drawing from it.

Probabilities are float32 whatever the model's dtype. Target and draft use the same `Sampling`. A
NaN logit makes the whole distribution of its position NaN, so the decode loop finds it by checking
one entry per position, once per round.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tempera.errors import TemperaError

COLDEST = 1e-30
"""Least temperature that logits are divided by; a smaller one is greedy decoding."""


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution: guidance, then temperature, then top-k, then top-p, then
    min-p.

    The entropy temperature is part of the target, not of its decoding: every method, plain
    autoregression included, draws from the new p, and exact rules are exact with respect to it.

    Attributes:
        guidance: scale s of classifier-free guidance, l = u + s(c - u); 1 is none (and halves the
            rows).
        temperature: 0 is greedy, as is less than 1e-30: all mass on the most probable token.
        top_k: keep the k most probable tokens (ties with the k-th are kept); 0 keeps all.
        top_p: keep the most probable tokens until their mass reaches top_p; 1 keeps all.
        min_p: keep the tokens with at least min_p times the probability of the most probable one
            (Nguyen et al. 2024, arXiv 2407.01082); 0 keeps all.
        entropy_temperature: (scale, decay, floor) of a further temperature, scale·exp(-H/decay) +
            floor, with H the entropy in nats at temperature 1 after top-k: certain positions are
            drawn more freely, and flat ones less (arXiv 2510.09012; its constants are 2.5, 3 and
            0.6). None for none.
    """

    guidance: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    entropy_temperature: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        for name, fits, advice in (
            ("guidance", math.isfinite(self.guidance), "a number (1 is no guidance)"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1 (all tokens)"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 (all tokens) to 1"),
        ):
            if not fits:
                raise TemperaError(f"{name}={getattr(self, name)} is not valid; give {advice}")
        if self.entropy_temperature is not None:
            scale, decay, floor = self.entropy_temperature
            if not (0 <= scale < math.inf and 0 < decay < math.inf and 1e-6 <= floor < math.inf):
                raise TemperaError(
                    f"entropy_temperature={list(self.entropy_temperature)} is not valid; give a "
                    "scale of 0 or more, a decay above 0 and a floor of 1e-6 or more, as "
                    "[2.5,3,0.6]",
                    option="entropy_temperature",
                )

    @property
    def guided(self) -> bool:
        """Whether every prompt runs as two rows, conditional and unconditional."""
        return self.guidance != 1

    @property
    def rows(self) -> int:
        """Network rows per prompt: 2 under guidance, else 1."""
        return 2 if self.guided else 1

    @property
    def greedy(self) -> bool:
        """Whether all mass is on the most probable token: also at temperatures so small that logits
        divided by them overflow float32.
        """
        return self.temperature < COLDEST

    @property
    def untempered(self) -> "Sampling":
        """The same at temperature 1: greedy decoding takes its most probable token."""
        return replace(self, temperature=1.0)

    @property
    def ranking(self) -> "Sampling":
        """The same without top-k, top-p, min-p and entropy temperature, and at temperature 1 if it
        is greedy.

        It ranks candidates for a draft, of which none is drawn, so it may differ from the target's:
        the draft's own top-k, top-p or min-p could remove tokens that the target accepts, and
        greedy sampling would leave only one.
        """
        return Sampling(self.guidance, 1.0 if self.greedy else self.temperature)

    @property
    def drafting(self) -> "Sampling":
        """What the distributions of a draft model are made with: the target's own sampling, or in
        greedy decoding `ranking`.
        """
        return self.ranking if self.greedy else self

    def distribution(self, logits: Tensor, forced: Tensor | None = None) -> Tensor:
        """The distribution that tokens are drawn from.

        Args:
            logits: [2B, ..., V] under guidance (conditional rows first), else [B, ..., V], any
                float dtype; -inf forbids a token.
            forced: int64 [B, ...]; a token ≥ 0 takes all mass at its position, -1 leaves it free.

        Returns:
            float32 [B, ..., V].
        """
        return self.of_guided(self.guide(logits), forced)

    def of_guided(self, logits: Tensor, forced: Tensor | None = None) -> Tensor:
        """`distribution` of logits after guidance, [B, ..., V], any float dtype."""
        logits = logits.float()
        p = greedy(logits) if self.greedy else self._soften(logits)
        if forced is not None:
            p = torch.where(
                (forced >= 0).unsqueeze(-1), one_hot(forced.clamp(min=0), p.shape[-1]), p
            )
        return p

    def guide(self, logits: Tensor) -> Tensor:
        """Logits after guidance, before temperature: [2B, ..., V] under guidance (conditional rows
        first), else [B, ..., V], any float dtype -> float32 [B, ..., V].
        """
        logits = logits.float()
        if not self.guided:
            return logits
        conditional, unconditional = logits.chunk(2)
        guided = torch.lerp(unconditional, conditional, self.guidance)
        # a token that one of the rows forbids stays forbidden
        forbidden = torch.minimum(conditional, unconditional) == -torch.inf
        return guided.masked_fill(forbidden, -torch.inf)

    def _soften(self, logits: Tensor) -> Tensor:
        if self.entropy_temperature is not None:
            scale, decay, floor = self.entropy_temperature
            entropy = torch.special.entr(self._top(logits).softmax(-1)).sum(-1, keepdim=True)
            further = scale * (-entropy / decay).exp() + floor
            logits = logits / (self.temperature * further).clamp(min=COLDEST)
        elif self.temperature != 1:
            logits = logits / self.temperature
        logits = self._top(logits)
        p = logits.softmax(-1)
        if self.top_p < 1:
            p = p.masked_fill(self._beyond_nucleus(logits), 0.0)
            p = p / p.sum(-1, keepdim=True)
        if self.min_p > 0:
            p = p.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p

    def _beyond_nucleus(self, logits: Tensor) -> Tensor:
        """Which tokens top-p removes, bool [..., V]: those of least probability that have 1 - top_p
        together, but never all. By the steps of transformers' `TopPLogitsWarper`, with its sort,
        which is not stable, and its sums: of equal logits the same remain.
        """
        ranked, order = logits.sort(dim=-1)
        beyond = running_sum(ranked.softmax(-1), torch.float32) <= 1 - self.top_p
        return torch.zeros_like(beyond).scatter(-1, order[..., :-1], beyond[..., :-1])

    def _top(self, logits: Tensor) -> Tensor:
        """Forbid all but the k largest logits."""
        if not 0 < self.top_k < logits.shape[-1]:
            return logits
        find = kth_largest if one_kernel(logits) else _kth_by_selection
        return logits.masked_fill(logits < find(logits, self.top_k), -torch.inf)


def one_kernel(logits: Tensor) -> bool:
    """Whether a chain of sums over the vocabulary becomes one kernel: in compiled rounds on a GPU,
    where `topk` is a kernel of one block, as long as 40 others. On a CPU it is the faster way.
    """
    return logits.is_cuda and torch.compiler.is_compiling()


def kth_largest(x: Tensor, k: int) -> Tensor:
    """The k-th largest entry along the last dimension, float32 [..., V] -> [..., 1], by a search
    over its bits, two at a time: a number is as large as the integer of its bits, but for the sign.
    0 may come with the other sign; undefined among NaN.
    """
    keys = _flipped(x.view(torch.int32))
    found = torch.full_like(keys[..., :1], -(2**31))
    for bit in range(30, -1, -2):
        larger = found
        for _ in range(3):
            larger = larger + (1 << bit)
            enough = (keys >= larger).sum(-1, keepdim=True, dtype=torch.int32) >= k
            found = torch.where(enough, larger, found)
    return _flipped(found).view(torch.float32)


def _flipped(bits: Tensor) -> Tensor:
    """Those of negative numbers the other way round, but for the sign, int32 [...] -> [...]."""
    return bits ^ ((bits >> 31) & (2**31 - 1))


def _kth_by_selection(x: Tensor, k: int) -> Tensor:
    """As `kth_largest`, by PyTorch's selection."""
    # not sorted, which would take longer than the search
    return x.topk(k, sorted=False).values.amin(-1, keepdim=True)


def mass_of_largest(p: Tensor, k: int) -> Tensor:
    """The sum of the k largest entries, none of which is negative: float32 [..., V] -> [...]."""
    if not one_kernel(p):
        return p.topk(k, -1).values.sum(-1)
    # one value after the other: for ten of them fewer passes than the search of `kth_largest`
    largest = p.amax(-1, keepdim=True)
    mass, left = torch.zeros_like(largest), torch.full_like(largest, k)
    for _ in range(k):
        alike = (p == largest).sum(-1, keepdim=True, dtype=p.dtype).minimum(left)
        mass, left = mass + alike * largest, left - alike
        largest = p.masked_fill(p >= largest, 0.0).amax(-1, keepdim=True)
    return mass.squeeze(-1)


def greedy(logits: Tensor) -> Tensor:
    """All mass on the largest logit, [..., V] -> [..., V]; NaN where a logit is NaN."""
    top = logits.max(dim=-1)
    return one_hot(top.indices, logits.shape[-1]) + (top.values * 0).unsqueeze(-1)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """float32 distribution with all mass on `tokens`, [...] -> [..., V]."""
    return torch.zeros(*tokens.shape, vocab_size, device=tokens.device).scatter(
        -1, tokens.unsqueeze(-1), 1.0
    )


def normalise(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Norm(mass) along the last dimension; `otherwise` if the mass is 0. All [..., V]."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)


def excess(p: Tensor, accepted: Tensor) -> Tensor:
    """Norm[p - kept]+ along the last dimension, the residual of most rules; p if nothing is left.
    Both [..., V].
    """
    return normalise((p - accepted).clamp(min=0), otherwise=p)


def most_chosen(chosen: Tensor) -> int:
    """How many tokens are chosen at one position at most, but at least 1: bool [..., V]. A graph,
    which reads nothing, takes all V for chosen.
    """
    if torch.compiler.is_compiling():
        return chosen.shape[-1]
    return int(chosen.sum(-1).amax().clamp(min=1))


def running_sum(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of the entries up to each one along the last dimension, [..., V] -> [..., V].

    Compiled code calls PyTorch's own kernel: torch 2.11 cannot generate one for more than 8,192
    tokens in several rows (pytorch/pytorch#180221).
    """
    if torch.compiler.is_compiling():
        summed: Tensor = _running_sum(p, dtype)
        return summed
    return p.cumsum(-1, dtype=dtype)


@torch.library.custom_op("tempera::running_sum", mutates_args=())
def _running_sum(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.cumsum(-1, dtype=dtype)


@_running_sum.register_fake
def _like_running_sum(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.new_empty(p.shape, dtype=dtype)


def sample(p: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: p [..., V] (need not be normalised), u [...] in [0, 1) -> int64 [...]. A
    token without mass is never drawn.
    """
    return sample_with_mass(p, u)[0]


def sample_with_mass(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`sample`, and the mass of p, float64 [...]."""
    # float64: a parallel float32 sum is not monotone, and could land on a token without mass
    cdf = running_sum(p, torch.float64)
    total = cdf[..., -1:]
    # below it: rounded to it, the largest u would come behind the last token that has mass
    threshold = torch.minimum(u.unsqueeze(-1) * total, total * (1 - 2.0**-52))
    threshold = threshold.contiguous()  # torch warns of other strides
    found = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    return found.clamp_(max=p.shape[-1] - 1), total.squeeze(-1)


def sample_without_replacement(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw k tokens in turn, each from p with the earlier ones removed and renormalised.

    If fewer than k tokens have mass, the last one is repeated with a one-hot q. That is still the
    distribution it was drawn from, so such siblings are verified exactly without a special case
    (`tests/decoding/test_probabilities.py`).

    Args:
        p: [..., V].
        u: uniform draws, [..., k].

    Returns:
        tokens int64 [..., k], and the distribution each was drawn from, [..., k, V].
    """
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    for draw in u.unbind(-1):
        if tokens:
            p = normalise(p.scatter(-1, tokens[-1].unsqueeze(-1), 0.0), otherwise=p)
        q.append(p)
        tokens.append(sample(p, draw))
    return torch.stack(tokens, -1), p.unsqueeze(-2) if len(q) == 1 else torch.stack(q, -2)


def most_probable(p: Tensor, count: int) -> Tensor:
    """The k most probable tokens, the most probable one first: what greedy decoding drafts. If
    there are fewer than k, the last one is repeated. [..., V] -> int64 [..., k].
    """
    top = p.topk(min(count, p.shape[-1]), -1).indices
    missing = count - top.shape[-1]
    return torch.cat([top, *[top[..., -1:]] * missing], -1)


def at(p: Tensor, token: Tensor) -> Tensor:
    """Entry of p at one token: [..., V] and [...] -> [...]."""
    return p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), [...] and [...] -> [...], with 0/0 = 1. NaN counts as 1, too: the loop reports
    NaN itself.
    """
    return torch.fmin(p / q, torch.ones((), dtype=p.dtype, device=p.device))


Tables = list[Tensor]
"""Distributions by depth: entry t is [V^t, V], after every prefix of t tokens, or [C, V] along C
chains.
"""


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """½ Σ |a - b| of distributions: [..., V] and [..., V] -> [...]."""
    return 0.5 * (a - b).abs().sum(-1)


def kl_divergence(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·log(a/b) of distributions, in nats: [..., V] and [..., V] -> [...]; 0·log 0 = 0."""
    return torch.where(a > 0, a * (a / b).log(), 0.0).sum(-1)
