"""The VQ tokenizer: shapes, normalised codebook, official layout, errors."""

import pytest
import torch

from tempera.errors import TemperaError
from tempera.vq import VQConfig, VQModel

TINY = VQConfig(
    codebook_size=32, channels=8, encoder_multipliers=(1, 2, 2), decoder_multipliers=(1, 2, 2), res_blocks=1, z_channels=16, norm_groups=4
)


def model() -> VQModel:
    torch.manual_seed(0)
    return VQModel(TINY).eval()


def test_images_become_codes_and_come_back() -> None:
    images = torch.rand(2, 3, 16, 24) * 2 - 1
    codes = model().encode(images)
    assert codes.shape == (2, 4, 6) and codes.dtype == torch.int64
    assert model().decode_codes(codes).shape == images.shape


def test_the_codebook_is_normalised_whenever_it_is_read() -> None:
    vq, images = model(), torch.rand(2, 3, 16, 16)
    codes = vq.encode(images)
    decoded = vq.decode_codes(codes)
    vq.quantize.embedding.weight.data.mul_(torch.rand(32, 1) * 10 + 0.1)
    assert torch.equal(vq.encode(images), codes)
    assert torch.allclose(vq.decode_codes(codes), decoded, atol=1e-5)


def test_nearest_is_the_most_similar_entry() -> None:
    vq = model()
    wanted = torch.tensor([3, 17, 31])
    assert torch.equal(vq.quantize.nearest(5 * vq.quantize.codebook[wanted]), wanted)


def test_an_image_that_does_not_divide_into_patches_is_refused() -> None:
    with pytest.raises(TemperaError, match="multiples of 4"):
        model().encode(torch.zeros(1, 3, 18, 16))


def test_the_default_is_the_official_vq16() -> None:
    with torch.device("meta"):
        state = VQModel(VQConfig()).state_dict()
    assert state["encoder.conv_blocks.4.res.0.nin_shortcut.weight"].shape == (512, 256, 1, 1)
    assert state["decoder.conv_blocks.3.upsample.conv.weight"].shape == (128, 128, 3, 3)
    assert state["quantize.embedding.weight"].shape == (16384, 8)
    assert "encoder.conv_blocks.4.attn.1.proj_out.weight" in state and "decoder.mid.1.q.weight" in state
