"""The shapes world: a procedural, seeded, unlimited source of captioned 48×48 scenes.

A scene holds one or two shapes in named colours and two sizes, placed freely or in a relation, on a
plain, striped or checkered background. Its texture is a weave of grains, which suits tokens of a
codebook, or clouds under a lighting gradient, which suit continuous ones. Scene `i` of a world is a
pure function of `(world seed, i)`.
"""

import itertools
import math
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]
Texture = Literal["weave", "clouds"]

IMAGE_SIZE = 48
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.12),
    "green": (0.10, 0.66, 0.18),
    "blue": (0.13, 0.28, 0.90),
    "yellow": (0.97, 0.86, 0.12),
    "purple": (0.56, 0.16, 0.78),
    "orange": (0.98, 0.52, 0.08),
    "white": (0.97, 0.97, 0.97),
    "black": (0.05, 0.05, 0.06),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "teal": (0.16, 0.52, 0.54),
    "pink": (0.93, 0.66, 0.74),
    "gray": (0.52, 0.52, 0.53),
    "brown": (0.45, 0.30, 0.18),
    "olive": (0.52, 0.54, 0.22),
}
PATTERNS = ("plain", "striped", "checkered")
MARKS = 0.68
"""The colour of a pattern's marks is the background's times this."""
SIZES = {"small": 8, "large": 12}
"""Radius in pixels."""
LATTICE = 4
"""Shapes are centred on multiples of this many pixels, the tokenizer's patch: a shape is the same
tokens wherever it stands. Patterns and grains keep to it, too.
"""
RELATIONS = ("above", "left of")

CONNECTIVES = ("a", "an", "on", "background", "of", "left", "above")
WORDS = (*CONNECTIVES, *SIZES, *COLOURS, *SHAPES, *PATTERNS, *BACKGROUNDS)
"""Every word a caption can hold."""


