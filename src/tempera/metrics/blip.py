"""BLIP's encoders (Li et al. 2022), from weights in its authors' layout, kept by ImageReward."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.metrics.weights import filled, not_of

HEAD = 64
"""Channels per attention head, in both encoders."""
RENAMED = (
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    (r"blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
    (r"blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.\1.layer_norm\2."),
    (r"blocks\.", "encoder.layers."),
    ("norm.", "post_layernorm."),
)
"""BLIP's names of picture-encoder weights and those of transformers; the first match counts."""


def blip_encoders(
    state: Mapping[str, Tensor], path: Path, what: str
) -> tuple[nn.Module, nn.Module]:
    """The picture encoder, and the text encoder that attends to its output.

    Args:
        state: tensors by BLIP's names without the prefix `blip.`; their shapes set the sizes.
        path: the file that they come from, for errors.
        what: what the weights should be, for errors.
    """
    from tempera.runtime.huggingface import BlipTextModel, BlipVisionModel

    try:
        vision, text = _configurations(state)
    except (KeyError, IndexError, ValueError) as missing:
        raise not_of(path, what, f"it lacks {missing}") from None

    def texts() -> nn.Module:
        made: nn.Module = BlipTextModel(text, add_pooling_layer=False)
        return made

    return (
        filled(lambda: BlipVisionModel(vision), _vision(state), path, what),
        filled(texts, _text(state), path, what),
    )


def bert_tokenizer(path: Path) -> Any:
    """The tokenizer of BERT's words, from its tokenizer.json."""
    from tempera.runtime.huggingface import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="[PAD]")


def text_state(vision: Any, text: Any, images: Tensor, words: Mapping[str, Tensor]) -> Tensor:
    """The text encoder's state of the first token of each prompt, [B, D].

    Args:
        vision, text: from `blip_encoders`.
        images: preprocessed pictures, [B, 3, H, W].
        words: `input_ids` and `attention_mask` of the prompts, int64 [B, L].
    """
    states = vision(images).last_hidden_state
    found = text(
        input_ids=words["input_ids"],
        attention_mask=words["attention_mask"],
        encoder_hidden_states=states,
        encoder_attention_mask=states.new_ones(states.shape[:2], dtype=torch.int64),
    )
    first: Tensor = found.last_hidden_state[:, 0]
    return first


def _configurations(state: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Configurations of the picture and the text encoder, from the shapes of the weights."""
    from tempera.runtime.huggingface import BlipTextConfig, BlipVisionConfig

    patch = state["blip.visual_encoder.patch_embed.proj.weight"]
    places = state["blip.visual_encoder.pos_embed"].shape[1] - 1
    words = state["blip.text_encoder.embeddings.word_embeddings.weight"]
    positions = state["blip.text_encoder.embeddings.position_embeddings.weight"]
    wide = state["blip.visual_encoder.blocks.0.mlp.fc1.weight"]
    inner = state["blip.text_encoder.encoder.layer.0.intermediate.dense.weight"]
    vision = BlipVisionConfig(
        hidden_size=len(patch),
        intermediate_size=len(wide),
        num_hidden_layers=_layers(state, r"blip\.visual_encoder\.blocks\.(\d+)\."),
        num_attention_heads=max(1, len(patch) // HEAD),
        image_size=round(places**0.5) * patch.shape[-1],
        patch_size=patch.shape[-1],
        layer_norm_eps=1e-6,  # as in BLIP's own code; transformers' default is 1e-5
    )
    text = BlipTextConfig(
        vocab_size=len(words),
        hidden_size=words.shape[1],
        encoder_hidden_size=len(patch),
        intermediate_size=len(inner),
        num_hidden_layers=_layers(state, r"blip\.text_encoder\.encoder\.layer\.(\d+)\."),
        num_attention_heads=max(1, words.shape[1] // HEAD),
        max_position_embeddings=len(positions),
        is_decoder=True,  # it has cross-attention
    )
    return vision, text


def _layers(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in state if (found := re.match(pattern, name)))


def _vision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {}
    for name, tensor in _inside(state, "blip.visual_encoder.").items():
        for pattern, replacement in RENAMED:
            renamed, count = re.subn(rf"^{pattern}", replacement, name)
            if count:
                break
        own[renamed] = tensor
    return own


def _text(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = _inside(state, "blip.text_encoder.")
    return {
        name: tensor
        for name, tensor in own.items()
        if not name.startswith("pooler.") and not name.endswith("position_ids")
    }


def _inside(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)
    }
