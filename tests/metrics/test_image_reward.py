"""ImageReward on a tiny random checkpoint in BLIP's own layout, against a second writing."""

from pathlib import Path

import pytest
import torch
from reference_clip import normalised
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.image_reward import DEVIATION, MEAN, ImageReward

pytestmark = pytest.mark.slow
EDGE, PATCH, WIDE, WORD, LAYERS = 16, 8, 128, 64, 2
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "ring", "star")
PROMPTS = [Prompt("a", "a red ring"), Prompt("b", "a star " + "red " * 60)]


def checkpoint() -> dict[str, Tensor]:
    """Random tensors by the names and shapes of ImageReward.pt, made small."""
    torch.manual_seed(5)
    made: dict[str, Tensor] = {}

    def layer(name: str, into: int, out: int) -> None:
        made[f"{name}.weight"] = torch.randn(out, into) / into**0.5
        made[f"{name}.bias"] = torch.randn(out) * 0.1

    def norm(name: str, width: int) -> None:
        made[f"{name}.weight"] = 1 + 0.1 * torch.randn(width)
        made[f"{name}.bias"] = 0.1 * torch.randn(width)

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    made[f"{vision}.cls_token"] = torch.randn(1, 1, WIDE)
    made[f"{vision}.pos_embed"] = torch.randn(1, 1 + (EDGE // PATCH) ** 2, WIDE)
    made[f"{vision}.patch_embed.proj.weight"] = torch.randn(WIDE, 3, PATCH, PATCH) * 0.1
    made[f"{vision}.patch_embed.proj.bias"] = torch.randn(WIDE)
    for number in range(LAYERS):
        block = f"{vision}.blocks.{number}"
        norm(f"{block}.norm1", WIDE)
        layer(f"{block}.attn.qkv", WIDE, 3 * WIDE)
        layer(f"{block}.attn.proj", WIDE, WIDE)
        norm(f"{block}.norm2", WIDE)
        layer(f"{block}.mlp.fc1", WIDE, 2 * WIDE)
        layer(f"{block}.mlp.fc2", 2 * WIDE, WIDE)
    norm(f"{vision}.norm", WIDE)
    made[f"{text}.embeddings.position_ids"] = torch.arange(40)[None]
    made[f"{text}.embeddings.word_embeddings.weight"] = torch.randn(len(WORDS), WORD)
    made[f"{text}.embeddings.position_embeddings.weight"] = torch.randn(40, WORD)
    norm(f"{text}.embeddings.LayerNorm", WORD)
    for number in range(LAYERS):
        block = f"{text}.encoder.layer.{number}"
        for kind, into in (("attention", WORD), ("crossattention", WIDE)):
            layer(f"{block}.{kind}.self.query", WORD, WORD)
            layer(f"{block}.{kind}.self.key", into, WORD)
            layer(f"{block}.{kind}.self.value", into, WORD)
            layer(f"{block}.{kind}.output.dense", WORD, WORD)
            norm(f"{block}.{kind}.output.LayerNorm", WORD)
        layer(f"{block}.intermediate.dense", WORD, 96)
        layer(f"{block}.output.dense", 96, WORD)
        norm(f"{block}.output.LayerNorm", WORD)
    sizes = (WORD, 9, 7, 5, 3, 1)
    for place, number in enumerate((0, 2, 4, 6, 7)):
        layer(f"mlp.layers.{number}", sizes[place], sizes[place + 1])
    return made


def attend(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None) -> Tensor:
    """Heads of 64 channels; real [B, T] masks keys."""
    query, key, value = (x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (query, key, value))
    weights = query @ key.transpose(2, 3) / 8
    if real is not None:
        weights = weights.masked_fill(~real[:, None, None], float("-inf"))
    return (weights.softmax(-1) @ value).transpose(1, 2).flatten(2)


def reward(pictures: Tensor, ids: Tensor, state: dict[str, Tensor]) -> Tensor:
    """ImageReward from BLIP's tensors."""

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def exact(x: Tensor, name: str, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    patches = normalised(pictures).unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
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
            found = dense(attend(query, key, value, mask), f"{block}.{kind}.output.dense")
            y = exact(y + found, f"{block}.{kind}.output.LayerNorm", 1e-12)
        wide = dense(gelu(dense(y, f"{block}.intermediate.dense")), f"{block}.output.dense")
        y = exact(y + wide, f"{block}.output.LayerNorm", 1e-12)
    z = y[:, 0]
    for number in (0, 2, 4, 6, 7):
        z = dense(z, f"mlp.layers.{number}")
    return (z[:, 0] - MEAN) / DEVIATION


def tokenizer(directory: Path) -> None:
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(directory / "tokenizer.json"))


def test_image_reward(tmp_path: Path) -> None:
    state = checkpoint()
    torch.save(state, tmp_path / "ImageReward.pt")
    tokenizer(tmp_path)
    pictures = torch.randint(0, 256, (2, 3, EDGE, EDGE)).to(torch.uint8)
    ids = torch.zeros(2, 35, dtype=torch.long)
    ids[0, :5] = torch.tensor([2, 4, 5, 6, 3])
    ids[1] = torch.tensor([2, 4, 7, *[5] * 31, 3])  # cut, its end kept
    (score,) = ImageReward(str(tmp_path), str(tmp_path)).load(torch.device("cpu")).scores
    with torch.inference_mode():
        found = score(pictures, PROMPTS)["image_reward"]
    assert torch.allclose(found, reward(pictures, ids, state), atol=1e-4)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    state = checkpoint()
    lacking = {name: one for name, one in state.items() if "crossattention" not in name}
    torch.save(lacking, tmp_path / "ImageReward.pt")
    with pytest.raises(TemperaError, match="does not hold the weights of ImageReward"):
        ImageReward(str(tmp_path)).network()
    torch.save({"other": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    with pytest.raises(TemperaError, match="ImageReward.*it lacks 'blip.visual_encoder.patch_emb"):
        ImageReward(str(tmp_path)).network()
