"""Whether a picture shows its caption's shapes whole, read from the pixels without a network.

The named shapes are fitted at their best places. A pixel is explained if the colour that ought to
be there gives it under some texture that the world's renderer could have drawn. What is
unexplained outside the shapes is stray, inside them missing; outlines, where two colours mix, are
not judged.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tempera.shapes.world import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_SIZE,
    LATTICE,
    MARKS,
    PATTERNS,
    SHAPES,
    SIZES,
    Image,
    Scene,
    Texture,
    Thing,
    distance,
    marks,
)

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]

OUTLINE = 1.0
"""Pixels at most so far from an outline are not judged."""


class Lighting(NamedTuple):
    """What a texture makes of a colour.

    Attributes:
        gain: it is multiplied by 1 ± at most so much.
        shift: at most so much brightness is added. The extremes do not meet: both lie in an
            ellipse.
        tolerance: a pixel that is farther than this from all of it, in RGB, is unexplained.
    """

    gain: float
    shift: float
    tolerance: float


LIGHTINGS: dict[Texture, Lighting] = {
    "weave": Lighting(0.02, 0.06, 0.09),
    "clouds": Lighting(0.25, 0.24, 0.12),
}
STEPS = np.linspace(-1, 1, 9, dtype=np.float32)
"""Shifts that are tried, in units of the largest."""
NEAR = (-2, -1, 0, 1, 2)
"""Places off the lattice that are tried, in pixels: a picture's shapes need not lie on it."""
BROKEN = 5
"""A picture with more unexplained pixels is broken, as at most 0.5% of real scenes are after the
tokenizer's round trip.
"""

LIMITS = (OUTLINE, LIGHTINGS, BROKEN)


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


def structure(picture: Image, caption: Scene, texture: Texture = "weave") -> Structure:
    """Fit the scene that a caption tells to a picture.

    Args:
        picture: [48, 48, 3] in [0, 1].
        caption: parsed; what it leaves open is fitted as well.
        texture: of the world.

    Returns:
        the fit with the fewest unexplained pixels.
    """
    lighting = LIGHTINGS[texture]
    not_thing = []
    for thing in caption.things:
        not_thing.append(_unexplained(picture, _rgb(COLOURS[thing.colour]), lighting))
    fits = []
    for background in [caption.background] if caption.background else BACKGROUNDS:
        colour = _rgb(BACKGROUNDS[background])
        not_background = _unexplained(picture, colour, lighting)
        if caption.pattern != "plain":
            not_marks = _unexplained(picture, MARKS * colour, lighting)
            # a lighting of the clouds makes marks of a background: there a pattern shows nothing
            if texture == "clouds":
                not_background &= not_marks
            else:
                not_background = _best_pattern(caption.pattern, not_background, not_marks)
        fits.append(_fit(caption, not_background, not_thing))
        if not fits[-1].unexplained:
            break
    return min(fits, key=lambda fit: fit.unexplained)


def _best_pattern(told: str, not_background: Mask, not_marks: Mask) -> Mask:
    """The pixels that are not the background, with the marks where they explain most.

    Args:
        told: the pattern; empty for any.
        not_background: the pixels that are not the background between marks.
        not_marks: those that are no marks.
    """
    steps = range(0, 4 * LATTICE, LATTICE)
    patterns = [told] if told else PATTERNS
    masks = []
    for pattern, right, down in itertools.product(patterns, steps, steps):
        masks.append(np.where(marks(pattern, right, down), not_marks, not_background))
    return min(masks, key=np.sum)


def _rgb(colour: tuple[float, float, float]) -> Image:
    """A colour as an array, float32 [3]."""
    return np.array(colour, np.float32)


