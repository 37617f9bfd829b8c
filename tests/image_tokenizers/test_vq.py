"""The VQ tokenizer: shapes, normalised codebook, official layout, errors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tempera.errors import TemperaError
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.image_tokenizers.vq import VQConfig, VQModel, load_vq

LEVELS = {"encoder_multipliers": (1, 2, 2), "decoder_multipliers": (1, 2, 2)}
TINY = VQConfig(32, channels=8, res_blocks=1, z_channels=16, norm_groups=4, **LEVELS)


def model() -> VQModel:
    torch.manual_seed(0)
    return VQModel(TINY).eval()


def test_the_codebook_is_normalised_whenever_it_is_read() -> None:
    vq, images = model(), torch.rand(2, 3, 16, 16)
    codes = vq.encode(images)
    decoded = vq.decode_codes(codes)
    vq.quantize.embedding.weight.data.mul_(torch.rand(32, 1) * 10 + 0.1)
    assert torch.equal(vq.encode(images), codes)
    assert torch.allclose(vq.decode_codes(codes), decoded, atol=1e-5)


def test_an_image_that_does_not_divide_into_patches_is_refused() -> None:
    with pytest.raises(TemperaError, match="multiples of 4"):
        model().encode(torch.zeros(1, 3, 18, 16))


def test_end_of_line_tokens_have_no_pixels() -> None:
    vq = model()
    lined, images = LinedTokenizer(vq), torch.rand(2, 3, 8, 12) * 2 - 1
    codes = lined.encode(images)
    assert codes.shape == (2, 2, 4) and (codes[..., -1] == 32).all() and lined.vocab_size == 33
    assert torch.equal(codes[..., :-1], vq.encode(images))
    assert torch.equal(lined.decode_codes(codes), vq.decode_codes(codes[..., :-1]))
    distances = torch.cdist(lined.codebook, lined.codebook)
    assert distances[32, :32].min() > distances[:32, :32].max()
    assert lined.image_size((2, 4)) == (8, 12) == vq.image_size((2, 3))


# Decoding, from the definition, on official names


def conv(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, w[f"{name}.bias"], padding=weight.shape[-1] // 2)


def norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.group_norm(x, 4, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)


def block(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    h = x
    for i in (1, 2):
        h = conv(w, f"{name}.conv{i}", F.silu(norm(w, f"{name}.norm{i}", h)))
    if f"{name}.nin_shortcut.weight" in w:
        x = conv(w, f"{name}.nin_shortcut", x)
    return x + h


def attention(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    h = norm(w, f"{name}.norm", x)
    q, k, v = (conv(w, f"{name}.{part}", h).flatten(2) for part in "qkv")
    mixed = v @ (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(-1).transpose(1, 2)
    return x + conv(w, f"{name}.proj_out", mixed.view(x.shape))


def decoded(state: dict[str, Tensor], codes: Tensor, vqgan: bool) -> Tensor:
    """LlamaGen's or VQGAN's decoder of three levels and one residual block (two in the decoder), in
    float64.
    """
    w = {name: tensor.double() for name, tensor in state.items()}
    book = w["quantize.embedding.weight"]
    z = (book if vqgan else book / book.norm(dim=1, keepdim=True))[codes].permute(0, 3, 1, 2)
    h = conv(w, "decoder.conv_in", conv(w, "post_quant_conv", z))
    parts = ("block_1", "attn_1", "block_2") if vqgan else ("0", "1", "2")
    for part, apply in zip(parts, (block, attention, block), strict=True):
        h = apply(w, f"decoder.mid.{part}", h)
    for level in range(3):
        name = f"decoder.up.{2 - level}" if vqgan else f"decoder.conv_blocks.{level}"
        for i in range(2):
            h = block(w, f"{name}.{'block' if vqgan else 'res'}.{i}", h)
            if not vqgan and level == 0:
                h = attention(w, f"{name}.attn.{i}", h)
        if level < 2:
            h = conv(w, f"{name}.upsample.conv", h.repeat_interleave(2, 2).repeat_interleave(2, 3))
    return conv(w, "decoder.conv_out", F.silu(norm(w, "decoder.norm_out", h))).clamp(-1, 1)


def vqgan_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names as taming-transformers', written out for three levels without the loader."""
    table = {"mid.0.": "mid.block_1.", "mid.1.": "mid.attn_1.", "mid.2.": "mid.block_2."}
    for ours, theirs in ((0, 2), (1, 1), (2, 0)):
        table |= {f"decoder.conv_blocks.{ours}.res.": f"decoder.up.{theirs}.block."}
        table |= {f"decoder.conv_blocks.{ours}.upsample.": f"decoder.up.{theirs}.upsample."}
        table |= {f"encoder.conv_blocks.{ours}.res.": f"encoder.down.{ours}.block."}
        table |= {f"encoder.conv_blocks.{ours}.downsample.": f"encoder.down.{ours}.downsample."}
    named = {}
    for name, tensor in state.items():
        for ours, theirs in table.items():
            name = name.replace(ours, theirs)
        named[name] = tensor
    return named


def random_state(config: VQConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = VQModel(config).state_dict()
    return {
        name: torch.randn(t.shape, generator=generator) / max(1, t[0].numel()) ** 0.5
        for name, t in state.items()
    }


def test_llamagens_decoder_equals_a_float64_computation(tmp_path: Path) -> None:
    state = random_state(TINY)
    torch.save({"model": state}, tmp_path / "vq.pt")
    vq = load_vq(str(tmp_path), ["vq.pt"], "a/b", config=TINY)
    codes = torch.randint(32, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    assert (vq.decode_codes(codes) - decoded(state, codes, vqgan=False)).abs().max() < 1e-5


@pytest.mark.parametrize("prefix", ["", "model.vqmodel."])
def test_vqgan_loads_from_its_own_names_and_its_decoder_equals_a_float64_computation(
    prefix: str, tmp_path: Path
) -> None:
    config = replace(TINY, normalised=False, level_attention=False)
    state = vqgan_names(random_state(config))
    extra = {"loss.discriminator.main.0.weight": torch.ones(3)}
    named = {prefix + name: tensor for name, tensor in state.items()}
    torch.save({"state_dict": extra | named}, tmp_path / "vqgan.ckpt")
    vq = load_vq(str(tmp_path), ["vqgan.ckpt"], "a/b", "vqgan", config=config)
    codes = torch.randint(32, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    assert (vq.decode_codes(codes) - decoded(state, codes, vqgan=True)).abs().max() < 1e-5
    assert not hasattr(vq.quantize, "codebook_used")


@pytest.mark.parametrize("normalised", [True, False])
def test_the_nearest_code_is_found(normalised: bool) -> None:
    """By the angle if the codebook is normalised, else by distance."""
    vq = VQModel(replace(TINY, normalised=normalised)).eval()
    vectors, book = torch.randn(50, TINY.codebook_dim), vq.quantize.embedding.weight
    sides = map(F.normalize, (vectors, book)) if normalised else (vectors, book)
    assert torch.equal(vq.quantize.nearest(vectors), torch.cdist(*sides).argmin(-1))
