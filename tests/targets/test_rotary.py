"""Rotary embeddings against their definition."""

import torch

from tempera.targets.llamagen import GridRotary
from tempera.targets.rotary import Rotary, rotate

CPU = torch.device("cpu")


def test_queries_and_keys_meet_at_the_distance_of_their_positions():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    table = Rotary(8, 100.0).table(30, 4, CPU).double()

    def product(first: int, second: int) -> torch.Tensor:
        turned = (
            rotate(x.view(1, 1, 1, 8), table[:, place].view(2, 1, 1, 8))
            for x, place in ((q, first), (k, second))
        )
        return torch.mul(*turned).sum()

    pairs_q, pairs_k = torch.complex(q[:4], q[4:]), torch.complex(k[:4], k[4:])
    angles = 7 * 100.0 ** (-2 * torch.arange(4, dtype=torch.float64) / 8)
    expected = (pairs_q * torch.polar(torch.ones(4).double(), angles) * pairs_k.conj()).real.sum()
    for place in (0, 3, 22):
        torch.testing.assert_close(product(place + 7, place), expected, atol=1e-5, rtol=1e-5)


def test_angles_are_exact_far_from_the_start():
    cos, sin = Rotary(8, 10000.0).table(9001, 1, CPU)[:, 9000]
    angle = torch.tensor(9000 * 10000.0 ** (-2 / 8), dtype=torch.float64)
    assert abs(cos[1] - angle.cos()) < 1e-3 and abs(sin[5] - angle.sin()) < 1e-3
    assert sin[1] == -sin[5]


def test_a_grid_turns_half_of_a_head_by_row_and_half_by_column_and_no_condition():
    table = GridRotary(8, 10000.0, columns=3).table(2 + 6, 2, CPU)
    assert not table[:, :2].any()
    cos = table[0, 2 + 5]  # row 1, column 2
    speeds = torch.tensor([1.0, 10000.0**-0.5])
    torch.testing.assert_close(cos[:4], torch.cat([speeds, 2 * speeds]).cos())


def test_a_partly_turned_head_leaves_the_other_pairs_alone():
    table = Rotary(8, 10000.0, turned=4).table(5, 1, CPU)
    whole = Rotary(4, 10000.0).table(5, 1, CPU)
    pairs = table.unflatten(-1, (2, 4))
    assert torch.equal(pairs[..., :2].flatten(-2), whole)
    assert torch.equal(pairs[..., 2:], torch.tensor([1.0, 0]).view(2, 1, 1, 1).expand(2, 5, 2, 2))
