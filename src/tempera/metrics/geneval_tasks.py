"""GenEval's tasks (Ghosh et al. 2023): what a prompt asks for, and whether the objects found
fulfil it.

Its 553 prompts have six forms. The request is read from the prompt's form, so GenEval's metadata is
not needed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
)  # fmt: skip
_CLASSES = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
    "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
    "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,"
    "fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,"
    "cake,chair,couch,potted plant,bed,dining table,toilet,tv,laptop,computer mouse,"
    "tv remote,computer keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,"
    "clock,vase,scissors,teddy bear,hair drier,toothbrush"
)
CLASSES = tuple(_CLASSES.split(","))
"""MS-COCO's 80 classes in the order that detectors use, by GenEval's names."""
NUMBERS = {"two": 2, "three": 3, "four": 4}
_THING = rf"an? (?:({'|'.join(COLOURS)}) )?({'|'.join(CLASSES)})"
_PLURAL = rf"({'|'.join(NUMBERS)}) ({'|'.join(CLASSES)})(?:s|es)"


@dataclass(frozen=True)
class Wanted:
    """Objects that a picture must show.

    Attributes:
        name: their class.
        count: how many.
        colour: the colour of all of them.
        relation: their position relative to the object named before them: left of, right of, above
            or below.
    """

    name: str
    count: int = 1
    colour: str | None = None
    relation: str | None = None


@dataclass(frozen=True)
class Task:
    """One of `TASKS` and the objects that it wants; `exactly` forbids more of the last kind."""

    name: str
    wanted: tuple[Wanted, ...]
    exactly: bool = False


@dataclass(frozen=True)
class Found:
    """A detected object: the corners x0, y0, x1, y1 of its box in pixels, its mask [h, w] and its
    score.
    """

    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_]
    score: float


def task_of(prompt: str) -> Task | None:
    """What a prompt asks for; None unless it has one of GenEval's forms."""
    text = " ".join(prompt.split()).removeprefix("a photo of ")
    if match := re.fullmatch(_PLURAL, text):
        return Task("counting", (Wanted(match[2], NUMBERS[match[1]]),), exactly=True)
    if match := re.fullmatch(_THING, text):
        return Task("colors" if match[1] else "single_object", (Wanted(match[2], 1, match[1]),))
    if match := re.fullmatch(rf"{_THING} (and|left of|right of|above|below) {_THING}", text):
        colour, name, relation, other_colour, other = match.groups()
        if relation != "and" and not colour and not other_colour:
            return Task("position", (Wanted(other), Wanted(name, relation=relation)))
        both = (Wanted(name, 1, colour), Wanted(other, 1, other_colour))
        if relation == "and" and bool(colour) == bool(other_colour):
            return Task("color_attr" if colour else "two_object", both)
    return None


def fulfilled(
    task: Task,
    objects: Mapping[str, Sequence[Found]],
    colours: Callable[[Sequence[Found], str], Sequence[str]],
) -> bool:
    """Whether a picture shows what the task wants.

    Args:
        task: the task.
        objects: detected objects by class, highest score first.
        colours: names the colours of objects of a class.
    """
    before: Sequence[Found] = ()
    for wanted in task.wanted:
        found = objects.get(wanted.name, ())
        if task.exactly and len(found) > wanted.count:
            return False
        found = found[: wanted.count]
        if len(found) < wanted.count:
            return False
        if wanted.colour and list(colours(found, wanted.name)) != [wanted.colour] * len(found):
            return False
        if wanted.relation and not all(
            wanted.relation in relations(one, other) for one in found for other in before
        ):
            return False
        before = found
    return True


def relations(one: Found, other: Found, slack: float = 0.1) -> set[str]:
    """The position of `one` relative to `other`. A direction counts if the offset of the centres
    along it, less `slack` times both sizes, is more than half of the whole offset.
    """
    boxes = np.array([one.box, other.box]).reshape(2, 2, 2)
    centres, sizes = boxes.mean(1), np.abs(boxes[:, 1] - boxes[:, 0])
    offset = centres[0] - centres[1]
    clear = np.maximum(np.abs(offset) - slack * sizes.sum(0), 0) * np.sign(offset)
    if np.all(np.abs(clear) < 1e-3):
        return set()
    across, down = clear / np.linalg.norm(offset)
    named = {"left of": -across, "right of": across, "above": -down, "below": down}
    return {name for name, share in named.items() if share > 0.5}
