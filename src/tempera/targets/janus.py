"""Janus-Pro (Chen et al. 2025): a Llama decoder whose image tokens have an embedding and a head of
their own. Weights are in the layout of Hugging Face's `JanusForConditionalGeneration`.

The image head is Linear → GELU → Linear. Guidance and drafts work on the input of its last layer.
These are the hidden states here, so the first two layers follow the decoder's final norm.

Ids are from the Janus repository: begin of sentence 100000, `<｜▁pad▁｜>` 100015,
`<begin_of_image>` 100016. Prompt format and guidance are from its `generation_inference.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.huggingface import LlamaConfig, LlamaDecoderLayer, LlamaModel
from tempera.targets.network import DecoderLayer
from tempera.targets.rotary import Rotary
from tempera.targets.shared_vocabulary import (
    PromptEncoder,
    SharedVocabularyLM,
    load_prompts,
    single_layer,
)
from tempera.targets.token_format import ModelSpec, patches

PATCH = 16
_BEGIN, _PAD = 100000, 100015
_PAD_NAME = "<｜▁pad▁｜>"


def janus(image_size: int = 384, codes: int = 16384) -> ModelSpec:
    """Janus-Pro's format, without a system prompt. In the unconditional row, padding that is
    attended to replaces all tokens of the prompt but the first and the last.

    Args:
        image_size: height and width in pixels, a multiple of 16.
        codes: size of the image codebook.

    Raises:
        TemperaError: the size is no multiple of 16.
    """
    side = patches(image_size, PATCH, "image_size")
    return ModelSpec(
        side,
        side,
        codes,
        first_code=0,
        prompt=(_BEGIN, "<|User|>: {text}\n\n<|Assistant|>:<begin_of_image>"),
        null=(),
        context=16384,
        null_filling=_PAD,
    )


def load_janus_prompts(
    spec: ModelSpec, weights: str, files: list[str], hub: str, truncate: bool = False
) -> PromptEncoder:
    """As `shared_vocabulary.load_prompts`, with the id of padding from the tokenizer: ports of the
    model number it differently.

    Raises:
        TemperaError: the tokenizer has no such token.
    """
    encoder = load_prompts(spec, weights, files, hub, truncate)
    if not encoder.is_published:
        return encoder
    found = encoder.tokenize(_PAD_NAME)
    if len(found) != 1:
        raise TemperaError(
            f"the tokenizer of {weights} has no token {_PAD_NAME}: give the tokenizer.json of a "
            "Janus-Pro."
        )
    encoder.spec = replace(spec, null_filling=found[0])
    return encoder


class CodeAligner(nn.Module):
    """Maps vectors of image codes to inputs of the decoder: Linear → GELU → Linear."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inner, outer)
        self.hidden_layers = nn.ModuleList([nn.Linear(outer, outer)])

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H]."""
        out: Tensor = self.hidden_layers[0](nn.functional.gelu(self.fc1(x)))
        return out


class ImageStates(nn.Module):
    """The decoder's final norm and the image head without its last layer."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.proj_out = norm, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return nn.functional.gelu(self.proj_out(self.norm(x)))


class Janus(SharedVocabularyLM):
    """The part of Janus-Pro that generates images.

    Args:
        config: the decoder's configuration.
        spec: format of its sequences.
        code_dim: width of an image code's vector.
    """

    def __init__(self, config: Any, spec: ModelSpec, code_dim: int = 8) -> None:
        super().__init__(LlamaModel(config), config, spec, "janus")
        width = config.hidden_size
        self.model.rotary_emb = Rotary(config)
        self.model.norm = ImageStates(self.model.norm, width)
        self.codes = nn.Embedding(spec.codes, code_dim)
        self.aligner = CodeAligner(code_dim, width)
        self.lm_head = nn.Linear(width, spec.codes)

    @override
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed image codes, int64 [...] → [..., H]."""
        out: Tensor = self.aligner(self.codes(tokens))
        return out


def decoder_layer(config: Mapping[str, Any]) -> DecoderLayer:
    """A decoder layer and rotary embedding for the fields of a `LlamaConfig`."""
    return single_layer(LlamaConfig, LlamaDecoderLayer, config)


SIZES = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""The sizes of the 1B model."""


UNUSED = ("model.vision_model.", "model.aligner.", "model.vqmodel.")


def build(sizes: dict[str, Any], spec: ModelSpec) -> Janus:
    """The network of these sizes; see `shared_vocabulary.load_network`."""
    return Janus(LlamaConfig(**sizes, pad_token_id=None), spec)


_KEYS = {
    "model.language_model.norm.": "model.norm.norm.",
    "model.language_model.": "model.",
    "model.generation_embeddings.": "codes.",
    "model.generation_aligner.": "aligner.",
    "model.generation_head.proj_out.": "model.norm.proj_out.",
    "model.generation_head.vision_head.": "lm_head.",
}


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Translate Hugging Face's names into those of `Janus`, without the head of text."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        old = next((old for old in _KEYS if name.startswith(old)), "")
        result[_KEYS.get(old, "") + name[len(old) :]] = tensor
    return result