@dataclass(frozen=True)
class Thing:
    """One shape. In parsed captions `size` may be unknown (empty), and its place is (NaN)."""

    shape: str
    colour: str
    size: str = ""
    x: float = math.nan
    y: float = math.nan

    @property
    def radius(self) -> int:
        """In pixels."""
        return SIZES[self.size]

    def phrase(self) -> str:
        """'a small red ring', 'an orange circle'."""
        article = "an" if not self.size and self.colour == "orange" else "a"
        return " ".join(word for word in (article, self.size, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Scene:
    """A scene, or as much of one as a caption tells.

    Attributes:
        things: one or two shapes; with a relation the first is above or left of the second.
        relation: empty for a single shape.
        background, pattern: empty where a caption does not say.
        seed: drives texture and lighting of `render`.
    """

    things: tuple[Thing, ...]
    relation: str = ""
    background: str = ""
    pattern: str = ""
    seed: int = 0

    @property
    def caption(self) -> str:
        """The scene in words, in the one grammar that `parse_caption` reads."""
        text = self.things[0].phrase()
        if self.relation:
            text += f" {self.relation} {self.things[1].phrase()}"
        if self.background:
            article = "an" if not self.pattern and self.background == "olive" else "a"
            words = ["on", article, self.pattern, self.background, "background"]
            text += " " + " ".join(word for word in words if word)
        return text


@dataclass(frozen=True)
class Sample:
    """A captioned image: the full `scene`, the `caption` (which may leave details out) and the
    `image` [48, 48, 3] in [0, 1].
    """

    scene: Scene
    caption: str
    image: Image


_THING = (
    rf"an? (?:(?P<size{{i}}>{'|'.join(SIZES)}) )?"
    rf"(?P<colour{{i}}>{'|'.join(COLOURS)}) (?P<shape{{i}}>{'|'.join(SHAPES)})"
)
_CAPTION = re.compile(
    rf"^{_THING.format(i=1)}(?: (?P<relation>{'|'.join(RELATIONS)}) {_THING.format(i=2)})?"
    rf"(?: on an? (?:(?P<pattern>{'|'.join(PATTERNS)}) )?(?P<background>{'|'.join(BACKGROUNDS)}) "
    r"background)?$"
)


def parse_caption(text: str) -> Scene | None:
    """Read a caption back into the scene it describes; `None` for text outside the grammar."""
    match = _CAPTION.match(" ".join(text.lower().strip(" .").split()))
    if match is None:
        return None
    words = match.groupdict("")
    things = [Thing(words["shape1"], words["colour1"], words["size1"])]
    if words["shape2"]:
        things.append(Thing(words["shape2"], words["colour2"], words["size2"]))
    return Scene(tuple(things), words["relation"], words["background"], words["pattern"])


class World:
    """An unlimited seeded stream of samples.

    Args:
        seed: streams of different seeds share no scene seeds.
        terse: probability that a caption leaves out its background, and independently its sizes.
        pairs: probability that a scene holds two shapes.
        texture: of its pictures.
    """

    def __init__(
        self,
        seed: int = 0,
        terse: float = 0.1,
        pairs: float = 1 / 3,
        texture: Texture = "weave",
    ) -> None:
        self.seed = seed
        self.terse = terse
        self.pairs = pairs
        self.texture: Texture = texture

    def scene(self, index: int) -> Scene:
        """The scene of sample `index`, which is not rendered."""
        return _draw_scene(np.random.default_rng([self.seed, index]), self.pairs)

    def sample(self, index: int) -> Sample:
        """Sample `index`: a pure function of (world seed, index)."""
        rng = np.random.default_rng([self.seed, index])
        scene = _draw_scene(rng, self.pairs)
        described = scene
        if rng.random() < self.terse:
            described = replace(described, background="", pattern="")
        if rng.random() < self.terse:
            things = tuple(replace(thing, size="") for thing in described.things)
            described = replace(described, things=things)
        return Sample(scene, described.caption, render(scene, self.texture))

    def batch(self, first: int, count: int) -> list[Sample]:
        """Samples `first` … `first + count − 1`."""
        return [self.sample(index) for index in range(first, first + count)]


def one_of(
    options: Sequence[str], rng: np.random.Generator, p: Sequence[float] | None = None
) -> str:
    """Draw an option. It is drawn by number: given texts, `Generator.choice` can lose a Ctrl-C."""
    return options[int(rng.choice(len(options), p=p))]


def _draw_scene(rng: np.random.Generator, pairs: float) -> Scene:
    """A scene; of two shapes with probability `pairs`."""
    relation = one_of(RELATIONS, rng) if rng.random() < pairs else ""
    if relation:
        things = _place_pair([_draw_kind(rng), _draw_kind(rng)], relation, rng)
    else:
        kind = _draw_kind(rng)
        reach = _reach(kind)
        x = _between(reach, IMAGE_SIZE - reach, rng)
        y = _between(reach, IMAGE_SIZE - reach, rng)
        things = (replace(kind, x=x, y=y),)
    return Scene(
        things,
        relation,
        background=one_of(list(BACKGROUNDS), rng),
        pattern=one_of(PATTERNS, rng, p=(0.5, 0.25, 0.25)),
        seed=int(rng.integers(2**31)),
    )


def _draw_kind(rng: np.random.Generator) -> Thing:
    """A shape without a place."""
    shape = one_of(SHAPES, rng)
    colour = one_of(list(COLOURS), rng)
    size = one_of(list(SIZES), rng, p=(0.35, 0.65))
    return Thing(shape, colour, size)


def _reach(kind: Thing) -> int:
    """The radius, rounded up to the lattice."""
    return -(-kind.radius // LATTICE) * LATTICE


def _between(low: int, high: int, rng: np.random.Generator) -> int:
    """A multiple of the lattice in [low, high], which are multiples themselves."""
    return LATTICE * int(rng.integers(low // LATTICE, high // LATTICE + 1))


def _place_pair(kinds: list[Thing], relation: str, rng: np.random.Generator) -> tuple[Thing, ...]:
    """Two shapes in order along the relation's axis, without overlap, near the middle across it."""
    first, second = (_reach(kind) for kind in kinds)
    lead = _between(first, IMAGE_SIZE - first - 2 * second, rng)
    follow = _between(lead + first + second, IMAGE_SIZE - second, rng)
    along = [lead, follow]
    across = [_between(16, 32, rng) for _ in kinds]
    xs, ys = (across, along) if relation == "above" else (along, across)
    return tuple(replace(kind, x=x, y=y) for kind, x, y in zip(kinds, xs, ys, strict=True))


_Y, _X = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE].astype(np.float32) + np.float32(0.5)
"""The rows and columns of the pixels' centres, [48, 48] each."""


def render(scene: Scene, texture: Texture = "weave") -> Image:
    """Generate a fully specified scene: float32 [48, 48, 3] in [0, 1]."""
    rng = np.random.default_rng(scene.seed)
    image = _background(scene.background, scene.pattern, rng)
    for thing in scene.things:
        covered = coverage(thing)[..., None]
        image = image * (1 - covered) + np.array(COLOURS[thing.colour], np.float32) * covered
    textured = _woven(image, scene, rng) if texture == "weave" else _clouded(image, rng)
    return np.asarray(np.clip(textured, 0, 1), np.float32)


def coverage(thing: Thing) -> Image:
    """The share of every pixel that a thing covers, [48, 48]."""
    return np.asarray(np.clip(0.5 - distance(thing), 0, 1))


def _background(colour: str, pattern: str, rng: np.random.Generator) -> Image:
    """A background, its pattern's marks darker, float32 [48, 48, 3]."""
    base = np.array(BACKGROUNDS[colour], np.float32)
    right, down = LATTICE * rng.integers(0, 4, 2)
    return np.asarray(base * (1 - (1 - MARKS) * marks(pattern, right, down)[..., None]), np.float32)


def marks(pattern: str, right: int, down: int) -> NDArray[np.bool_]:
    """Where a pattern that begins so many pixels earlier has its marks, [48, 48]."""
    columns: NDArray[np.bool_] = (_X + right) // 8 % 2 == 1
    rows: NDArray[np.bool_] = (_Y + down) // 8 % 2 == 1
    nothing = np.zeros_like(columns)
    return {"plain": nothing, "striped": columns, "checkered": columns ^ rows}[pattern]


_WALSH = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, -1, 1], [1, -1, 1, -1]], np.float32)
_WAVES = [np.outer(_WALSH[i], _WALSH[j]) for i, j in ((0, 1), (1, 0), (1, 1), (0, 2))]
GRAINS = 0.05 * np.stack([sign * wave for wave in _WAVES for sign in (1, -1)])
"""The brightness that each grain adds to a patch, [G, 4, 4]: light and dark halves and quarters."""
WEAVE = np.random.default_rng(7).dirichlet([3.0] * len(GRAINS), (len(GRAINS), len(GRAINS)))
"""The probabilities of a patch's grain after that above it and that on its left, [G, G, G]."""
_THRESHOLDS = WEAVE.cumsum(-1)[..., :-1].tolist()


def _woven(image: Image, scene: Scene, rng: np.random.Generator) -> Image:
    """Add a grain to every patch of one colour.

    A grain is chance, and says nothing about the rest of the image: several codes could stand at
    almost every place, the ambiguity of real images, and a wrong one does no harm.
    """
    side = IMAGE_SIZE // LATTICE
    chances = rng.random((side, side)).tolist()
    weave = rng.integers(len(GRAINS), size=(side + 1, side + 1)).tolist()
    for row, column in itertools.product(range(side), range(side)):
        thresholds = _THRESHOLDS[weave[row][column + 1]][weave[row + 1][column]]
        weave[row + 1][column + 1] = bisect(thresholds, chances[row][column])
    grains = GRAINS[np.array(weave)[1:, 1:]]
    for thing in scene.things:
        covered = patches_of(coverage(thing))
        grains[covered.min((2, 3)) < covered.max((2, 3))] = 0
    woven: Image = image + grains.swapaxes(1, 2).reshape(IMAGE_SIZE, IMAGE_SIZE, 1)
    return woven


def patches_of(pixels: Image) -> Image:
    """The patches of the lattice: [48, 48] → [12, 12, 4, 4]."""
    side = len(pixels) // LATTICE
    return pixels.reshape(side, LATTICE, side, LATTICE).swapaxes(1, 2)


OCTAVES = ((3, 0.07), (6, 0.05), (12, 0.015))
"""Of the clouds: cells along a side, and strength in units of brightness."""
NOISE = 0.008
"""Strength of the noise of single pixels."""


def _clouded(image: Image, rng: np.random.Generator) -> Image:
    """Add a lighting gradient, octaves of smooth value noise and a fine noise."""
    angle = rng.uniform(0, 2 * np.pi)
    right = np.cos(angle) * (_X / IMAGE_SIZE - 0.5)
    down = np.sin(angle) * (_Y / IMAGE_SIZE - 0.5)
    ramp = (right + down) * rng.uniform(0.1, 0.3)
    noise = rng.normal(0, NOISE, (IMAGE_SIZE, IMAGE_SIZE))
    for cells, strength in OCTAVES:
        grid = rng.normal(0, strength, (cells + 1, cells + 1))
        at = np.linspace(0, cells, IMAGE_SIZE, endpoint=False)
        low = at.astype(int)
        part = (at - low) ** 2 * (3 - 2 * (at - low))
        rows = grid[low] * (1 - part)[:, None] + grid[low + 1] * part[:, None]
        noise += rows[:, low] * (1 - part) + rows[:, low + 1] * part
    clouded: Image = image * (1 + ramp)[..., None] + noise.astype(np.float32)[..., None]
    return clouded


def distance(thing: Thing) -> Image:
    """Signed distance in pixels to the thing's outline, negative inside."""
    x = _X - thing.x
    y = _Y - thing.y
    radius = thing.radius
    if thing.shape == "circle":
        return np.asarray(np.hypot(x, y) - 0.95 * radius)
    if thing.shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.84 * radius)
    if thing.shape == "ring":
        return np.asarray(np.abs(np.hypot(x, y) - 0.72 * radius) - 0.25 * radius)
    if thing.shape == "cross":
        wide = np.maximum(np.abs(x) - radius, np.abs(y) - 0.34 * radius)
        tall = np.maximum(np.abs(y) - radius, np.abs(x) - 0.34 * radius)
        return np.asarray(np.minimum(wide, tall))
    if thing.shape == "triangle":
        corners = [(0.0, -0.98), (0.98, 0.8), (-0.98, 0.8)]
        return _polygon(x, y, [(radius * along, radius * down) for along, down in corners])
    turns = np.arange(10) * np.pi / 5 - np.pi / 2
    reach = np.where(np.arange(10) % 2 == 0, 1.05, 0.45) * radius
    return _polygon(x, y, list(zip(reach * np.cos(turns), reach * np.sin(turns), strict=True)))


def _polygon(x: Image, y: Image, corners: list[tuple[float, float]]) -> Image:
    """Signed distance to a polygon (even-odd inside test)."""
    nearest = np.full_like(x, np.inf)
    inside = np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        ex, ey = bx - ax, by - ay
        along = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, np.hypot(x - ax - along * ex, y - ay - along * ey))
        if ey:
            inside ^= ((ay > y) != (by > y)) & (x < ax + ex * (y - ay) / ey)
    return np.asarray(np.where(inside, -nearest, nearest))
