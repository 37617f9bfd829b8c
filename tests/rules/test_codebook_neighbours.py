import pytest
import torch
from torch.nn.functional import normalize

from tempera.errors import TemperaError
from tempera.rules import codebook_neighbours
from tempera.rules.codebook_neighbours import Neighbours, codebook_hash

CODES = normalize(torch.randn(700, 5, generator=torch.Generator().manual_seed(0)), dim=-1)


@pytest.mark.parametrize("proximity", ["l2", "cosine"])
@pytest.mark.parametrize("size", [5, 40])
def test_nearest_first_and_itself_at_the_front(proximity, size):
    codes = torch.randn(700, size, generator=torch.Generator().manual_seed(1))
    table = Neighbours.build(codes, 6, proximity).table
    unit = normalize(codes, dim=-1)
    for code in range(0, 700, 73):
        l2, cosine = (codes - codes[code]).norm(dim=-1), 1 - unit @ unit[code]
        distance = l2 if proximity == "l2" else cosine
        assert table[code, 0] == code
        torch.testing.assert_close(distance[table[code]], distance.sort().values[:6])


def test_equal_codes_are_ordered_by_index():
    table = Neighbours.build(torch.ones(4, 2), 3).table
    assert table.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1]]
    pairs = CODES.repeat(2, 1)  # each code twice, 700 places apart
    table, nearest = Neighbours.build(pairs, 3).table, Neighbours.build(CODES, 2).table[:, 1]
    assert table[:, 1].equal(torch.arange(1400).roll(700))
    assert table[:, 2].equal(nearest.repeat(2))


def test_random_neighbours_are_different_codes_and_always_the_same(monkeypatch):
    table = Neighbours.build(CODES, 50, "random").table
    assert table[:, 0].equal(torch.arange(700))
    assert all(len(set(row.tolist())) == 50 for row in table)
    assert torch.bincount(table.flatten(), minlength=700).min() > 20
    assert (table[:188] == table[512:]).float().mean() < 0.5  # 512 rows are drawn at once
    monkeypatch.setattr(codebook_neighbours, "_BUILT", {})
    assert table.equal(Neighbours.build(CODES, 50, "random").table)


@pytest.mark.parametrize("k", [0, -1, 701])
def test_impossible_tables_are_refused(k):
    with pytest.raises(TemperaError, match="k=.* a codebook of 700"):
        Neighbours.build(CODES, k)


def test_a_table_is_built_once_in_a_process():
    first = Neighbours.build(CODES, 7)
    assert Neighbours.build(CODES.clone(), 7) is first
    others = [Neighbours.build(CODES, 6), Neighbours.build(CODES, 7, "cosine")]
    others.append(Neighbours.build(-CODES, 7))
    assert len({first, *others}) == 4
    assert repr(first) == f"Neighbours(l2, k=7, codebook={codebook_hash(CODES)})"


def test_the_hash_depends_on_values_and_shape_but_not_on_rounding():
    assert codebook_hash(CODES) == codebook_hash(CODES + 1e-9) == codebook_hash(1e-5 * CODES)
    others = (-CODES, CODES.view(350, 10), CODES[:699], torch.zeros(2, 2))
    assert len({codebook_hash(codes) for codes in (CODES, *others)}) == 5


def test_tokens_beyond_the_codebook_and_too_few():
    neighbours = Neighbours.build(CODES, 3)
    table = neighbours.table_for(torch.zeros(2, 702))
    assert table is neighbours.table_for(torch.zeros(702))
    assert table[:700].equal(neighbours.table)
    assert table[700:, 0].tolist() == [700, 701]
    assert Neighbours.build(CODES, 1).table_for(torch.zeros(702))[700:].tolist() == [[700], [701]]
    with pytest.raises(TemperaError, match="699 tokens, but its image tokenizer has 700 codes"):
        neighbours.table_for(torch.zeros(699))
