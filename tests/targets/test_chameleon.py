"""Chameleon's two published layouts."""

import torch
from tiny_targets import STATES, official_state

from tempera.targets.chameleon import translate


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
