"""ImageReward on a tiny random checkpoint in BLIP's own layout, against a second writing."""

from pathlib import Path

import pytest
import torch
from tiny_metrics import (
    EDGE,
    LAYERS,
    PATCH,
    WORD,
    image_reward_state,
    image_reward_tokenizer,
    shrink_image_reward,
)
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from tempera.data.prompts import Prompt
from tempera.metrics.image_reward import DEVIATION, MEAN, ImageReward

BIAS = torch.zeros(2)
MEANS = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
DEVIATIONS = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
PROMPTS = [Prompt("a", "a red ring"), Prompt("b", "a star " + "red " * 60)]


def attend(*parts: Tensor, real: Tensor | None = None) -> Tensor:
    """Queries, keys and values in heads of 64 channels; real [B, T] masks keys."""
    heads = [part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts]
    mask = None if real is None else real[:, None, None]
    return scaled_dot_product_attention(*heads, mask).transpose(1, 2).flatten(2)


def reward(pictures: Tensor, ids: Tensor, state: dict[str, Tensor]) -> Tensor:
    """ImageReward from BLIP's tensors."""

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def exact(x: Tensor, name: str, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    patches = (
        ((pictures / 255 - MEANS) / DEVIATIONS).unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    )
    flat = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    proj = f"{vision}.patch_embed.proj"
    x = linear(flat, state[f"{proj}.weight"].flatten(1), state[f"{proj}.bias"])
    x = torch.cat([state[f"{vision}.cls_token"].expand(len(x), 1, -1), x], 1)
    x = x + state[f"{vision}.pos_embed"]
    for number in range(LAYERS):
        block = f"{vision}.blocks.{number}"
        parts = dense(exact(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv").chunk(3, -1)
        x = x + dense(attend(*parts), f"{block}.attn.proj")
        wide = gelu(dense(exact(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1"))
        x = x + dense(wide, f"{block}.mlp.fc2")
    seen = exact(x, f"{vision}.norm", 1e-6)

    real = ids != 0
    y = state[f"{text}.embeddings.word_embeddings.weight"][ids]
    y = y + state[f"{text}.embeddings.position_embeddings.weight"][: ids.shape[1]]
    y = exact(y, f"{text}.embeddings.LayerNorm", 1e-12)
    for number in range(LAYERS):
        block = f"{text}.encoder.layer.{number}"
        for kind, other, mask in (("attention", None, real), ("crossattention", seen, None)):
            source = y if other is None else other
            query, key, value = (
                dense(z, f"{block}.{kind}.self.{name}")
                for name, z in (("query", y), ("key", source), ("value", source))
            )
            found = dense(attend(query, key, value, real=mask), f"{block}.{kind}.output.dense")
            y = exact(y + found, f"{block}.{kind}.output.LayerNorm", 1e-12)
        wide = dense(gelu(dense(y, f"{block}.intermediate.dense")), f"{block}.output.dense")
        y = exact(y + wide, f"{block}.output.LayerNorm", 1e-12)
    z = y[:, 0]
    for number in (0, 2, 4, 6, 7):
        z = dense(z, f"mlp.layers.{number}")
    return (z[:, 0] - MEAN) / DEVIATION


def test_image_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_image_reward(monkeypatch)
    state = image_reward_state()
    more = {"blip.text_encoder.pooler.dense.bias": torch.ones(WORD), "blip.itm_head.bias": BIAS}
    more["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    torch.save(state | more, tmp_path / "ImageReward.pt")
    image_reward_tokenizer(tmp_path)
    pictures = torch.randint(0, 256, (2, 3, EDGE, EDGE)).to(torch.uint8)
    ids = torch.zeros(2, 35, dtype=torch.long)
    ids[0, :5] = torch.tensor([2, 4, 5, 6, 3])
    ids[1] = torch.tensor([2, 4, 7, *[5] * 31, 3])  # cut, its end kept
    (score,) = ImageReward(str(tmp_path), str(tmp_path)).load(torch.device("cpu")).scores
    with torch.inference_mode():
        found = score(pictures, PROMPTS)["image_reward"]
    assert torch.allclose(found, reward(pictures, ids, state), atol=1e-4)
