import hashlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import normalize

from tempera.errors import TemperaError
from tempera.rules.codebook_neighbours import Neighbours, codebook_hash, ranked

CODES = normalize(torch.randn(700, 5, generator=torch.Generator().manual_seed(0)), dim=-1)


@pytest.mark.parametrize("proximity", ["l2", "cosine"])
@pytest.mark.parametrize("size", [5, 40])
def test_nearest_first_and_itself_at_the_front(proximity, size):
    codes = torch.randn(700, size, generator=torch.Generator().manual_seed(1))
    table = Neighbours.build(codes, 6, proximity).table
    assert table.shape == (700, 6)
    assert table[:, 0].equal(torch.arange(700))
    unit = normalize(codes, dim=-1)
    for code in (0, 511, 512, 699):
        distance = (
            (codes - codes[code]).norm(dim=-1) if proximity == "l2" else 1 - unit @ unit[code]
        )
        assert set(table[code].tolist()) == set(distance.argsort()[:6].tolist())
        assert distance[table[code]].diff().ge(-1e-6).all()


def test_proximities_differ_where_norms_do():
    codes = torch.tensor([[1.0, 0.0], [5.0, 0.1], [0.8, 0.6]])
    assert Neighbours.build(codes, 2, "l2").table[0].tolist() == [0, 2]
    assert Neighbours.build(codes, 2, "cosine").table[0].tolist() == [0, 1]


def test_equal_codes_are_ordered_by_index():
    table = Neighbours.build(torch.ones(4, 2), 3).table
    assert table.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1]]


def test_a_code_by_its_place_in_the_order_of_distance():
    codebook = torch.tensor([0.0, 1.0, 3.0, 7.0]).unsqueeze(1)
    assert ranked(codebook, 0).tolist() == [0, 1, 2, 3]
    assert ranked(codebook, 1).tolist() == [1, 0, 1, 2]
    assert ranked(codebook, 3).equal(ranked(codebook, -1))
    assert ranked(codebook, -1).tolist() == [3, 3, 3, 0]
    assert ranked(codebook, -4).tolist() == [0, 1, 2, 3]
    for rank in (4, -5):
        with pytest.raises(TemperaError, match=f"rank={rank} is no place among 4 codes"):
            ranked(codebook, rank)


def test_a_place_in_the_order_of_a_large_codebook_is_a_column_of_its_table():
    table = Neighbours.build(CODES, 700).table
    for rank in (0, 1, 699):
        assert ranked(CODES, rank).equal(table[:, rank])


def test_random_neighbours_are_different_codes_and_always_the_same():
    table = Neighbours.build(CODES, 50, "random").table
    assert table.equal(Neighbours.build(CODES, 50, "random").table)
    assert table[:, 0].equal(torch.arange(700))
    assert all(len(set(row.tolist())) == 50 for row in table)
    assert torch.bincount(table.flatten(), minlength=700).min() > 20
    assert not table[:, 1:].equal(Neighbours.build(CODES, 50).table[:, 1:])


@pytest.mark.parametrize("k", [0, -1, 701])
def test_k_must_fit_the_codebook(k):
    with pytest.raises(
        TemperaError, match=f"k={k} .* a codebook of 700; give a k between 1 and 700"
    ):
        Neighbours.build(CODES, k)


def test_an_unknown_proximity():
    with pytest.raises(
        TemperaError, match="proximity=l1 is not known; choose one of l2, cosine, random"
    ):
        Neighbours.build(CODES, 2, "l1")


def test_tables_are_built_once_and_then_read(tmp_path, monkeypatch):
    first = Neighbours.provide(CODES, 7, directory=tmp_path)
    path = tmp_path / "l2_7.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"codebook": codebook_hash(CODES), "proximity": "l2", "k": "7"}
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(Neighbours, "build", None)
    again = Neighbours.provide(CODES, 7, directory=tmp_path)
    assert again.table.equal(first.table)
    assert again.table.dtype == torch.int64
    assert again == first
    assert hash(again) == hash(first)
    assert repr(again) == f"Neighbours(l2, k=7, codebook={codebook_hash(CODES)})"


def test_the_default_directory_is_named_by_the_codebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Neighbours.provide(CODES, 2)
    Neighbours.provide(-CODES, 2)
    assert len(list((tmp_path / "outputs/neighbours").glob("*/l2_2.safetensors"))) == 2


def test_neighbours_of_another_codebook_are_refused(tmp_path):
    Neighbours.provide(CODES, 7, directory=tmp_path)
    with pytest.raises(
        TemperaError, match="built for another codebook .*another directory"
    ) as message:
        Neighbours.provide(CODES.flip(0), 7, directory=tmp_path)
    assert str(tmp_path / "l2_7.safetensors") in str(message.value)
    assert "\n" not in str(message.value)


def test_a_file_under_a_wrong_name_is_refused(tmp_path):
    Neighbours.provide(CODES, 7, directory=tmp_path)
    (tmp_path / "l2_7.safetensors").rename(tmp_path / "l2_8.safetensors")
    with pytest.raises(
        TemperaError, match="does not hold the 8 nearest codes by proximity=l2; delete it"
    ):
        Neighbours.provide(CODES, 8, directory=tmp_path)
    (tmp_path / "l2_8.safetensors").rename(tmp_path / "cosine_7.safetensors")
    with pytest.raises(TemperaError, match="proximity=cosine"):
        Neighbours.provide(CODES, 7, "cosine", tmp_path)


def test_a_damaged_file_and_an_unwritable_directory(tmp_path):
    (tmp_path / "l2_7.safetensors").write_bytes(b"damaged")
    with pytest.raises(TemperaError, match="is no table of neighbours .* delete it"):
        Neighbours.provide(CODES, 7, directory=tmp_path)
    with pytest.raises(TemperaError, match="cannot write"):
        Neighbours.provide(CODES, 7, directory=tmp_path / "l2_7.safetensors" / "below")


def test_the_hash_depends_on_values_and_shape_but_not_on_rounding():
    assert codebook_hash(CODES) == codebook_hash(CODES + 1e-9) == codebook_hash(1e-5 * CODES)
    assert (
        len({codebook_hash(codes) for codes in (CODES, -CODES, CODES.view(350, 10), CODES[:699])})
        == 4
    )


def test_the_hash_is_that_of_the_shape_and_of_thousandths_of_the_largest_value():
    """Stored tables are found by it."""
    for codes, thousandths in (
        ([[1.0, 0.0], [-0.5, 0.2504]], [[1000, 0], [-500, 250]]),
        ([[0.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]]),
    ):
        content = b"(2, 2)" + np.array(thousandths, np.int64).tobytes()
        expected = hashlib.sha256(content).hexdigest()[:16]
        assert codebook_hash(torch.tensor(codes)) == expected


def test_tokens_beyond_the_codebook_and_too_few():
    neighbours = Neighbours.build(CODES, 3)
    p = torch.zeros(2, 702)
    table = neighbours.of(p)
    assert table is neighbours.of(p)
    assert table.shape == (702, 3)
    assert table[:700].equal(neighbours.table)
    assert table[700:].tolist() == [[700, 0, 1], [701, 0, 1]]
    assert Neighbours.build(CODES, 1).of(p)[700:].tolist() == [[700], [701]]
    with pytest.raises(
        TemperaError, match="the model has 699 tokens, its image tokenizer 700 codes"
    ):
        neighbours.of(torch.zeros(699))
