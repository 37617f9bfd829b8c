"""The shipped tokenizer: its pictures are the world's, a code depends on its own patch."""

import pytest
import torch
from shapes_recipe.scenes import pictures

from tempera.shapes.mosaic import GROUNDS, Mosaic
from tempera.shapes.world import GRAINS, LATTICE, Scene, Thing, World, coverage, render


def test_scenes_come_back() -> None:
    """At 45 dB, and as the same codes: the rest are outlines that one code stands for."""
    tokenizer = Mosaic()
    images = pictures(World(6).batch(0, 100))
    codes = tokenizer.encode(images)
    made = tokenizer.decode_codes(codes)
    assert -10 * torch.log10((made - images).square().mean() / 4) > 44
    assert tokenizer.encode(made).equal(codes)


def test_every_code_is_in_use() -> None:
    tokenizer = Mosaic()
    codes = torch.cat(
        [tokenizer.encode(pictures(World(9).batch(i, 64))) for i in range(0, 1280, 64)]
    )
    assert tokenizer.vocab_size == len(tokenizer.codebook) == 1008
    assert len(codes.unique()) > 1000


def test_a_code_depends_on_its_own_patch() -> None:
    tokenizer = Mosaic()
    images = pictures(World(6).batch(0, 8))
    patch = images[:, :, 8:12, 20:24]
    assert tokenizer.encode(patch)[:, 0, 0].equal(tokenizer.encode(images)[:, 2, 5])


@pytest.mark.parametrize("pattern", ["plain", "striped", "checkered"])
def test_the_background_behind_an_outline_is_that_around_it(pattern: str) -> None:
    """Also in the hole of a ring, and where a pattern's mark begins behind the shape."""
    scene = Scene((Thing("ring", "red", "large", 24, 24),), "", "teal", pattern, seed=2)
    image = torch.from_numpy(render(scene)).permute(2, 0, 1)[None] * 2 - 1
    tokenizer = Mosaic()
    made = tokenizer.decode_codes(tokenizer.encode(image))
    outside = torch.from_numpy(coverage(scene.things[0]) == 0)
    error = (made - image).abs().amax(1)[:, outside]
    assert (error > 0.1).float().mean() < 0.002


def test_a_wrong_code_changes_its_own_patch() -> None:
    """If it is a shape's; one of a background is also what lies beyond the outlines near it."""
    tokenizer = Mosaic()
    codes = tokenizer.encode(pictures(World(6).batch(0, 1)))
    before = tokenizer.decode_codes(codes)
    inside = codes.clone()
    is_shape = (codes >= len(GROUNDS) * len(GRAINS)).nonzero()
    place = is_shape[0]
    inside[tuple(place)] = tokenizer.vocab_size - 1 - codes[tuple(place)] % 8
    changed = (tokenizer.decode_codes(inside) - before).abs().amax(1)
    row, column = (place[1:] * LATTICE).tolist()
    elsewhere = changed.clone()
    elsewhere[:, row : row + LATTICE, column : column + LATTICE] = 0
    assert changed.max() > 0.1 and elsewhere.max() == 0
