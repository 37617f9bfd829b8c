"""Whether a picture shows its caption's shapes whole, read from the pixels without a network.

The named shapes are fitted at their best places. A pixel is explained if the colour that ought to
be there gives it under some lighting that the world's renderer could have drawn. What is
unexplained outside the shapes is stray, inside them missing; outlines, where two colours mix, are
not judged.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tempera.shapes.world import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_SIZE,
    LATTICE,
    SHAPES,
    SIZES,
    Image,
    Scene,
    Thing,
    distance,
)

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]

OUTLINE = 1.0
"""Pixels at most so far from an outline are not judged."""
GAIN = 0.25
"""The renderer's lighting gradient multiplies a colour by 1 ± at most so much."""
SHIFT = 0.24
"""Its texture adds at most so much brightness. The extremes do not meet: both lie in an ellipse."""
STEPS = np.linspace(-1, 1, 9, dtype=np.float32)
"""Shifts that are tried, in units of SHIFT."""
MARKS = 0.68
"""The stripes' colour is the background's times this."""
NEAR = (-2, -1, 0, 1, 2)
"""Places off the lattice that are tried, in pixels: a picture's shapes need not lie on it."""
TOLERANCE = 0.12
"""A pixel that is farther than this from every lighting of a colour, in RGB, is unexplained."""
BROKEN = 5
"""A picture with more unexplained pixels is broken, as at most 0.5% of real scenes are after the
tokenizer's round trip.
"""

LIMITS = (OUTLINE, GAIN, SHIFT, MARKS, TOLERANCE, BROKEN)


@dataclass(frozen=True)
class Structure:
    """What a picture shows of its caption's shapes.

    Attributes:
        things: the shapes at their best places.
        stray: unexplained pixels outside the shapes [48, 48].
        missing: unexplained pixels inside them [48, 48].
    """

    things: tuple[Thing, ...]
    stray: Mask
    missing: Mask

    @property
    def unexplained(self) -> int:
        """The number of stray and missing pixels."""
        return int(self.stray.sum() + self.missing.sum())

    @property
    def broken(self) -> bool:
        """Whether more than a few pixels are unexplained."""
        return self.unexplained > BROKEN


def structure(picture: Image, told: Scene) -> Structure:
    """Fit the scene that a caption tells to a picture.

    Args:
        picture: [48, 48, 3] in [0, 1].
        told: a parsed caption; what it leaves open is fitted as well.

    Returns:
        the fit with the fewest unexplained pixels.
    """
    strange = [_unexplained(picture, _rgb(COLOURS[thing.colour])) for thing in told.things]
    fits = []
    for background in [told.background] if told.background else BACKGROUNDS:
        base = _rgb(BACKGROUNDS[background])
        foreign = _unexplained(picture, base)
        if told.pattern != "plain":
            foreign &= _unexplained(picture, MARKS * base)
        fits.append(_fit(told, foreign, strange))
    return min(fits, key=lambda fit: fit.unexplained)


def _rgb(colour: tuple[float, float, float]) -> Image:
    return np.array(colour, np.float32)


def _unexplained(picture: Image, colour: Image) -> Mask:
    """The pixels [48, 48] that no lighting of a colour [3] gives."""
    nearest = np.full(picture.shape[:2], np.inf, np.float32)
    for step in STEPS:
        shift = SHIFT * step
        reach = GAIN * np.sqrt(1 - step**2)
        gain = ((picture - shift) @ colour / (colour @ colour)).clip(1 - reach, 1 + reach)
        lit = (gain[..., None] * colour + shift).clip(0, 1)
        np.minimum(nearest, np.linalg.norm(picture - lit, axis=-1), out=nearest)
    return nearest > TOLERANCE


@lru_cache(maxsize=len(SHAPES) * len(SIZES))
def _places(shape: str, size: str) -> tuple[list[Thing], Mask, Mask]:
    """All places of a shape on the lattice: [P], the pixels inside [P, 48, 48] and those inside or
    on its outline.
    """
    steps = range(0, IMAGE_SIZE + 1, LATTICE)
    radius = SIZES[size]
    fitting = [at for at in steps if radius <= at <= IMAGE_SIZE - radius]
    things = [Thing(shape, "red", size, x, y) for y in fitting for x in fitting]
    distances = np.stack([distance(thing) for thing in things])
    return things, distances < -OUTLINE, distances <= OUTLINE


def _fit(told: Scene, foreign: Mask, strange: list[Mask]) -> Structure:
    """Place the things where the fewest pixels are unexplained: on the lattice, then near there.

    Args:
        told: the caption's scene.
        foreign: the pixels that are not the background.
        strange: for each thing, the pixels that are not its colour.
    """
    best = _judged(_on_lattice(told, foreign, strange), foreign, strange)
    for number, thing in enumerate(best.things):
        for right, down in itertools.product(NEAR, NEAR):
            things = list(best.things)
            things[number] = replace(thing, x=thing.x + right, y=thing.y + down)
            moved = _judged(things, foreign, strange)
            best = min(best, moved, key=lambda fit: fit.unexplained)
    return best


def _on_lattice(told: Scene, foreign: Mask, strange: list[Mask]) -> list[Thing]:
    candidates = [
        _candidates(thing, foreign, mask) for thing, mask in zip(told.things, strange, strict=True)
    ]
    if not told.relation:
        ((things, explained),) = candidates
        return [things[int(explained.argmax())]]
    (first, gain), (second, more) = candidates
    axis = "y" if told.relation == "above" else "x"
    ends = np.array([getattr(thing, axis) + thing.radius for thing in first])
    begins = np.array([getattr(thing, axis) - thing.radius for thing in second])
    both = np.where(ends[:, None] <= begins, gain[:, None] + more, -np.inf)
    here, there = np.unravel_index(int(both.argmax()), both.shape)
    return [first[here], second[there]]


def _candidates(kind: Thing, foreign: Mask, strange: Mask) -> tuple[list[Thing], Counts]:
    """All places and sizes of a thing, and how many pixels each explains: those on its area that
    are not the background, less those inside that are not the thing.
    """
    things: list[Thing] = []
    explained = []
    for size in [kind.size] if kind.size else SIZES:
        places, inside, covered = _places(kind.shape, size)
        things += [replace(place, colour=kind.colour) for place in places]
        explained.append((covered & foreign).sum((1, 2)) - (inside & strange).sum((1, 2)))
    return things, np.concatenate(explained)


def _judged(things: Sequence[Thing], foreign: Mask, strange: list[Mask]) -> Structure:
    stray = foreign.copy()
    missing = np.zeros_like(stray)
    for thing, mask in zip(things, strange, strict=True):
        outline = distance(thing)
        stray &= outline > OUTLINE
        missing |= (outline < -OUTLINE) & mask
    return Structure(tuple(things), stray, missing)
