"""The structure of pictures: planted defects are found, whole scenes are whole."""

from itertools import islice

import numpy as np
import planted_defects
import pytest
import torch
from planted_defects import Defect

from tempera.data.prompts import Prompt
from tempera.shapes.evaluator import structure_scorer
from tempera.shapes.mosaic import Mosaic
from tempera.shapes.structure import BROKEN, structure
from tempera.shapes.world import Image, Scene, Thing, World, parse_caption, render

DEFECTS = [
    planted_defects.fragment,
    planted_defects.second_copy,
    planted_defects.cut_corner,
    planted_defects.notch,
    planted_defects.shifted_half,
    planted_defects.missing,
    planted_defects.wrong_colour,
    planted_defects.wrong_shape,
    planted_defects.no_marks,
]


def decoded(images: list[Image]) -> list[Image]:
    """The images after the tokenizer's round trip."""
    tokenizer = Mosaic()
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        made = tokenizer.decode_codes(tokenizer.encode(2 * pixels - 1))
    return list(((made + 1) / 2).permute(0, 2, 3, 1).numpy())


def told(scene: Scene) -> Scene:
    known = parse_caption(scene.caption)
    assert known is not None
    return known


@pytest.mark.slow
def test_real_scenes_are_whole() -> None:
    """At most 0.5% are broken by the round trip, none as they are rendered."""
    samples = World(7).batch(0, 400)
    rendered = [sample.image for sample in samples]
    captions = [parse_caption(sample.caption) for sample in samples]
    for images, share in ((decoded(rendered), 0.005), (rendered[:100], 0)):
        broken = [structure(*pair).broken for pair in zip(images, captions, strict=False)]
        assert np.mean(broken) <= share
    clouded = World(7, texture="clouds").batch(0, 100)
    fits = [structure(sample.image, told(sample.scene), "clouds") for sample in clouded]
    assert not any(fit.broken for fit in fits)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_planted_defects_are_found(defect: Defect) -> None:
    """At least 98% of each, after the round trip."""
    rng = np.random.default_rng(0)
    world = World(8)
    planted = ((scene, defect(scene, rng)) for scene in map(world.scene, range(1000)))
    with_room = ((scene, image) for scene, image in planted if image is not None)
    scenes, images = zip(*islice(with_room, 150), strict=True)
    found = [
        structure(image, told(scene)).broken
        for scene, image in zip(scenes, decoded(images), strict=True)
    ]
    assert np.mean(found) >= 0.98


def test_what_is_stray_and_what_is_missing() -> None:
    """A whole picture has neither; a fragment is stray where it lies, a notch missing."""
    things = Thing("square", "red", "large", 16, 20), Thing("ring", "blue", "small", 36, 24)
    scene = Scene(things, "left of", "teal", "striped", seed=3)
    whole = structure(render(scene), told(scene))
    assert not whole.broken and whole.unexplained == 0
    assert whole.things == things
    rng = np.random.default_rng(1)
    notched = structure(planted_defects.notch(scene, rng), told(scene))
    assert notched.missing.sum() > BROKEN and notched.stray.sum() == 0
    spotted = planted_defects.fragment(scene, rng)
    assert spotted is not None
    strewn = structure(spotted, told(scene))
    assert strewn.stray.sum() > BROKEN and strewn.missing.sum() == 0
    assert notched.broken and strewn.broken


@pytest.mark.parametrize(
    ("relation", "first", "second"),
    [("left of", (14, 24), (36, 24)), ("above", (24, 14), (24, 36))],
)
def test_shapes_in_the_other_order_are_not_the_captions(
    relation: str, first: tuple[int, int], second: tuple[int, int]
) -> None:
    def scene(square: tuple[int, int], ring: tuple[int, int]) -> Scene:
        things = Thing("square", "red", "small", *square), Thing("ring", "blue", "small", *ring)
        return Scene(things, relation, "teal", "plain", seed=3)

    right = scene(first, second)
    assert not structure(render(right), told(right)).broken
    assert structure(render(scene(second, first)), told(right)).broken


def test_a_shape_off_the_lattice_is_whole() -> None:
    scene = Scene((Thing("ring", "white", "small", 21, 22),), "", "brown", "checkered", seed=1)
    assert structure(render(scene), told(scene)).unexplained == 0


def test_scores_of_pictures() -> None:
    """Of a whole picture, of one that shows another scene, and of a caption of another world."""
    whole, other = World(1).batch(0, 2)
    picture = (255 * whole.image).round().astype(np.uint8).transpose(2, 0, 1)
    captions = [whole.caption, other.caption, "a photo of a cat"]
    prompts = [Prompt(str(place), caption) for place, caption in enumerate(captions)]
    scores = structure_scorer("weave")(torch.from_numpy(np.stack([picture] * 3)), prompts)
    assert scores["broken"][:2].tolist() == [0, 1]
    assert scores["stray"][0] == 0 < scores["stray"][1] + scores["missing"][1]
    assert all(values[2].isnan() for values in scores.values())
