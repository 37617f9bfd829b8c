"""Emu3's image tokenizer: the official names become Hugging Face's, all of them."""

from pathlib import Path

import torch
from tiny_targets import write_images

from tempera.runtime.huggingface import Emu3VQVAE, Emu3VQVAEConfig
from tempera.runtime.pretrained import recording_taken
from tempera.targets.emu3 import Emu3Tokenizer, load_emu3_tokenizer

SIZES = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "hidden_size": 32}
SIZES |= {"attn_resolutions": [1], "codebook_size": 16}


def test_the_published_layout_decodes_as_hugging_faces(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Emu3Tokenizer(Emu3VQVAE(Emu3VQVAEConfig(**SIZES))).eval()
    write_images(whole, tmp_path / "model.safetensors")
    with recording_taken() as taken:
        lined = load_emu3_tokenizer(str(tmp_path), ["model.safetensors"], "owner/name", SIZES)
    (untold,) = taken
    norm = whole.vq.encoder.norm_out
    assert untold["source"] == str(tmp_path) and untold["values"] == {
        "num_attention_heads": 1,
        "norm_groups": norm.num_groups,
        "norm_eps": norm.eps,
        "hidden_act": "silu",
    }
    codes = torch.randint(16, (2, 3, 5))
    with torch.no_grad():
        wanted = whole.vq.decode(codes[..., :-1])
    assert wanted.shape == (2, 3, 6, 8)
    torch.testing.assert_close(lined.decode_codes(codes), wanted.clamp(-1, 1))
