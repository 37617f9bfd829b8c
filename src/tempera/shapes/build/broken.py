"""Pictures that are wrong in one known way, to learn what an evaluator can see."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tempera.shapes.world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Sample,
    Scene,
    Thing,
    World,
    one_of,
    render,
)


def _other(names: tuple[str, ...], name: str, rng: np.random.Generator) -> str:
    return one_of([other for other in names if other != name], rng)


def _wrong_colour(scene: Scene, rng: np.random.Generator) -> Scene:
    first, *rest = scene.things
    colour = _other(tuple(COLOURS), first.colour, rng)
    return replace(scene, things=(replace(first, colour=colour), *rest))


def _wrong_shape(scene: Scene, rng: np.random.Generator) -> Scene:
    first, *rest = scene.things
    shape = _other(SHAPES, first.shape, rng)
    return replace(scene, things=(replace(first, shape=shape), *rest))


def _missing_shape(scene: Scene, rng: np.random.Generator) -> Scene:
    return replace(scene, things=scene.things[1:])


def _swapped_relation(scene: Scene, rng: np.random.Generator) -> Scene:
    """The two shapes change places."""
    a, b = scene.things
    return replace(scene, things=(_at(a, b), _at(b, a)))


def _at(thing: Thing, place: Thing) -> Thing:
    return replace(thing, x=place.x, y=place.y)


def _wrong_background(scene: Scene, rng: np.random.Generator) -> Scene:
    assert scene.background is not None
    return replace(scene, background=_other(tuple(BACKGROUNDS), scene.background, rng))


BREAKS: dict[str, Callable[[Scene, np.random.Generator], Scene]] = {
    "wrong_colour": _wrong_colour,
    "wrong_shape": _wrong_shape,
    "missing_shape": _missing_shape,
    "swapped_relation": _swapped_relation,
    "wrong_background": _wrong_background,
}
"""Kind of mistake → the scene with it; the caption stays the old one."""


def broken_pictures(world: World, kind: str, count: int) -> tuple[list[Sample], Tensor]:
    """Samples whose caption tells all, and the pictures [count, 3, H, W] in [−1, 1] of their scenes
    with one mistake. A relation is swapped where two shapes differ in colour or kind.
    """
    samples: list[Sample] = []
    index = 0
    while len(samples) < count:
        sample = world.sample(index)
        index += 1
        if kind != "swapped_relation" or _told_apart(sample.scene):
            samples.append(sample)
    rng = np.random.default_rng([world.seed, len(kind), count])
    images = np.stack([render(BREAKS[kind](sample.scene, rng)) for sample in samples])
    return samples, torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1


def _told_apart(scene: Scene) -> bool:
    if len(scene.things) < 2:
        return False
    a, b = scene.things
    return (a.shape, a.colour) != (b.shape, b.colour)
