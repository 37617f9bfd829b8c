"""Scenes of the world as the stages read them: pictures, scenes of one shape, and which tokens a
shape touches.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tempera.shapes.world import LATTICE, Sample, Scene, World, distance


def pictures(samples: list[Sample]) -> Tensor:
    """Images float32 [B, 3, 48, 48] in [−1, 1]."""
    stack = torch.from_numpy(np.stack([sample.image for sample in samples]))
    return stack.permute(0, 3, 1, 2).mul(2).sub(1).contiguous()


def object_masks(scene: Scene) -> NDArray[np.bool_]:
    """Pixels within one pixel of each shape, bool [things, 48, 48]."""
    return np.stack([distance(thing) < 1.0 for thing in scene.things])


def pixel_weights(samples: list[Sample], weight: float) -> Tensor:
    """Of every pixel, [B, 1, 48, 48] of mean 1: pixels within one pixel of a shape count `weight`
    times as much as the others. Texture has most of the plain error, and edges most of what a
    picture shows.
    """
    shapes = np.stack([object_masks(sample.scene).any(0) for sample in samples])
    weights = 1 + (weight - 1) * torch.from_numpy(shapes).unsqueeze(1)
    return weights / weights.mean()


def shape_tokens(sample: Sample, factor: int) -> Tensor:
    """Tokens that touch a shape, bool [h·w]."""
    shapes = F.max_pool2d(torch.from_numpy(object_masks(sample.scene)).float(), factor) > 0
    return shapes.any(0).flatten()


def single_shapes(
    world: World, first: int, count: int, lattice: int = 1, size: str | None = None
) -> list[Sample]:
    """The next `count` scenes of one shape, of a size or of any, whose centre is a multiple of
    `lattice` pixels.

    The search starts at scene S·`first`, where S is about the number of scenes to one that fits, so
    the result is pure in its arguments.
    """
    spacing = 2 if lattice <= LATTICE else 2 * (lattice // LATTICE) ** 2
    start = first * (spacing if size is None else 2 * spacing)
    fitting = (i for i in itertools.count(start) if _fits(world.scene(i), lattice, size))
    return [world.sample(index) for index in itertools.islice(fitting, count)]


def _fits(scene: Scene, lattice: int, size: str | None) -> bool:
    """Whether a scene is one for `single_shapes`."""
    first, *others = scene.things
    on_lattice = first.x % lattice == 0 and first.y % lattice == 0
    return not others and on_lattice and size in (None, first.size)
