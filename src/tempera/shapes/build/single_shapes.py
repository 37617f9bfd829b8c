"""Scenes of one shape, which the shipped MAR and its tokenizer learn from."""

import itertools

import numpy as np
import torch
from torch import Tensor

from tempera.shapes.labels import class_of
from tempera.shapes.world import LATTICE, Sample, Scene, World


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
    fitting = (
        index for index in itertools.count(start) if _fits(world.scene(index), lattice, size)
    )
    return [world.sample(index) for index in itertools.islice(fitting, count)]


def _fits(scene: Scene, lattice: int, size: str | None) -> bool:
    return len(scene.things) == 1 and all(
        thing.x is not None
        and thing.y is not None
        and thing.x % lattice == thing.y % lattice == 0
        and size in (None, thing.size)
        for thing in scene.things
    )


def images_and_classes(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Images float32 [B, 3, 48, 48] in [−1, 1], and their classes int64 [B]."""
    images = (
        torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2 - 1
    )
    return images, torch.tensor([class_of(sample.scene.caption) for sample in samples])
