import numpy as np
import pytest
import torch
from random_drafts import new_draws

from tempera.decoding.random_streams import Draws, RandomStreams, key, uniforms, unit
from tempera.errors import TemperaError

MASK = (1 << 64) - 1


def splitmix64(seed: int, counter: int) -> int:
    """Steele, Lea and Flood (2014), in Python's integers."""
    z = (seed + counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_draws_are_splitmix64():
    assert (
        splitmix64(0, 1) == 0xE220A8397B1DCDAF
    )  # the generator's published first output for seed 0
    keys = torch.tensor([[0], [key(3, "a")], [-1]])
    draws = uniforms(keys, torch.arange(1, 6))
    for row, name in enumerate(keys.flatten().tolist()):
        expected = [(splitmix64(name & MASK, c) >> 11) * 2.0**-53 for c in range(1, 6)]
        assert draws[row].tolist() == expected


def test_the_largest_draw_is_below_one():
    assert unit(torch.tensor([-1, 0])).tolist() == [1 - 2.0**-53, 0]  # all bits, and none


def test_the_device_is_the_one_that_tensors_name():
    streams = RandomStreams(0, ["a"], "cpu:0")  # as `cuda` is `cuda:0`
    assert streams.device == Draws(streams, 1).next(1).device


def test_a_row_does_not_depend_on_its_batch_or_on_request_sizes():
    alone = new_draws(7, ["b"])
    together = new_draws(7, ["a", "b", "c"])
    one_by_one = torch.cat([alone.next(n) for n in (1, 3, 5000, 11)], 1)
    at_once = together.next(5015)
    assert one_by_one.equal(at_once[1:2])
    assert not at_once[0].equal(at_once[1])
    assert key(0, "a") != key(1, "a") and key(1, "1/a") != key(11, "/a")


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_strides_do_not_change_when_draws_are_computed_anew(rows):
    streams = new_draws(0, [str(row) for row in range(rows)])
    draws = [streams.next(count)[:, first:] for count in (6, 5000, 6, 7) for first in (0, 2)]
    assert {one.stride() for one in draws} == {(1, rows)}


def test_two_rows_may_not_share_an_id():
    with pytest.raises(TemperaError, match="share an id"):
        RandomStreams(0, ["a", "b", "a"])


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_other_libraries_are_seeds(kind):
    expected = RandomStreams([3, 3], ["a", "b"]).keys
    given = [[kind(3), kind(3)]] if kind is torch.tensor else [kind(3), [kind(3)] * 2]
    for seed in given:
        assert RandomStreams(seed, ["a", "b"]).keys.equal(expected), seed
    with pytest.raises(TypeError):
        RandomStreams([3.0, 3.0], ["a", "b"])
