"""Chameleon (Chameleon team 2024) and its descendants that generate: Lumina-mGPT (Liu et al. 2024)
and Anole (Chern et al. 2024).

The transformer is Hugging Face's inner model; its `ForConditionalGeneration` would set the logits
of image tokens to −∞. Facts about the vocabulary are from Meta's Chameleon repository: `<s>` 0,
`<pad>` 1, image codes 4 … 8195 in order, `<eoss>` (end of image) 8196, `<racm3:break>` (start of
image) 8197, `<reserved08706>` (end of turn) 8710. Those of the prompts are from the Lumina-mGPT and
Anole repositories.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime.huggingface import ChameleonConfig, ChameleonDecoderLayer, ChameleonModel
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.targets.llamagen import LAYER_KEYS, permute_pairs
from tempera.targets.network import DecoderLayer
from tempera.targets.rotary import Rotary
from tempera.targets.shared_vocabulary import SharedVocabularyLM
from tempera.targets.token_format import ModelSpec, patches

PATCH = 16
"""Pixels of a code along each side."""

_BEGIN, _START, _END, _TURN = 0, 8197, 8196, 8710


def lumina(height: int = 768, width: int = 768) -> ModelSpec:
    """Lumina-mGPT's format: the size stands in the prompt and, as two ids of 32-pixel steps, after
    the start of the image; lines end with `<reserved08799>`. The unconditional row starts at the
    start of the image.
    """
    size: list[int] = [
        8804 + patches(pixels, 2 * PATCH, name)
        for pixels, name in ((height, "height"), (width, "width"))
    ]
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{{text}}"
    prompt: tuple[int | str, ...] = (_BEGIN, text, _TURN, _START, *size)
    null = (_START, *size)
    return ModelSpec(
        height // PATCH,
        width // PATCH,
        8192,
        first_code=4,
        prompt=prompt,
        null=null,
        context=10240,
        line_end=8803,
        end=(_END,),
    )


def anole() -> ModelSpec:
    """Anole's format: images of 512×512 pixels without ends of lines. With text alone in the
    prompt, Chameleon's guidance by text and image is guidance by text, from a row that is `<s>` and
    the start of the image.
    """
    prompt = (_BEGIN, "{text}", _TURN, _START)
    return ModelSpec(
        32,
        32,
        codes=8192,
        first_code=4,
        prompt=prompt,
        null=(_BEGIN, _START),
        context=4096,
        end=(_END,),
    )


def load_chameleon(
    spec: ModelSpec,
    weights: str,
    files: list[str],
    hub: str,
    vocab_size: int = 65536,
    hidden_size: int = 4096,
    intermediate_size: int = 11008,
    num_hidden_layers: int = 32,
    num_attention_heads: int = 32,
    rope_theta: float = 10000.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> SharedVocabularyLM:
    """A Chameleon with published weights, of the 7B's sizes unless others are given.

    Args:
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`; files in Hugging
            Face's layout or in Meta's.
        device, dtype: where and as what random weights are made; published ones stay as they are in
            their files.
    """
    config = ChameleonConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        vocabulary_map={},
        attn_implementation="sdpa",
    )
    return load_pretrained(
        lambda: _network(config, spec),
        PretrainedFiles(weights, files, hub),
        lambda state: from_official(state, num_attention_heads),
        device,
        dtype,
        ignore=("model.vqmodel.", "rope."),
    )


def _network(config: Any, spec: ModelSpec) -> SharedVocabularyLM:
    model = ChameleonModel(config)
    del model.vqmodel  # the image tokenizer is ours, with a decoder
    model.rotary_emb = Rotary.of(config)
    return SharedVocabularyLM(model, config, spec, family="chameleon")


_LAYER_KEYS = {**LAYER_KEYS, "attention.wv.weight": "self_attn.v_proj.weight"}
_TOP_KEYS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def from_official(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Translate published weights into Hugging Face's present layout; unknown names are kept, so
    that they are told.

    Two layouts are known. Hugging Face's of 2024 (Lumina-mGPT) has norms of queries and keys
    [model_parallel, head_dim], of which each row serves the heads of one part: it is repeated.
    Meta's (Anole, Chameleon) has interleaved rotary pairs, and one norm for all heads.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            result |= {
                f"model.layers.{layer}.{key}": value
                for key, value in _from_meta(rest, tensor, heads)
            }
        else:
            result[_TOP_KEYS.get(name, name)] = tensor
    for name, tensor in result.items():
        if ".self_attn.q_norm." in name or ".self_attn.k_norm." in name:
            rows = tensor.reshape(-1, tensor.shape[-1])
            result[name] = rows.repeat_interleave(max(1, heads // len(rows)), 0)
    return result


def _from_meta(name: str, tensor: Tensor, heads: int) -> Sequence[tuple[str, Tensor]]:
    """One tensor of a layer in Meta's layout, as those of Hugging Face's."""
    if name == "attention.wqkv.weight":
        parts = tensor.chunk(3)
        return [
            pair
            for part, key in zip("qkv", parts, strict=True)
            for pair in _from_meta(f"attention.w{part}.weight", key, heads)
        ]
    if name in ("attention.wq.weight", "attention.wk.weight"):
        return [(f"self_attn.{name[11]}_proj.weight", permute_pairs(tensor, heads))]
    if name.startswith(("attention.q_normalization.", "attention.k_normalization.")):
        return [
            (
                f"self_attn.{name[10]}_norm.{name.rpartition('.')[2]}",
                permute_pairs(tensor[:, None], 1)[:, 0],
            )
        ]
    return [(_LAYER_KEYS.get(name, name), tensor)]


class _Layer(nn.Module):
    """A decoder layer of Chameleon that returns its hidden states alone, as other families' do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = ChameleonDecoderLayer(config, layer_idx=0)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.inner(hidden, **options)[0]
        return out


def decoder_layer(config: Mapping[str, Any]) -> DecoderLayer:
    """A decoder layer and rotary embedding for the fields of a `ChameleonConfig`."""
    sizes = ChameleonConfig(**{**config, "num_hidden_layers": 1})
    sizes._attn_implementation = "sdpa"
    return _Layer(sizes), Rotary.of(sizes)
