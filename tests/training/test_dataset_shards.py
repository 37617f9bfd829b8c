import numpy as np
import pytest
import torch
from tiny_training import tiny_codes

from tempera.data.encoders import VQEncoder
from tempera.data.shards import CodedImages
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.scenes import WorldCodes
from tempera.shapes.world import World
from tempera.training.dataset import ShardCodes


def images_of(keys: list[str]) -> CodedImages:
    return CodedImages(
        keys, [f"caption {key}" for key in keys], np.arange(len(keys), dtype=np.int32)[:, None]
    )


def test_images_are_chosen_by_row() -> None:
    images = images_of(["a", "b", "c"])[[2, 0]]
    assert (images.keys, images.captions) == (["c", "a"], ["caption c", "caption a"])
    assert images.tokens.dtype == torch.int64
    assert images.tokens.tolist() == [[2], [0]]


def test_an_epoch_shows_every_training_image_once_and_no_held_out_one() -> None:
    codes = ShardCodes(images_of([str(i) for i in range(400)]), seed=3)
    held, kept = len(codes.held), len(codes.kept)
    assert held + kept == 400
    assert 8 <= held <= 36
    epochs = [
        codes.train(list(range(epoch * kept, (epoch + 1) * kept))).codes[:, 0].tolist()
        for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(codes.kept.tolist())
    assert not set(epochs[0]) & set(codes.holdout(list(range(held))).codes[:, 0].tolist())
    assert codes.holdout([held]).captions == codes.holdout([0]).captions


def test_the_order_depends_on_the_seed_and_the_number_alone() -> None:
    one, two, other = tiny_codes(), tiny_codes(), ShardCodes(tiny_codes().images, seed=9)
    two.train([500])
    assert one.train([7, 90]).captions == two.train([7, 90]).captions
    assert np.array_equal(one.train([7, 90]).codes, two.train([7, 90]).codes)
    assert not np.array_equal(one.train(list(range(20))).codes, other.train(list(range(20))).codes)
    assert np.array_equal(one.held, other.held)


def test_captions_of_one_image_stay_on_one_side() -> None:
    codes = ShardCodes(images_of([f"{i // 5}#{i}" for i in range(1000)]))
    held = {codes.images.keys[i].partition("#")[0] for i in codes.held}
    assert not held & {codes.images.keys[i].partition("#")[0] for i in codes.kept}


def test_too_few_images() -> None:
    with pytest.raises(TemperaError, match="2 images are too few"):
        ShardCodes(images_of(["1", "2"]))


def test_world_scenes_train_and_hold_out_are_disjoint() -> None:
    torch.manual_seed(0)
    vq = VQModel(VQConfig(64, 4, 32, (1, 1, 1), (1, 1, 1), 1, 32)).eval()
    codes = WorldCodes(VQEncoder(vq, "tok", (16, 16)), seed=4)
    world = World(4)
    assert codes.holdout([0, 1]).captions == [world.sample(i).caption for i in (0, 20)]
    assert codes.train([0, 18, 19]).captions == [world.sample(i).caption for i in (1, 19, 21)]
    assert codes.train([0]).codes.shape == (1, 256)
    assert codes.train([0]).keys == ["1"]
