"""LANTERN's Table 4: codes replaced by near ones, reproducibly."""

import pytest
import torch
from torch import Tensor

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method
from tempera.evaluation.token_replacement import Replacing, replacing_pipeline
from tempera.exactness.tables import TableTarget
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.rules.codebook_neighbours import Neighbours

CODES = torch.randint(16, (3, 4, 4), generator=torch.Generator().manual_seed(0))


class Glass:
    """Shows the codes that it is given."""

    def decode_codes(self, codes: Tensor) -> Tensor:
        return codes


def replaced(k: int, seed: int = 0, codes: Tensor = CODES) -> Tensor:
    codebook = torch.arange(16.0).unsqueeze(1)
    return Replacing(Glass(), Neighbours.build(codebook, k).table, seed).decode_codes(codes)


def test_only_near_codes_and_all_of_them() -> None:
    many = CODES.expand(1, -1, -1, -1).flatten(0, 1).repeat(1, 8, 8)
    distance = (replaced(3, codes=many) - many).abs()
    inner = (many > 0) & (many < 15)
    assert set(distance[inner].tolist()) == {0, 1}
    assert float((distance[inner] == 0).float().mean()) == pytest.approx(1 / 3, abs=0.03)


def test_draws_depend_on_the_image_alone() -> None:
    whole = replaced(5)
    assert not whole.equal(CODES) and replaced(1).equal(CODES)
    assert torch.cat([replaced(5, codes=image[None]) for image in CODES]).equal(whole)
    assert not replaced(5, seed=1).equal(whole)


def test_more_neighbours_than_codes() -> None:
    tokenizer = VQModel(VQConfig(32, 4, 8, (1, 1), (1, 1), 1, 8, 4))
    target, method = TableTarget(), Method(None, None)  # type: ignore[arg-type]
    with pytest.raises(TemperaError, match="k=33 nearest codes cannot be taken from a codebook of"):
        replacing_pipeline(target, method, tokenizer, torch.device("cpu"), seed=0, replace=33)
