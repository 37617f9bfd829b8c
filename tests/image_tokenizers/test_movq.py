"""MoVQ's image tokenizer against the two-dimensional part of transformers' Emu3 decoder, which is
MoVQ's, under MoVQGAN's names; and Lumina-mGPT 2.0's prompts.
"""

import json
from pathlib import Path

import torch
from tiny_networks import lively
from tiny_targets import emu3_names
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tempera.image_tokenizers.vq import MOVQ, VQConfig, VQModel, from_vqgan
from tempera.runtime.huggingface import Emu3VQVAEConfig
from tempera.targets.chameleon import lumina2
from tempera.targets.prompt_encoder import load_prompts


def test_pictures_are_those_of_transformers() -> None:
    from transformers.models.emu3.modeling_emu3 import Emu3VQVAEDecoder

    config = Emu3VQVAEConfig(
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        attn_resolutions=[1],
        embed_dim=4,
        latent_channels=4,
        hidden_size=64,
        num_attention_heads=1,
        attn_implementation="sdpa",
    )
    theirs = lively(Emu3VQVAEDecoder(config))
    sizes = VQConfig(24, 4, 32, (1, 2), (1, 2), 1, 4, normalised=False, spatial_norms=True)
    ours = lively(VQModel(sizes), 1)
    names = {f"decoder.{name}": tensor for name, tensor in theirs.state_dict().items()}
    official = {name: tensor for name, tensor in emu3_names(names).items() if ".time_" not in name}
    state = {name: tensor for name, tensor in ours.state_dict().items() if "decoder." not in name}
    ours.load_state_dict({**state, **from_vqgan(official, 2)})
    codes = torch.randint(24, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    vectors = ours.codebook[codes].permute(0, 3, 1, 2)
    with torch.no_grad():
        x = theirs.middle_block(theirs.conv_in(ours.post_quant_conv(vectors)), vectors)
        x = theirs.norm_out(theirs.up_block(x, vectors), vectors)
        expected = theirs.conv_out(torch.nn.functional.silu(x))
        found = ours.decode_latents(ours.codebook[codes])
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_published_sizes() -> None:
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in VQModel(MOVQ).parameters())
    assert weights // 10**6 == 270
    assert MOVQ.factor == 8


def test_prompts_begin_with_the_tokenizers_end_of_text(tmp_path: Path) -> None:
    size = "<reserved08824>"
    words = ["<unk>", "<end>", "<reserved08706>", "<racm3:break>", size, "Generate", "cat"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    encoder = load_prompts(lumina2(), str(tmp_path), ["tokenizer.json"], "hub")
    ids, _ = encoder.encode(["a cat"])
    prompt, null = ids[0].tolist()
    assert prompt[:2] == [1, 5] and prompt[-5:] == [6, 2, 3, 4, 4]
    assert [token for token in null if token >= 0] == [3, 4, 4]
