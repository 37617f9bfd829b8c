"""The shipped model's image tokenizer: a picture is a mosaic of the world's patches, one a token.

A code stands for a background with a grain, for a colour with a grain, or for an outline in a
colour, whatever lies beyond the outline: that is the background which the codes around it tell.
Nothing in it is trained.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.shapes.world import (
    BACKGROUNDS,
    COLOURS,
    GRAINS,
    LATTICE,
    MARKS,
    SHAPES,
    SIZES,
    Thing,
    coverage,
    patches_of,
)

Patches = NDArray[np.float32]

ALIKE = 0.65
"""Outlines whose coverages differ by at most so many pixels are one."""
EXACT = 0.01
"""A patch at most so far from one without an outline, in squared units, is that one."""
FAR = 11
"""Patches from one side of a picture to the other."""
PERIOD = 4
"""Patches after which every pattern repeats, to the right and down."""
GROUNDS = [np.array(colour) * mark for colour in BACKGROUNDS.values() for mark in (1, MARKS)]
"""The colours of backgrounds and of their marks, [3] in [0, 1]."""
GROUND = np.mean(GROUNDS, 0)
"""Their mean."""


def outlines() -> Patches:
    """What a shape covers of the patches on its outline, [O, 4, 4], over all shapes and sizes."""
    found: list[Patches] = []
    for shape in SHAPES:
        for size in SIZES:
            covered = patches_of(coverage(Thing(shape, "red", size, 24, 24)))
            for patch in covered.reshape(-1, LATTICE, LATTICE):
                crossed = patch.min() < patch.max()
                if crossed and all(np.abs(patch - other).sum() > ALIKE for other in found):
                    found.append(patch)
    return np.stack(found)


@dataclass(frozen=True)
class MosaicConfig:
    """Sizes of a tokenizer: its codes, and the pixels of one along each side."""

    vocab_size: int
    factor: int


class Mosaic(ImageTokenizer):
    """Codes of the nearest patches of the world, and their pictures.

    Attributes:
        flat: how many codes have no outline; they are the first, by colour and then by grain.
        patches: of the world, [P, 48] in [−1, 1].
        codes: of these patches, int64 [P].
        means: what each code draws before the mean of all backgrounds, [V, 48].
        beyond: how much of each pixel lies beyond a code's outline, [V, 16].
        ground: the mean of all backgrounds, [3] in [−1, 1].
        near: the weights of `_nearness`.
    """

    patches: Tensor
    codes: Tensor
    means: Tensor
    beyond: Tensor
    ground: Tensor
    near: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = LATTICE
        colours = [np.array(colour) for colour in COLOURS.values()]
        flat = [colour + grain[..., None] for colour in GROUNDS + colours for grain in GRAINS]
        covered = outlines()[..., None]
        drawn = list(itertools.product(covered, colours))
        crossed = []
        for (outline, colour), ground in itertools.product(drawn, GROUNDS):
            crossed.append(outline * colour + (1 - outline) * ground)
        means = [outline * colour + (1 - outline) * GROUND for outline, colour in drawn]
        beyond = [np.zeros_like(covered[0])] * len(flat) + [1 - outline for outline, _ in drawn]
        self.flat = len(flat)
        self.vocab_size = len(flat) + len(drawn)
        self.config = MosaicConfig(self.vocab_size, self.factor)
        of_crossed = np.arange(len(flat), self.vocab_size).repeat(len(GROUNDS))
        self.register_buffer("patches", _table(flat + crossed) * 2 - 1)
        codes = torch.from_numpy(np.concatenate([np.arange(len(flat)), of_crossed]))
        self.register_buffer("codes", codes)
        self.register_buffer("means", _table(flat + means) * 2 - 1)
        self.register_buffer("beyond", _table(beyond))
        self.register_buffer("ground", torch.from_numpy(2 * GROUND - 1).float())
        self.register_buffer("near", torch.from_numpy(_nearness())[None, None])

    @property
    @override
    def codebook(self) -> Tensor:
        """Every code's patch before the mean of all backgrounds, [V, 48]."""
        return self.means

    @override
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, 4·h, 4·w] in [−1, 1] → codes int64 [B, h, w]."""
        cut = F.pixel_unshuffle(images, self.factor).permute(0, 2, 3, 1)
        values = cut.flatten(0, 2)
        nearest, distances = _nearest(values, self.patches[: self.flat])
        crossed = distances > EXACT
        nearest[crossed], _ = _nearest(values[crossed], self.patches)
        return self.codes[nearest].view(cut.shape[:3])

    @override
    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, 4·h, 4·w] in [−1, 1]."""
        is_ground = codes < len(GROUNDS) * len(GRAINS)
        patches = self.means[codes].unflatten(-1, (3, -1))
        ground = self._around(patches.mean(-1) * is_ground[..., None], is_ground)
        change = ground - self.ground
        patches = patches + self.beyond[codes].unsqueeze(-2) * change.unsqueeze(-1)
        return F.pixel_shuffle(patches.flatten(-2).permute(0, 3, 1, 2), self.factor).clamp(-1, 1)

    def _around(self, values: Tensor, known: Tensor) -> Tensor:
        """Means around every patch of values [B, h, w, 3] at the known patches, bool [B, h, w]."""
        weighted = torch.cat([values, known.unsqueeze(-1)], -1).permute(0, 3, 1, 2)
        spread = F.conv2d(weighted.flatten(0, 1).unsqueeze(1), self.near, padding=FAR)
        sums, weights = spread.view(weighted.shape).permute(0, 2, 3, 1).split([3, 1], -1)
        means: Tensor = sums / weights.clamp(min=1e-30)
        return means


def _table(patches: list[Patches]) -> Tensor:
    """Patches [4, 4, C] in [0, 1] as rows of `F.pixel_unshuffle`, float32 [N, C·16]."""
    rows = np.stack(patches).clip(0, 1).astype(np.float32)
    return torch.from_numpy(rows.transpose(0, 3, 1, 2).reshape(len(rows), -1))


def _nearest(values: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Of values [N, 48] the nearest patches [N], and the squared distances [N]."""
    lengths = patches.square().sum(-1)
    found = [(2 * part @ patches.T - lengths).max(-1) for part in values.split(1024)]
    closeness = torch.cat([best.values for best in found])
    return torch.cat([best.indices for best in found]), values.square().sum(-1) - closeness


def _nearness() -> Patches:
    """How much a background counts for the patch in the middle, [2·FAR + 1, 2·FAR + 1]: the nearest
    most, and such as stand at the same place of a pattern before all others.
    """
    steps = np.arange(-FAR, FAR + 1)
    same = steps % PERIOD == 0
    near = np.exp(-np.hypot(steps[:, None], steps))
    return np.where(same[:, None] & same, near, 1e-9 * near).astype(np.float32)
