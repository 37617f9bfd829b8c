"""Tiny random checkpoints of published metrics, in their official layouts."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from tempera.metrics import image_reward
from tempera.runtime.tensor_files import renamed

EDGE, PATCH, WIDE, WORD, LAYERS = 16, 8, 128, 64, 2
VISION = {"image_size": EDGE, "patch_size": PATCH, "layers": 2, "width": 16, "head_width": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "layers": 2, "width": 8, "heads": 2}
CLIP = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "ring", "star")


BACK = {
    r"^head\.": "mlp.layers.", r"^text\.": "blip.text_encoder.",
    r"^vision\.": "blip.visual_encoder.", r"embeddings\.class_embedding": "cls_token",
    r"embeddings\.position_embedding$": "pos_embed", r"self_attn\.projection": "attn.proj",
    r"embeddings\.patch_embedding": "patch_embed.proj", r"post_layernorm": "norm",
    r"self_attn": "attn", r"layer_norm(\d)": r"norm\1", r"encoder\.layers": "blocks",
}  # fmt: skip
"""Parts of the names in `Reward`, and those in ImageReward.pt."""


def image_reward_state() -> dict[str, Tensor]:
    """Random tensors by the names in ImageReward.pt, of the sizes that are set."""
    torch.manual_seed(5)
    network = image_reward.Reward()
    for name, weight in network.named_parameters():
        norm = "norm" in name.lower() and name.endswith("weight")
        scale = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.1
        torch.nn.init.normal_(weight, float(norm), scale)
    return renamed(network.state_dict(), BACK)


def shrink_image_reward(patch: pytest.MonkeyPatch) -> None:
    """Make ImageReward's sizes those of `image_reward_state`."""
    vision = {"hidden_size": WIDE, "intermediate_size": 2 * WIDE, "num_attention_heads": WIDE // 64,
              "num_hidden_layers": LAYERS, "image_size": EDGE, "patch_size": PATCH}  # fmt: skip
    text = {"vocab_size": len(WORDS), "hidden_size": WORD, "encoder_hidden_size": WIDE,
            "intermediate_size": 96, "num_hidden_layers": LAYERS,
            "num_attention_heads": WORD // 64, "max_position_embeddings": 40}  # fmt: skip
    patch.setattr(image_reward, "VISION", image_reward.VISION | vision)
    patch.setattr(image_reward, "TEXT", image_reward.TEXT | text)
    patch.setattr(image_reward, "HEAD", (9, 7, 5, 3, 1))


def image_reward_tokenizer(directory: Path) -> None:
    """BERT's tokenizer.json with a vocabulary of eight words."""
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(directory / "tokenizer.json"))


def write_inception(directory: Path) -> Path:
    """Random weights in torch-fidelity's layout, at its sizes."""
    from torch_fidelity import feature_extractor_inceptionv3 as module

    path = directory / "weights-inception-2015-12-05-6726825d.pth"
    torch.manual_seed(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *_: None)
        network = module.FeatureExtractorInceptionV3("any", ["2048"])
    state = {
        name: one + 0.1 * torch.rand_like(one) if "bn" in name and one.is_floating_point() else one
        for name, one in network.state_dict().items()
    }
    torch.save(state, path)
    return path


def tiny_clip(directory: Path, name: str) -> dict[str, Tensor]:
    """Random weights of a tiny architecture, which open_clip then knows by this name."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps(CLIP))
    open_clip.add_model_config(path)
    torch.manual_seed(3)
    made = open_clip.create_model(name, load_weights=False).state_dict()
    return {key: torch.randn_like(one) * 0.3 + one if one.dim() else one
            for key, one in made.items()}  # fmt: skip


def write_clip(directory: Path, state: dict[str, Tensor]) -> None:
    """The model as open_clip saves it: its configuration and its weights."""
    config = {"model_cfg": CLIP, "preprocess_cfg": {}}
    (directory / "open_clip_config.json").write_text(json.dumps(config))
    save_file(state, directory / "open_clip_model.safetensors")
