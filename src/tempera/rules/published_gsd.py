"""Grouped speculative decoding with the groups of its public code (unchanged since August 2025),
beside those of the paper in `tempera.rules.neighbourhood.GSD`.

It takes the tokens at places -7 … +6 around x in the order of p, the least probable first, and
keeps those whose probability differs from that of x by less than 0.15 and whose row in the target's
table of token embeddings lies within a squared distance of 0.5 of x's. The paper has distances in
the image tokenizer's codebook instead, and no bound on the difference of probabilities.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import Rule
from tempera.decoding.probabilities import at, excess, ratio
from tempera.errors import TemperaError

LOWER, UPPER = 7, 6
"""Places below and above x in the order of p."""
AT_ONCE = 512
"""Rows of the table of distances that are computed at a time."""


@dataclass(frozen=True)
class PublishedGSD(Rule):
    """f = min(1, p(G) / q(G)) and Norm[p - q]+, for the groups G of the public code.

    - The window of the 7 least probable places is empty in the code, which then tests x alone.
    - Distances are tested only where all ids of the window are below 10,000, ids of the network's
      vocabulary: always for Chameleon's image tokens, never for Emu3's.
    - In greedy decoding only the most probable token is kept.

    Args:
        difference: bound of |Δp|.
        distance: bound of the squared distance of embeddings.
        ids: from which id on no distance is tested.
        close: which embeddings are close, bool [V, V]; `for_target` computes it.
        far: which tokens have an id from `ids` on, bool [V].
    """

    difference: float = 0.15
    distance: float = 0.5
    ids: int = 10_000
    close: Tensor | None = field(default=None, repr=False, compare=False)
    far: Tensor | None = field(default=None, repr=False, compare=False)

    def for_target(self, target: Any) -> Self:
        """With the distances of a `TransformerTarget`'s embeddings."""
        tokens = torch.arange(target.vocab_size, device=target.device)
        spec = target.network.spec
        ids = tokens if spec is None or spec.token_ids is None else spec.token_ids
        return self.on(target.head.embed(tokens)[: len(tokens)], ids.to(tokens.device))

    def on(self, embeddings: Tensor, ids: Tensor) -> Self:
        """With the distances of these embeddings [V, H], of tokens with these ids, int64 [V]."""
        vectors = embeddings.float()
        far = ids >= self.ids
        if far.all():  # no distance is tested
            return replace(self, close=far.new_zeros(1, 1), far=far)
        rows = [
            torch.cdist(part, vectors).square() < self.distance for part in vectors.split(AT_ONCE)
        ]
        return replace(self, close=torch.cat(rows), far=far)

    @override
    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of every token."""
        close, by_id = self._tables()
        order = p.argsort(dim=-1, stable=True)
        of_p, of_q = p.gather(-1, order), q.gather(-1, order)
        places = torch.arange(p.shape[-1], device=p.device)
        windows = []
        for step in range(-LOWER, UPPER + 1):
            inside = (places + step >= 0) & (places + step < len(places))
            windows.append(((places + step).clamp(0, len(places) - 1), inside))
        far = by_id[order]
        untested = torch.stack([far[..., other] & inside for other, inside in windows]).any(0)
        last = len(close) - 1
        rows = order.clamp(max=last)
        mass_p, mass_q = torch.zeros_like(p), torch.zeros_like(q)
        for other, inside in windows:
            near = close[rows, order[..., other].clamp(max=last)] | untested
            similar = (of_p[..., other] - of_p).abs() < self.difference
            member = inside & near & similar
            mass_p += of_p[..., other] * member
            mass_q += of_q[..., other] * member
        alone = places < LOWER
        f = ratio(torch.where(alone, of_p, mass_p), torch.where(alone, of_q, mass_q))
        return torch.empty_like(f).scatter(-1, order, f)

    @override
    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The same for the group of one token."""
        close, far = self._tables()
        others, inside = _window(p, token)
        untested = (far[others] & inside).any(-1, keepdim=True)
        last = len(close) - 1
        near = close[token.clamp(max=last)[..., None], others.clamp(max=last)] | untested
        similar = (p.gather(-1, others) - at(p, token)[..., None]).abs() < self.difference
        member = inside & near & similar
        alone = inside[..., :LOWER].sum(-1) < LOWER
        masses = [
            torch.where(alone, at(each, token), (each.gather(-1, others) * member).sum(-1))
            for each in (p, q)
        ]
        return ratio(*masses)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Which embeddings are close, and which tokens' distances are not tested."""
        if self.close is None or self.far is None:
            raise TemperaError(
                "the groups of GSD's public code need the target's embeddings: take "
                "rule.for_target(target)"
            )
        return self.close, self.far

    @override
    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+."""
        return excess(p, q)


def _window(p: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at places -7 … 0 … +6 around one token in the order of p [..., V], found without
    a sort, and which of these places there are: int64 and bool [..., 14].

    A token's key is the bits of its probability, which grow with it, then its index.
    """
    vocab_size = p.shape[-1]
    index = torch.arange(vocab_size, device=p.device)
    keys = (p.float().abs().view(torch.int32).long() << 32) + index
    own = keys.gather(-1, token.unsqueeze(-1))
    below = keys.masked_fill(keys >= own, -1).topk(min(LOWER, vocab_size)).values.flip(-1)
    none = torch.iinfo(keys.dtype).max
    rest = keys.masked_fill(keys < own, none)
    above = rest.topk(min(1 + UPPER, vocab_size), largest=False).values
    window = torch.cat([below, above], -1)
    inside = (window >= 0) & (window < none)
    return (window & 0xFFFFFFFF).where(inside, 0), inside
