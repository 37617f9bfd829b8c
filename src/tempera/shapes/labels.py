"""The classes of the shipped MAR: a shape in a colour."""

import torch
from torch import Tensor, nn

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.shapes.world import COLOURS, SHAPES, parse_caption
from tempera.targets.conditioners import class_number

CLASSES = tuple(
    f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"
    for shape in SHAPES
    for colour in COLOURS
)
"""Captions by class number: shape by shape, every colour."""


def class_of(caption: str) -> int | None:
    """The class of a caption with a single thing; none for other text."""
    scene = parse_caption(caption)
    if scene is None or len(scene.things) != 1:
        return None
    thing = scene.things[0]
    return SHAPES.index(thing.shape) * len(COLOURS) + list(COLOURS).index(thing.colour)


class ShapeLabels(nn.Module):
    """Prompts that name one shape in one colour, or the number of a class."""

    classes = len(CLASSES)

    def check(self, prompts: list[str]) -> None:
        """Raise TemperaError for a prompt that `encode` cannot take."""
        self._labels(prompts)

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Prompts → class numbers int64 [B], and a mask bool [B, 1] that keeps them.

        Raises:
            TemperaError: a prompt is neither a caption of a single thing nor a class's number.
        """
        labels = self._labels(prompts)
        return torch.tensor(labels), torch.ones(len(prompts), 1, dtype=torch.bool)

    def _labels(self, prompts: list[str]) -> list[int]:
        labels = []
        for number, prompt in enumerate(prompts, start=1):
            label = class_of(prompt)
            if label is None:
                label = class_number(prompt, self.classes)
            if label is None:
                raise TemperaError(
                    f"prompt {number} of {len(prompts)}, {prompt[:40]!r}, is no shape: give one "
                    "shape in one colour, as in "
                    'prompt="a red ring" or data=shape_classes.'
                )
            labels.append(label)
        return labels


def shape_prompts(limit: int | None = 64, offset: int = 0) -> list[Prompt]:
    """Prompt `offset` + i is class i mod 48; ids are shape-07-000 (class, repetition)."""
    count = len(CLASSES)
    if offset < 0 or (limit is not None and limit < 1):
        raise TemperaError(
            f"limit={limit} and offset={offset} choose no prompts: give a limit of at least 1 "
            "and an offset of 0 or more."
        )
    numbers = range(offset, offset + (count if limit is None else limit))
    return [
        Prompt(f"shape-{number % count:02d}-{number // count:03d}", CLASSES[number % count])
        for number in numbers
    ]
