"""Chameleon's two published layouts."""

import torch
from tiny_targets import STATES, official_state

from tempera.runtime.huggingface import LlamaConfig
from tempera.targets.chameleon import translate
from tempera.targets.llamagen import GridRotary, LlamaGenConfig
from tempera.targets.rotary import Rotary


def test_model_parallel_norms_are_repeated_for_their_heads() -> None:
    parts = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    name = "model.layers.0.self_attn.q_norm.weight"
    for heads, given, expected in (
        (4, parts, [[1, 2], [1, 2], [3, 4], [3, 4]]),
        (2, parts[0], [[1, 2], [1, 2]]),
        (2, parts, parts.tolist()),  # Hugging Face's current layout
    ):
        assert translate({name: given}, {"num_attention_heads": heads})[name].tolist() == expected


def test_fused_and_separate_meta_projections_load_alike() -> None:
    separate = official_state(*STATES["anole"])
    fused = dict(separate)
    for i in range(2):
        parts = [fused.pop(f"layers.{i}.attention.w{part}.weight") for part in "qkv"]
        fused[f"layers.{i}.attention.wqkv.weight"] = torch.cat(parts)
    one, other = (translate(state, {"num_attention_heads": 2}) for state in (separate, fused))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_rotary_embedding_is_exact_in_a_bfloat16_network() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=rope)
    half, place = torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[9000]])
    cos, sin = Rotary(config).to(torch.bfloat16)(half, place)
    angle = torch.tensor(9000 * 10000.0 ** (-2 / 8), dtype=torch.float64)
    assert abs(cos[0, 0, 1] - angle.cos()) < 4e-3 and abs(sin[0, 0, 1] - angle.sin()) < 4e-3
    grid = GridRotary(LlamaGenConfig(13, 128, 24, 1, 2, (96, 96), 1, num_classes=10))
    for rounded, exact in zip(grid(half, place), grid(half.float(), place), strict=True):
        torch.testing.assert_close(rounded.float(), exact, atol=4e-3, rtol=0)
