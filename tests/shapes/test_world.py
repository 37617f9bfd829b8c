"""The shapes world: determinism, captions that read back, images that show what they say."""

import numpy as np
import pytest
from shapes_recipe.scenes import object_masks

from tempera.shapes import world
from tempera.shapes.world import BACKGROUNDS, COLOURS, Scene, Thing, World, parse_caption, render


def test_a_sample_is_a_function_of_seed_and_index() -> None:
    first, again, other = World(3).sample(7), World(3).sample(7), World(4).sample(7)
    assert first.scene == again.scene and np.array_equal(first.image, again.image)
    assert first.scene != other.scene
    assert [s.caption for s in World(3).batch(5, 4)][2] == first.caption


def test_captions_read_back_as_the_scene_they_tell() -> None:
    for sample in World(0).batch(0, 100):
        told = parse_caption(sample.caption)
        assert told is not None and told.caption == sample.caption
        assert [t.shape for t in told.things] == [t.shape for t in sample.scene.things]
        assert told.relation == sample.scene.relation
        assert told.background in ("", sample.scene.background)


def test_free_text_is_outside_the_grammar() -> None:
    assert parse_caption("a photograph of an astronaut riding a horse") is None
    told = parse_caption("A large green star left of a small white ring.")
    assert told is not None
    assert told.things == (Thing("star", "green", "large"), Thing("ring", "white", "small"))


def test_relations_hold_and_things_stay_inside_and_apart() -> None:
    scenes = [World(1).scene(index) for index in range(400)]
    assert {scene.relation for scene in scenes} == {"", *world.RELATIONS}
    assert np.mean([len(scene.things) == 2 for scene in scenes]) == pytest.approx(1 / 3, abs=0.06)
    for scene in scenes:
        for thing in scene.things:
            assert all(thing.radius <= at <= 48 - thing.radius for at in (thing.x, thing.y))
            assert thing.x % 4 == thing.y % 4 == 0
        if scene.relation:
            first, second = scene.things
            dx, dy = second.x - first.x, second.y - first.y
            main, across = (dy, dx) if scene.relation == "above" else (dx, dy)
            assert main >= abs(across)
            assert main >= first.radius + second.radius
    assert all(len(World(1, pairs=0).scene(index).things) == 1 for index in range(20))


def test_pictures_show_the_colours_they_name() -> None:
    thing = Thing("circle", "blue", "large", 24.0, 24.0)
    image = render(Scene((thing,), "", "pink", "plain", seed=5))
    assert image.shape == (48, 48, 3) and image.dtype == np.float32
    assert image.min() >= 0 and image.max() <= 1
    assert np.abs(image[19:29, 19:29].mean((0, 1)) - COLOURS["blue"]).max() < 0.12
    assert np.abs(image[:8, :8].mean((0, 1)) - BACKGROUNDS["pink"]).max() < 0.3


def test_a_shape_is_the_same_wherever_it_stands() -> None:
    """Up to the background and the light: centres are on the tokens' lattice."""
    stars = (Thing("star", "red", "small", x, x) for x in (12, 16))
    (first,), (second,) = (object_masks(Scene((one,))) for one in stars)
    assert first[12, 12] and not first[2, 2]
    assert np.array_equal(first[4:20, 4:20], second[8:24, 8:24])
