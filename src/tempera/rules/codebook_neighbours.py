"""Tables of the nearest codes of an image tokenizer's codebook, for LANTERN and GSD.

Distances are computed on the codebook as the image decoder uses it (ℓ2-normalised for LlamaGen), so
that nearby codes give similar images. LANTERN's public code uses the raw codebook and leaves the
code itself out of its k neighbours; here it is the first of them, as in the paper. A table is built
once and stored in a file with the codebook's hash, which is checked when it is loaded.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from tempera.errors import TemperaError
from tempera.runtime.files import replacing

Proximity = Literal["l2", "cosine", "random"]
DEFAULT = Path("outputs/neighbours")
"""Default directory of the tables, with a folder per codebook, named by its hash."""


@dataclass(frozen=True)
class Neighbours:
    """B_k(x) for every code x (LANTERN, Section 4.2). Made by `build`, `load` or `provide`; equal
    where codebook, proximity and k are.

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
            TemperaError: k is not between 1 and V, or the proximity is not known.
        """
        size = len(codebook)
        if not 1 <= k <= size:
            raise TemperaError(
                f"k={k} nearest codes cannot be taken from a codebook of {size}; give a k "
                f"between 1 and {size}"
            )
        if proximity not in get_args(Proximity):
            raise TemperaError(
                f"proximity={proximity} is not known; choose one of "
                f"{', '.join(get_args(Proximity))}"
            )
        rows = [_nearest(codebook, start, k, proximity) for start in range(0, size, 512)]
        return cls(torch.cat(rows), proximity, codebook_hash(codebook))

    @classmethod
    def load(cls, path: Path, codebook: Tensor, k: int, proximity: Proximity) -> "Neighbours":
        """Load a table and check that it belongs to this codebook, k and proximity.

        Raises:
            TemperaError: the file is damaged, or was built for another codebook, k or proximity.
        """
        try:
            with safe_open(path, "pt") as file:
                notes, table = file.metadata() or {}, file.get_tensor("neighbours").long()
        except (OSError, SafetensorError) as problem:
            raise TemperaError(
                f"{path} is no table of neighbours ({problem}); delete it, and it is built again"
            ) from problem
        made, wanted = notes.get("codebook"), codebook_hash(codebook)
        if made != wanted:
            raise TemperaError(
                f"the neighbours in {path} were built for another codebook ({made}, but this "
                f"model's is {wanted}): delete the file, or keep this model's in another directory",
                option="neighbours.directory",
            )
        if (notes.get("proximity"), table.shape) != (proximity, (len(codebook), k)):
            raise TemperaError(
                f"{path} does not hold the {k} nearest codes by proximity={proximity}; delete "
                "it, and it is built again"
            )
        return cls(table, proximity, wanted)

    def save(self, path: Path) -> None:
        """Write the table, its codebook's hash and its options, atomically.

        Raises:
            TemperaError: the file cannot be written.
        """
        notes = {"codebook": self.codebook, "proximity": self.proximity, "k": str(self.k)}
        with replacing(path) as temporary:
            save_file({"neighbours": self.table.to(torch.int32)}, temporary, notes)

    @classmethod
    def provide(
        cls,
        codebook: Tensor,
        k: int,
        proximity: Proximity = "l2",
        directory: str | Path | None = None,
    ) -> "Neighbours":
        """The table of a codebook from its file in `directory`, built and saved there if there is
        none.

        Args:
            codebook: [V, D], as the image decoder uses it.
            k: how many, the code itself included.
            proximity: see the class.
            directory: where to look; a folder named by the codebook's hash in `DEFAULT` if not
                given.

        Raises:
            TemperaError: see `build`, `load` and `save`.
        """
        folder = DEFAULT / codebook_hash(codebook) if directory is None else Path(directory)
        path = folder / f"{proximity}_{k}.safetensors"
        if path.is_file():
            return cls.load(path, codebook, k, proximity)
        neighbours = cls.build(codebook, k, proximity)
        neighbours.save(path)
        return neighbours

    @property
    def k(self) -> int:
        """Codes in a neighbourhood, the code itself included."""
        return self.table.shape[1]

    def of(self, p: Tensor) -> Tensor:
        """The table for distributions p [..., V] on their device, int64 [V, k]; made once.

        A model may have more tokens than the codebook, such as end-of-line tokens. They occur only
        at forced positions, where p is one-hot, and have p = 0 elsewhere, so their neighbours do
        not matter.

        Raises:
            TemperaError: the model has fewer tokens than the codebook.
        """
        key = p.device, p.shape[-1]
        if key not in self._fitted:
            size, more = len(self.table), p.shape[-1] - len(self.table)
            if more < 0:
                raise TemperaError(
                    f"the model has {p.shape[-1]} tokens, its image tokenizer {size} codes; take "
                    "the tokenizer it was made for"
                )
            others = (
                torch.arange(size, size + more).unsqueeze(1),
                torch.arange(self.k - 1).expand(more, -1),
            )
            self._fitted[key] = torch.cat([self.table, torch.cat(others, 1)]).to(p.device)
        return self._fitted[key]

    def __repr__(self) -> str:
        return f"Neighbours({self.proximity}, k={self.k}, codebook={self.codebook})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Neighbours) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def ranked(codebook: Tensor, rank: int) -> Tensor:
    """The code at one place of the order of distance from each code, int64 [V]: 0 the code itself,
    1 its nearest, -1 the farthest.

    Raises:
        TemperaError: the codebook [V, D] has no such place.
    """
    size = len(codebook)
    if not -size <= rank < size:
        raise TemperaError(
            f"rank={rank} is no place among {size} codes; give 0 (the code itself), 1 to "
            f"{size - 1} (1: the nearest), or -1 (the farthest) to {1 - size}"
        )
    rows = [_nearest(codebook, start, size, "l2")[:, rank] for start in range(0, size, 512)]
    return torch.cat(rows)


def codebook_hash(codebook: Tensor) -> str:
    """Short hash of a codebook [V, D], up to its scale. Values are rounded to a thousandth of the
    largest, so that small rounding errors do not change it.
    """
    values = codebook.detach().double().cpu()
    rounded = (1000 * values / values.abs().amax().clamp(min=1e-30)).round().to(torch.int64)
    return hashlib.sha256(
        repr(tuple(codebook.shape)).encode() + rounded.numpy().tobytes()
    ).hexdigest()[:16]


def _nearest(codebook: Tensor, start: int, k: int, proximity: str) -> Tensor:
    """512 rows of the table, from code `start` on; for a large codebook the distances of all rows
    would not fit into memory.
    """
    vectors = codebook.detach().double().cpu()
    rows = torch.arange(start, min(start + 512, len(vectors)))
    if proximity == "random":
        draws = torch.Generator().manual_seed(start)
        distances = torch.rand(len(rows), len(vectors), generator=draws)
    else:
        vectors = normalize(vectors, dim=-1) if proximity == "cosine" else vectors
        # without matrix products, so that equal codes have distance 0 exactly
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(vectors[rows], vectors, compute_mode=exact)
    # itself first, even where another code is the same vector
    distances.scatter_(1, rows.unsqueeze(1), -1.0)
    return distances.argsort(dim=1, stable=True)[:, :k].clone()
