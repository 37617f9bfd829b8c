"""Scenes of the shapes world with a planted defect, one kind in each function: float32 [48, 48, 3],
or None where the scene has no room for it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tempera.shapes.world import (
    COLOURS,
    IMAGE_SIZE,
    SHAPES,
    Image,
    Scene,
    Thing,
    distance,
    render,
)

Defect = Callable[[Scene, np.random.Generator], Image | None]


def fragment(scene: Scene, rng: np.random.Generator) -> Image | None:
    """5×5 pixels of the first shape's colour somewhere in the background."""
    places = _free(scene, 2, rng)
    if not places:
        return None
    x, y = places[0]
    spot = Thing("square", scene.things[0].colour, "large", x, y)
    return _pasted(render(scene), _drawn(scene, *scene.things, spot), _square(x, y))


def second_copy(scene: Scene, rng: np.random.Generator) -> Image | None:
    """The first shape once more."""
    first = scene.things[0]
    places = _free(scene, first.radius, rng)
    if not places:
        return None
    x, y = places[0]
    return _drawn(scene, *scene.things, replace(first, x=x, y=y))


def cut_corner(scene: Scene, rng: np.random.Generator) -> Image:
    """The background in a quarter of the first shape."""
    x, y = _centre(scene)
    right = slice(x, None) if rng.random() < 0.5 else slice(x)
    down = slice(y, None) if rng.random() < 0.5 else slice(y)
    return _pasted(render(scene), _drawn(scene, *scene.things[1:]), (down, right))


def notch(scene: Scene, rng: np.random.Generator) -> Image:
    """5×5 pixels of background at the first shape's outline."""
    inside = distance(scene.things[0])
    y, x = rng.choice(np.argwhere((inside < -1.5) & (inside > -3)))
    return _pasted(render(scene), _drawn(scene, *scene.things[1:]), _square(x, y))


def shifted_half(scene: Scene, rng: np.random.Generator) -> Image:
    """The first shape's right half 4 pixels higher or lower than its left."""
    first, *rest = scene.things
    x, y = _centre(scene)
    moved = replace(first, y=y + (4 if y < 24 else -4))
    half = slice(None), slice(x, x + first.radius + 2)
    return _pasted(render(scene), _drawn(scene, moved, *rest), half)


def missing(scene: Scene, rng: np.random.Generator) -> Image:
    """No first shape."""
    return _drawn(scene, *scene.things[1:])


def wrong_colour(scene: Scene, rng: np.random.Generator) -> Image:
    """The first shape in another colour."""
    first, *rest = scene.things
    others = [colour for colour in COLOURS if colour != first.colour]
    return _drawn(scene, replace(first, colour=others[rng.integers(len(others))]), *rest)


def wrong_shape(scene: Scene, rng: np.random.Generator) -> Image:
    """Another shape in the first one's place."""
    first, *rest = scene.things
    others = [shape for shape in SHAPES if shape != first.shape]
    return _drawn(scene, replace(first, shape=others[rng.integers(len(others))]), *rest)


def no_marks(scene: Scene, rng: np.random.Generator) -> Image | None:
    """No pattern in a quarter of the picture."""
    if scene.pattern == "plain":
        return None
    x, y = rng.integers(2, size=2) * IMAGE_SIZE // 2
    quarter = slice(y, y + IMAGE_SIZE // 2), slice(x, x + IMAGE_SIZE // 2)
    return _pasted(render(scene), render(replace(scene, pattern="plain")), quarter)


def _drawn(scene: Scene, *things: Thing) -> Image:
    """The same background and lighting with other things."""
    return render(replace(scene, things=things))


def _pasted(image: Image, other: Image, area: tuple[slice, slice]) -> Image:
    image[area] = other[area]
    return image


def _square(x: int, y: int) -> tuple[slice, slice]:
    return slice(max(0, y - 2), y + 3), slice(max(0, x - 2), x + 3)


def _centre(scene: Scene) -> tuple[int, int]:
    return int(scene.things[0].x), int(scene.things[0].y)


def _free(scene: Scene, radius: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Places for something of that radius beside all things, shuffled."""
    steps = range(radius + 2, 47 - radius, 2)
    places = [
        (x, y)
        for x in steps
        for y in steps
        if all(
            max(abs(x - thing.x), abs(y - thing.y)) > thing.radius + radius + 1
            for thing in scene.things
        )
    ]
    rng.shuffle(places)
    return places
