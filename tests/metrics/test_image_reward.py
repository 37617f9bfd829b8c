"""ImageReward on a tiny random checkpoint in BLIP's own layout, against a second writing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference_clip import normalised
from tiny_metrics import EDGE, LAYERS, PATCH, image_reward_state, image_reward_tokenizer
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import blip, image_reward
from tempera.metrics.image_reward import DEVIATION, MEAN, ImageReward
from tempera.runtime import huggingface

PROMPTS = [Prompt("a", "a red ring"), Prompt("b", "a star " + "red " * 60)]


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


def test_the_shapes_of_the_weights_set_the_sizes() -> None:
    shapes = {
        "visual_encoder.patch_embed.proj.weight": (128, 3, 8, 8),
        "visual_encoder.pos_embed": (1, 1 + 9, 128),
        "visual_encoder.blocks.0.mlp.fc1.weight": (300, 128),
        "visual_encoder.blocks.10.mlp.fc1.weight": (300, 128),
        "text_encoder.embeddings.word_embeddings.weight": (50, 40),
        "text_encoder.embeddings.position_embeddings.weight": (60, 40),
        "text_encoder.encoder.layer.0.intermediate.dense.weight": (70, 40),
        "text_encoder.encoder.layer.2.intermediate.dense.weight": (70, 40),
    }
    state = {f"blip.{name}": torch.empty(shape) for name, shape in shapes.items()}
    vision, text = blip._configurations(state)
    assert (vision.hidden_size, vision.intermediate_size) == (128, 300)
    assert vision.num_hidden_layers == 11
    assert (vision.num_attention_heads, vision.image_size, vision.patch_size) == (2, 24, 8)
    assert vision.layer_norm_eps == 1e-6 and text.is_decoder
    assert (text.vocab_size, text.hidden_size, text.encoder_hidden_size) == (50, 40, 128)
    assert (text.intermediate_size, text.num_hidden_layers) == (70, 3)
    assert (text.num_attention_heads, text.max_position_embeddings) == (1, 60)


def test_names_of_the_picture_encoder_are_those_of_transformers() -> None:
    names = {
        "cls_token": "embeddings.class_embedding",
        "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
        "blocks.3.attn.proj.weight": "encoder.layers.3.self_attn.projection.weight",
        "blocks.3.attn.qkv.weight": "encoder.layers.3.self_attn.qkv.weight",
        "blocks.0.norm2.bias": "encoder.layers.0.layer_norm2.bias",
        "blocks.0.mlp.fc1.bias": "encoder.layers.0.mlp.fc1.bias",
        "norm.weight": "post_layernorm.weight",
    }
    state = {f"blip.visual_encoder.{name}": torch.empty(0) for name in names}
    assert list(blip._vision(state)) == list(names.values())
    kept = {"a.weight": 0, "pooler.weight": 0, "embeddings.position_ids": 0}
    state = {f"blip.text_encoder.{name}": torch.empty(0) for name in kept}
    assert list(blip._text(state)) == ["a.weight"]


def test_the_reward_is_of_the_first_tokens_state() -> None:
    """The text encoder attends to all of the picture encoder's states."""
    states, words = torch.randn(2, 5, 3), {name: torch.ones(2, 7).long()
                                          for name in ("input_ids", "attention_mask")}  # fmt: skip

    def text(**given: Tensor) -> SimpleNamespace:
        assert given["encoder_hidden_states"] is states and given["input_ids"] is words["input_ids"]
        assert given["encoder_attention_mask"].equal(torch.ones(2, 5, dtype=torch.int64))
        return SimpleNamespace(last_hidden_state=torch.arange(42.0).view(2, 7, 3))

    found = blip.text_state(
        lambda images: SimpleNamespace(last_hidden_state=states), text, torch.empty(0), words
    )
    assert found.tolist() == [[0, 1, 2], [21, 22, 23]]


def test_a_reward_is_normalised_and_the_prompt_has_35_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = torch.nn.Linear(3, 2)

    class Network(dict[str, object]):
        def to(self, device: torch.device) -> "Network":
            return self

    def words(texts: list[str], **options: object) -> torch.nn.Module:
        assert texts == [prompt.text for prompt in PROMPTS]
        assert (options["truncation"], options["max_length"]) == (True, 35)
        return torch.nn.Identity()

    def transform(edge: int, is_train: bool) -> object:
        assert edge == 4 and not is_train
        return lambda image: torch.zeros(3, 4, 4)

    vision = SimpleNamespace(config=SimpleNamespace(image_size=4))
    network = Network(vision=vision, text=None, head=head)
    files = [SimpleNamespace(path=lambda name=name: name) for name in ("weights", "tokenizer")]
    made = SimpleNamespace(image_transform=transform)
    monkeypatch.setattr(ImageReward, "network", lambda self: network)
    monkeypatch.setattr(ImageReward, "files", files)
    monkeypatch.setattr(image_reward, "import_open_clip", lambda: made)
    monkeypatch.setattr(image_reward, "text_state", lambda *_: torch.ones(2, 3))

    def tokenizer(tokenizer_file: str, pad_token: str) -> object:
        assert (tokenizer_file, pad_token) == ("tokenizer", "[PAD]")
        return words

    monkeypatch.setattr(huggingface, "PreTrainedTokenizerFast", tokenizer, raising=False)
    (score,) = ImageReward().load(torch.device("cpu")).scores
    found = score(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), PROMPTS)["image_reward"]
    raw = head(torch.ones(2, 3))[:, 0]
    torch.testing.assert_close(found, (raw - 0.16717362830052426) / 1.0333394966054072)


def test_the_networks_are_those_of_the_weights_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ImageReward.pt", "tokenizer.json"):
        (tmp_path / name).touch()
    read = []
    monkeypatch.setattr(image_reward, "read_tensors", lambda path: read.append(path.name) or {})
    made = [torch.nn.Identity() for _ in range(3)]
    monkeypatch.setattr(image_reward, "blip_encoders", lambda *found: made[:2])
    monkeypatch.setattr(image_reward, "linear_chain", lambda *found: made[2])
    network = ImageReward(str(tmp_path), str(tmp_path)).network()
    assert list(network.children()) == made and read == ["ImageReward.pt"]


@pytest.mark.slow
def test_image_reward(tmp_path: Path) -> None:
    state = image_reward_state()
    torch.save(state, tmp_path / "ImageReward.pt")
    image_reward_tokenizer(tmp_path)
    pictures = torch.randint(0, 256, (2, 3, EDGE, EDGE)).to(torch.uint8)
    ids = torch.zeros(2, 35, dtype=torch.long)
    ids[0, :5] = torch.tensor([2, 4, 5, 6, 3])
    ids[1] = torch.tensor([2, 4, 7, *[5] * 31, 3])  # cut, its end kept
    (score,) = ImageReward(str(tmp_path), str(tmp_path)).load(torch.device("cpu")).scores
    with torch.inference_mode():
        found = score(pictures, PROMPTS)["image_reward"]
    assert torch.allclose(found, reward(pictures, ids, state), atol=1e-4)


@pytest.mark.slow
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    state = image_reward_state()
    lacking = {name: one for name, one in state.items() if "crossattention" not in name}
    torch.save(lacking, tmp_path / "ImageReward.pt")
    with pytest.raises(TemperaError, match="does not hold the weights of ImageReward"):
        ImageReward(str(tmp_path)).network()
    torch.save({"other": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    with pytest.raises(TemperaError, match="ImageReward.*it lacks 'blip.visual_encoder.patch_emb"):
        ImageReward(str(tmp_path)).network()