def _unexplained(picture: Image, colour: Image, lighting: Lighting) -> Mask:
    """The pixels [48, 48] that no texture on a colour [3] gives."""
    nearest = np.full(picture.shape[:2], np.inf, np.float32)
    for step in STEPS:
        shift = lighting.shift * step
        reach = lighting.gain * np.sqrt(1 - step**2)
        gain = ((picture - shift) @ colour / (colour @ colour)).clip(1 - reach, 1 + reach)
        lit = (gain[..., None] * colour + shift).clip(0, 1)
        np.minimum(nearest, np.linalg.norm(picture - lit, axis=-1), out=nearest)
    return nearest > lighting.tolerance


@lru_cache(maxsize=len(SHAPES) * len(SIZES))
def _placements(shape: str, size: str) -> tuple[list[Thing], Mask, Mask]:
    """All places of a shape on the lattice: [P], the pixels inside [P, 48, 48] and those inside or
    on its outline.
    """
    steps = range(0, IMAGE_SIZE + 1, LATTICE)
    radius = SIZES[size]
    fitting = [at for at in steps if radius <= at <= IMAGE_SIZE - radius]
    things = [Thing(shape, "red", size, x, y) for y in fitting for x in fitting]
    distances = np.stack([distance(thing) for thing in things])
    return things, distances < -OUTLINE, distances <= OUTLINE


def _fit(caption: Scene, not_background: Mask, not_thing: list[Mask]) -> Structure:
    """Place the things where the fewest pixels are unexplained: on the lattice, then near there
    until all are explained.

    Args:
        caption: the caption's scene.
        not_background: the pixels that are not the background.
        not_thing: for each thing, the pixels that are not its colour.
    """
    best = _judge(_on_lattice(caption, not_background, not_thing), not_background, not_thing)
    for number, thing in enumerate(best.things):
        for right, down in itertools.product(NEAR, NEAR):
            if not best.unexplained:
                return best
            things = list(best.things)
            things[number] = replace(thing, x=thing.x + right, y=thing.y + down)
            moved = _judge(things, not_background, not_thing)
            best = min(best, moved, key=lambda fit: fit.unexplained)
    return best


def _on_lattice(caption: Scene, not_background: Mask, not_thing: list[Mask]) -> list[Thing]:
    """The places on the lattice that explain most pixels and keep the caption's relation."""
    candidates = []
    for thing, mask in zip(caption.things, not_thing, strict=True):
        candidates.append(_candidates(thing, not_background, mask))
    if not caption.relation:
        ((things, explained),) = candidates
        return [things[int(explained.argmax())]]
    (firsts, first_explained), (seconds, second_explained) = candidates
    axis = "y" if caption.relation == "above" else "x"
    ends = np.array([getattr(thing, axis) + thing.radius for thing in firsts])
    begins = np.array([getattr(thing, axis) - thing.radius for thing in seconds])
    in_order = ends[:, None] <= begins
    explained = np.where(in_order, first_explained[:, None] + second_explained, -np.inf)
    first, second = np.unravel_index(int(explained.argmax()), explained.shape)
    return [firsts[first], seconds[second]]


def _candidates(kind: Thing, not_background: Mask, not_thing: Mask) -> tuple[list[Thing], Counts]:
    """All places and sizes of a thing, and how many pixels each explains: those on its area that
    are not the background, less those inside that are not the thing.
    """
    things: list[Thing] = []
    explained = []
    for size in [kind.size] if kind.size else SIZES:
        placements, inside, covered = _placements(kind.shape, size)
        things += [replace(placement, colour=kind.colour) for placement in placements]
        gained = (covered & not_background).sum((1, 2))
        lost = (inside & not_thing).sum((1, 2))
        explained.append(gained - lost)
    return things, np.concatenate(explained)


def _judge(things: Sequence[Thing], not_background: Mask, not_thing: list[Mask]) -> Structure:
    """What is unexplained if the things are at these places."""
    stray = not_background.copy()
    missing = np.zeros_like(stray)
    for thing, mask in zip(things, not_thing, strict=True):
        outline = distance(thing)
        stray &= outline > OUTLINE
        missing |= (outline < -OUTLINE) & mask
    return Structure(tuple(things), stray, missing)
