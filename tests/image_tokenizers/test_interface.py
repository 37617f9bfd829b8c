"""What every image tokenizer has, and the refusals of those without a codebook or an encoder."""

from collections.abc import Callable

import pytest
import torch

from tempera.errors import TemperaError
from tempera.image_tokenizers.cosmos import load_cosmos
from tempera.image_tokenizers.interface import ImageTokenizer, to_images, to_pictures
from tempera.targets.glm_image import PARTS, GlmDecoder, GlmDecoderConfig, load_glm_decoder

Make = Callable[[], ImageTokenizer]


def cosmos() -> ImageTokenizer:
    return load_cosmos("random", ["decoder.jit", "encoder.jit"], "hub", codes=24)


def glm() -> ImageTokenizer:
    pipeline = torch.nn.ModuleDict({part: torch.nn.Identity() for part in PARTS})
    return GlmDecoder(pipeline, GlmDecoderConfig(24))


def untrained_glm() -> ImageTokenizer:
    return load_glm_decoder("random", "hub", codes=24)


@pytest.mark.parametrize("make", [cosmos, glm, untrained_glm])
def test_without_a_codebook_rules_that_compare_codes_are_refused(make: Make) -> None:
    with pytest.raises(TemperaError, match="no codebook.* choose a rule without") as refusal:
        _ = make().codebook
    assert refusal.value.option == "rule"


@pytest.mark.parametrize("make", [glm, untrained_glm])
def test_a_decoder_alone_refuses_to_encode(make: Make) -> None:
    with pytest.raises(TemperaError, match="no encoder: choose encoder=target") as refusal:
        make().encode(torch.zeros(1, 3, 32, 32))
    assert refusal.value.option == "encoder"


def test_every_picture_is_the_image_that_it_was_made_of() -> None:
    pictures = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(torch.from_numpy(to_pictures(to_images(pictures))), pictures)
    assert to_pictures(torch.tensor([-2.0, 2.0])).tolist() == [0, 255]
