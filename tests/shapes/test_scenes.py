"""Scenes of the world and the target's own images as one training stream."""

from unittest.mock import Mock

import numpy as np
import pytest
from shapes_recipe.mixed import MixedCodes

from tempera.data.shards import CodedImages
from tempera.shapes.scenes import WorldCodes


class Numbered:
    """Images whose code is their number."""

    def __init__(self, name: str) -> None:
        self.name = name

    def train(self, positions: list[int]) -> CodedImages:
        return CodedImages(
            [f"{self.name}-{position}" for position in positions],
            [self.name for _ in positions],
            np.array(positions, np.int32)[:, None],
        )

    def holdout(self, positions: list[int]) -> CodedImages:
        return self.train([-position for position in positions])


def mixed(share: float) -> MixedCodes:
    return MixedCodes(Numbered("world"), Numbered("own"), share)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_every_image_of_both_streams_comes_once_and_in_its_share(share: float) -> None:
    images = mixed(share).train(list(range(40)))
    own = [key for key in images.keys if key.startswith("own")]
    world = [key for key in images.keys if key.startswith("world")]
    assert own == [f"own-{i}" for i in range(round(40 * share))]
    assert world == [f"world-{i}" for i in range(40 - round(40 * share))]
    assert images.captions == [key.split("-")[0] for key in images.keys]
    assert images.codes[:, 0].tolist() == [int(key.split("-")[1]) for key in images.keys]


def test_an_image_depends_on_its_number_alone_and_the_target_s_own_are_held_out() -> None:
    stream = mixed(0.5)
    assert stream.train([7]).keys == [stream.train(list(range(8))).keys[7]]
    assert stream.holdout([3]).keys == ["own--3"]


def test_held_out_scenes_of_the_world_are_not_trained_on() -> None:
    encoder = Mock(encode=lambda entries: Mock(codes=np.zeros((len(entries), 1), np.int32)))
    codes = WorldCodes(encoder)
    keys = codes.train(list(range(38))).keys + codes.holdout([0, 1]).keys
    assert sorted(map(int, keys)) == list(range(40))
