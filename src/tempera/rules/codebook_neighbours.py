"""Tables of the nearest codes of an image tokenizer's codebook, for LANTERN and GSD.

Distances are computed on the codebook as the image decoder uses it (ℓ2-normalised for LlamaGen), so
that nearby codes give similar images. LANTERN's public code uses the raw codebook and leaves the
code itself out of its k neighbours; here it is the first of them, as in the paper. A table of
16,384 codes takes about six seconds.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from tempera.errors import TemperaError

Proximity = Literal["l2", "cosine", "random"]
_BUILT: dict[tuple[str, int, str], "Neighbours"] = {}
"""The last tables of this process, which searches and sweeps need again."""
MOST = 4
"""Tables that are kept."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """B_k(x) for every code x (LANTERN, Section 4.2). Made by `build`, once for each codebook,
    proximity and k.

    Attributes:
        table: the k nearest codes of every code, nearest first and itself at the front, int64 [V,
            k].
        proximity: "l2" or "cosine" (the same order on unit vectors), or "random": codes drawn once
            without order, LANTERN's ablation.
        codebook: hash of the codebook, see `codebook_hash`.
    """

    table: Tensor
    proximity: str
    codebook: str
    _fitted: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, codebook: Tensor, k: int, proximity: Proximity = "l2") -> "Neighbours":
        """From a codebook [V, D]. Of codes at the same distance the one with the smaller index is
        nearer.

        Raises:
            TemperaError: k is not between 1 and V.
        """
        size = len(codebook)
        if not 1 <= k <= size:
            raise TemperaError(
                f"k={k} nearest codes cannot be taken from a codebook of {size}; give a k "
                f"between 1 and {size}"
            )
        key = codebook_hash(codebook), k, proximity
        if key not in _BUILT:
            while len(_BUILT) >= MOST:
                del _BUILT[next(iter(_BUILT))]
            _BUILT[key] = cls(_nearest(codebook, k, proximity), proximity, key[0])
        return _BUILT[key]

    @classmethod
    def covering(cls, codebook: Tensor, k: float, proximity: Proximity = "l2") -> "Neighbours":
        """Those that `GSD` needs for k codes, which may be a fraction: the next whole number."""
        return cls.build(codebook, math.ceil(k), proximity)

    @property
    def k(self) -> int:
        """Codes in a neighbourhood, the code itself included."""
        return self.table.shape[1]

    def table_for(self, p: Tensor) -> Tensor:
        """The table for distributions p [..., V] on their device, int64 [V, k]; made once.

        A model may have more tokens than the codebook, such as end-of-line tokens. They occur only
        at forced positions, where p is one-hot, and have p = 0 elsewhere, so their neighbours do
        not matter.

        Raises:
            TemperaError: the model has fewer tokens than the codebook.
        """
        key = p.device, p.shape[-1]
        if key not in self._fitted:
            size = p.shape[-1]
            codes = len(self.table)
            if size < codes:
                raise TemperaError(
                    f"the model has {size} tokens, but its image tokenizer has {codes} codes; "
                    "choose the image tokenizer that the model was trained with"
                )
            table = pad(self.table, (0, 0, 0, size - codes))
            table[:, 0] = torch.arange(size)
            self._fitted[key] = table.to(p.device)
        return self._fitted[key]

    def __repr__(self) -> str:
        return f"Neighbours({self.proximity}, k={self.k}, codebook={self.codebook})"


def codebook_hash(codebook: Tensor) -> str:
    """Short hash of a codebook [V, D], up to its scale. Values are rounded to a thousandth of the
    largest, so that small rounding errors do not change it.
    """
    values = codebook.detach().double().cpu()
    rounded = (1000 * values / values.abs().amax().clamp(min=1e-30)).round().to(torch.int64)
    return hashlib.sha256(
        repr(tuple(codebook.shape)).encode() + rounded.numpy().tobytes()
    ).hexdigest()[:16]


def _nearest(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """The k nearest codes of each, int64 [V, k], 512 rows at a time: the distances of all rows of a
    large codebook would not fit into memory.
    """
    rows: list[Tensor] = []
    vectors = codebook.detach().double().cpu()
    vectors = normalize(vectors, dim=-1) if proximity == "cosine" else vectors
    index = torch.arange(len(vectors))
    low_bits = (1 << len(vectors).bit_length()) - 1
    for start in range(0, len(vectors), 512):
        own = index[start : start + 512]
        if proximity == "random":
            draws = torch.Generator().manual_seed(start)
            distances = torch.rand(len(own), len(vectors), generator=draws).double()
        else:  # without matrix products, so that equal codes have distance 0 exactly
            exact = "donot_use_mm_for_euclid_dist"
            distances = torch.cdist(vectors[own], vectors, compute_mode=exact)
        # itself first, even where another code is the same vector
        distances.scatter_(1, own.unsqueeze(1), -1.0)
        # the bits of a float64 grow with it; the last ones make way for the index, which orders
        # equal distances
        keys = distances.view(torch.int64).bitwise_and_(~low_bits).bitwise_or_(index)
        rows.append(keys.topk(k, largest=False).values & low_bits)
    return torch.cat(rows)
