"""The classes of the shipped MAR: a shape in a colour."""

from pydantic import NonNegativeInt
from typing_extensions import override

from tempera.data.prompts import Count, Prompt
from tempera.errors import TemperaError
from tempera.shapes.world import COLOURS, SHAPES, Thing, parse_caption
from tempera.targets.conditioners import ClassLabels

CLASSES = tuple(Thing(shape, colour).phrase() for shape in SHAPES for colour in COLOURS)
"""Captions by class number: shape by shape, every colour."""


def class_of(caption: str) -> int | None:
    """The class of a caption with a single thing; none for other text."""
    scene = parse_caption(caption)
    if scene is None or len(scene.things) != 1:
        return None
    return CLASSES.index(Thing(scene.things[0].shape, scene.things[0].colour).phrase())


class ShapeLabels(ClassLabels):
    """Reads prompts that name one shape in one colour, or the number of a class."""

    def __init__(self) -> None:
        super().__init__(len(CLASSES))

    @override
    def label(self, prompt: str) -> int | None:
        named = class_of(prompt)
        return super().label(prompt) if named is None else named

    @override
    def refusal(self, where: str) -> TemperaError:
        return TemperaError(
            f"{where}, is not a shape: give one shape in one colour, as in "
            'prompt="a red ring" or data=shape_classes.'
        )


def shape_prompts(limit: Count | None, offset: NonNegativeInt) -> list[Prompt]:
    """Prompt `offset` + i is class i mod 48; ids are shape-07-000 (class, repetition)."""
    count = len(CLASSES)
    numbers = range(offset, offset + (count if limit is None else limit))
    return [
        Prompt(f"shape-{number % count:02d}-{number // count:03d}", CLASSES[number % count])
        for number in numbers
    ]
