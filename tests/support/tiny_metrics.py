"""Tiny random checkpoints of published metrics, in their official layouts."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from reference_clip import EDGE as CLIP_EDGE
from reference_clip import HEADS as CLIP_HEADS
from reference_clip import PATCH as CLIP_PATCH
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

EDGE, PATCH, WIDE, WORD, LAYERS = 16, 8, 128, 64, 2
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "ring", "star")


def image_reward_state() -> dict[str, Tensor]:
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


def huggingface_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's layout → transformers'."""
    made = {
        "logit_scale": torch.tensor(3.2),
        "text_projection.weight": state["text_projection"].T.contiguous(),
        "visual_projection.weight": state["visual.proj"].T.contiguous(),
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "vision_model.embeddings.class_embedding": state["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": state["visual.conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": state["visual.positional_embedding"],
    }
    norms = {
        "ln_final": "text_model.final_layer_norm",
        "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
    }
    pieces = {
        "attn.out_proj": "self_attn.out_proj",
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    }
    for tower, other in (("transformer", "text_model"), ("visual.transformer", "vision_model")):
        for layer in range(2):
            own, theirs = f"{tower}.resblocks.{layer}", f"{other}.encoder.layers.{layer}"
            norms |= {f"{own}.{a}": f"{theirs}.{b}" for a, b in pieces.items()}
            for kind in ("weight", "bias"):
                parts = state[f"{own}.attn.in_proj_{kind}"].chunk(3)
                for name, part in zip("qkv", parts, strict=True):
                    made[f"{theirs}.self_attn.{name}_proj.{kind}"] = part.contiguous()
    for own, theirs in norms.items():
        for kind in ("weight", "bias"):
            made[f"{theirs}.{kind}"] = state[f"{own}.{kind}"]
    return made


def write_pick_score(directory: Path, state: Mapping[str, Tensor]) -> None:
    """PickScore with the tensors of a CLIP in open_clip's layout."""
    save_file(huggingface_clip(state), directory / "model.safetensors")
    both = {"num_hidden_layers": 2, "num_attention_heads": CLIP_HEADS, "hidden_act": "gelu"}
    config = {
        "model_type": "clip",
        "projection_dim": 12,
        "text_config": {**both, "hidden_size": 8, "intermediate_size": 32, "vocab_size": 49408,
                        "eos_token_id": 49407},
        "vision_config": {**both, "hidden_size": 16, "intermediate_size": 64,
                          "image_size": CLIP_EDGE, "patch_size": CLIP_PATCH},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def write_aesthetic(directory: Path) -> dict[str, Tensor]:
    """Linear layers on embeddings of 12 channels."""
    sizes = [(12, 7), (7, 5), (5, 4), (4, 3), (3, 1)]
    head = {}
    for number, (into, out) in zip((0, 2, 4, 6, 7), sizes, strict=True):
        head[f"layers.{number}.weight"] = torch.randn(out, into)
        head[f"layers.{number}.bias"] = torch.randn(out)
    torch.save(head, directory / "sac+logos+ava1-l14-linearMSE.pth")
    return head


def write_detector(directory: Path) -> Path:
    """A tiny random Mask2Former as transformers saves it."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=8, encoder_layers=1, decoder_layers=2, num_attention_heads=1,
        dim_feedforward=8, num_queries=5, num_labels=80,
        backbone=None, use_pretrained_backbone=False,
    )  # fmt: skip
    torch.manual_seed(0)
    network = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.5)
    network.save_pretrained(directory)
    names = load_file(directory / "model.safetensors")  # as published, not as transformers 5 has it
    swin = "model.pixel_level_module.encoder.encoder.layers.0.blocks.0"
    assert f"{swin}.attention.self.query.weight" in names
    return directory
