"""Grouped speculative decoding with the groups of its public code (unchanged since August 2025),
beside those of the paper in `tempera.rules.neighbourhood.GSD`.

It takes the tokens at places -7 … +6 around x in the order of p, the least probable first, and
keeps those whose probability differs from that of x by less than 0.15 and whose row in the target's
table of token embeddings lies within a squared distance of 0.5 of x's. The paper has distances in
the image tokenizer's codebook instead, and no bound on the difference of probabilities.
"""

from dataclasses import dataclass, field

import torch
from pydantic import PositiveFloat
from torch import Tensor
from typing_extensions import override

from tempera.decoding.probabilities import at, excess, ratio
from tempera.decoding.verification import TokenRule
from tempera.drafters.jacobi import Jacobi
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method
from tempera.targets.transformer import TransformerTarget

LOWER, UPPER = 7, 6
"""Places below and above x in the order of p."""
AT_ONCE = 512
"""Rows of the table of distances that are computed at a time."""


@dataclass(frozen=True)
class PublishedGSD(TokenRule):
    """f = min(1, p(G) / q(G)) and Norm[p - q]+, for the groups G of the public code.

    - The window of the 7 least probable places is empty in the code, which then tests x alone.
    - Distances are tested only where all ids of the window are below 10,000, ids of the network's
      vocabulary: always for Chameleon's image tokens, never for Emu3's.
    - In greedy decoding only the most probable token is kept.

    Args:
        close: which embeddings are close, bool [V, V]; `on` computes it.
        far: which tokens have an id from which on no distance is tested, bool [V].
        difference: bound of |Δp|.
        distance: bound of the squared distance of embeddings.
        ids: the id from which on no distance is tested.
    """

    close: Tensor = field(repr=False, compare=False)
    far: Tensor = field(repr=False, compare=False)
    difference: float = 0.15
    distance: float = 0.5
    ids: int = 10_000

    @classmethod
    def on(
        cls, embeddings: Tensor, ids: Tensor, difference: float = 0.15, distance: float = 0.5
    ) -> "PublishedGSD":
        """For tokens with these embeddings, [V, H], and ids, int64 [V]."""
        vectors = embeddings.float()
        far = ids >= cls.ids
        if far.all():  # no distance is tested
            return cls(far.new_zeros(1, 1), far, difference, distance)
        rows = [torch.cdist(part, vectors).square() < distance for part in vectors.split(AT_ONCE)]
        return cls(torch.cat(rows), far, difference, distance)

    @override
    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of every token."""
        order = p.argsort(dim=-1, stable=True)
        of_p, of_q = p.gather(-1, order), q.gather(-1, order)
        places = torch.arange(p.shape[-1], device=p.device)
        windows = []
        for step in range(-LOWER, UPPER + 1):
            inside = (places + step >= 0) & (places + step < len(places))
            windows.append(((places + step).clamp(0, len(places) - 1), inside))
        far = self.far[order]
        untested = torch.stack([far[..., other] & inside for other, inside in windows]).any(0)
        last = len(self.close) - 1
        rows = order.clamp(max=last)
        mass_p, mass_q = torch.zeros_like(p), torch.zeros_like(q)
        for other, inside in windows:
            near = self.close[rows, order[..., other].clamp(max=last)] | untested
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
        others, inside = _window(p, token)
        untested = (self.far[others] & inside).any(-1, keepdim=True)
        last = len(self.close) - 1
        near = self.close[token.clamp(max=last)[..., None], others.clamp(max=last)] | untested
        similar = (p.gather(-1, others) - at(p, token)[..., None]).abs() < self.difference
        member = inside & near & similar
        alone = inside[..., :LOWER].sum(-1) < LOWER
        masses = [
            torch.where(alone, at(each, token), (each.gather(-1, others) * member).sum(-1))
            for each in (p, q)
        ]
        return ratio(*masses)

    @override
    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+."""
        return excess(p, q)


def grouped(
    drafter: Jacobi, difference: PositiveFloat = 0.15, distance: PositiveFloat = 0.5
) -> Method:
    """SJD's guesses, verified by groups of the target's embeddings; for the arguments see
    `PublishedGSD`.

    Raises:
        TemperaError: the drafter is another one.
    """
    target = drafter.target if isinstance(drafter, Jacobi) else None
    if not isinstance(target, TransformerTarget):
        raise TemperaError(
            "GSD's public code verifies guesses of the target itself: choose drafter=sjd",
            option="drafter",
        )
    tokens = torch.arange(target.vocab_size, device=target.device)
    spec = target.network.spec
    ids = tokens if spec is None or spec.token_ids is None else spec.token_ids
    embeddings = target.head.embed(tokens)[: len(tokens)]
    return Method(drafter, PublishedGSD.on(embeddings, ids.to(tokens.device), difference, distance))


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
