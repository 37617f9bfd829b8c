"""LlamaGen (Sun et al. 2024): a Llama decoder over a grid of image tokens, conditioned on a prefix
of caption features or on a class label.

The transformer is Hugging Face's, with a two-dimensional rotary embedding; the official
checkpoints' key layout is translated on load. Notation: R rows, T condition tokens, D caption
feature width, H hidden size, V codebook size, S sequence length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.huggingface import LlamaConfig, LlamaDecoderLayer, LlamaModel
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.targets.masks import causal_mask
from tempera.targets.network import DecoderLayer
from tempera.targets.token_format import patches


@dataclass(frozen=True)
class LlamaGenConfig:
    """Sizes of a LlamaGen: text-conditional if `caption_dim` is set, class-conditional if
    `num_classes` is.

    Raises:
        TemperaError: the head size is no multiple of 4, or not exactly one of the two is set.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    grid: tuple[int, int]
    prefix_length: int
    caption_dim: int | None = None
    num_classes: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_attention_heads):
            raise TemperaError(
                f"hidden_size={self.hidden_size} over {self.num_attention_heads} heads gives a "
                "head size that is no multiple of 4, "
                "as the two-dimensional rotary embedding needs: change one of the two."
            )
        if (self.caption_dim is None) == (self.num_classes is None):
            raise TemperaError(
                "a LlamaGen is conditioned on captions or on classes: set exactly one of "
                "caption_dim and num_classes."
            )

    @property
    def length(self) -> int:
        """Image tokens per image."""
        return self.grid[0] * self.grid[1]

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def llama(self, layers: int | None = None) -> LlamaConfig:
        """The decoder's Hugging Face configuration; `layers` overrides the number of layers (a
        draft has 1).
        """
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers if layers is None else layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            rms_norm_eps=self.norm_eps,
            max_position_embeddings=self.prefix_length + self.length,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )


class GridRotary(nn.Module):
    """LlamaGen's two-dimensional rotary embedding: half of each head encodes the row, half the
    column.

    Condition tokens have cos = sin = 0. This zeroes their queries and keys, so every query attends
    to them with score 0. Rotary pairs are half-split, as in Hugging Face; `permute_pairs` converts
    official weights to that order.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.zeros(0), persistent=False)
        self.register_buffer("sin", torch.zeros(0), persistent=False)
        self.reset_tables(self.cos.device)

    def reset_tables(self, device: torch.device) -> None:
        """Compute the tables cos and sin, [T + length, head_dim], on a device."""
        config, quarter = self.config, self.config.head_dim // 4
        freqs = 1.0 / config.rope_base ** (torch.arange(quarter, device=device).float() / quarter)
        sides = [torch.arange(side, device=device) for side in config.grid]
        rows, columns = torch.meshgrid(*sides, indexing="ij")
        angles = torch.cat(
            [rows.flatten()[:, None] * freqs, columns.flatten()[:, None] * freqs], -1
        ).repeat(1, 2)
        blank = torch.zeros(config.prefix_length, config.head_dim, device=device)
        self.cos, self.sin = torch.cat([blank, angles.cos()]), torch.cat([blank, angles.sin()])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [R, S], 0 being the first condition token → cos, sin [R, S, head_dim] in
        the dtype of `x`.
        """
        cos, sin = (nn.functional.embedding(position_ids, part) for part in (self.cos, self.sin))
        return cos.to(x.dtype), sin.to(x.dtype)


class CaptionProjection(nn.Module):
    """Caption features to condition tokens: fc → GELU (tanh) → fc, without biases."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = (
            nn.Linear(inner, outer, bias=False),
            nn.Linear(outer, outer, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., D] → [..., H]."""
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class LlamaGen(nn.Module):
    """The network: a Hugging Face Llama (`model`) with a condition embedding and a head whose
    weights are not tied to the token embedding. Implements `network.TargetNetwork`.
    """

    family = "llamagen"

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config.llama())
        self.model.rotary_emb = GridRotary(config)  # type: ignore[assignment]
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.caption_dim is not None:
            self.caption_projection = CaptionProjection(config.caption_dim, config.hidden_size)
            self.null_caption = nn.Parameter(
                torch.randn(config.prefix_length, config.caption_dim) / config.caption_dim**0.5
            )
        elif config.num_classes is not None:
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed image tokens, int64 [...] → [..., H]."""
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def embed_prefix(self, condition: Tensor, drop: Tensor) -> Tensor:
        """Embed the condition.

        Args:
            condition: caption features [R, T, D], or class labels int64 [R].
            drop: rows that are null-conditioned, bool [R].

        Returns:
            [R, T, H]; T = 1 for a class label.
        """
        if self.config.num_classes is not None:
            labels = torch.where(drop, self.config.num_classes, condition)
            return self.class_embedding(labels)[:, None]  # type: ignore[no-any-return]
        features = torch.where(
            drop[:, None, None], self.null_caption.to(condition.dtype), condition
        )
        out: Tensor = self.caption_projection(features.to(self.model.embed_tokens.weight.dtype))
        return out

    def keep_prefix(self, condition: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
        """The prompt's padding, bool [R, T], for null-conditioned rows too."""
        return keep

    def inputs(self, condition: Tensor, drop: Tensor, tokens: Tensor) -> Tensor:
        """Inputs for teacher forcing: the condition tokens, then all image tokens but the last,
        [R, T + length − 1, H]. For the arguments see `forward`.
        """
        return torch.cat([self.embed_prefix(condition, drop), self.embed_tokens(tokens[:, :-1])], 1)

    def forward(
        self, condition: Tensor, keep: Tensor, drop: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Teacher forcing over whole images, for training.

        Args:
            condition: caption features [R, T, D], or class labels int64 [R].
            keep: False on padding, which is on the left, bool [R, T].
            drop: null-conditioned rows, bool [R].
            tokens: the image, int64 [R, length].

        Returns:
            inputs [R, S, H] with S = T + length − 1; hidden states after the final norm, [R, S, H],
            of which that at T − 1 + i predicts token i; and the additive mask [R, 1, S, S].
        """
        inputs = self.inputs(condition, drop, tokens)
        mask = causal_mask(keep, inputs.shape[1], inputs.dtype)
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
        hidden = self.model(
            inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return inputs, hidden, mask


def decoder_layer(config: Mapping[str, Any]) -> DecoderLayer:
    """A decoder layer and rotary embedding for the fields of a `LlamaGenConfig`."""
    sizes = LlamaGenConfig(**{**config, "grid": tuple(config["grid"])})
    return LlamaDecoderLayer(sizes.llama(layers=1), layer_idx=0), GridRotary(sizes)


def permute_pairs(weight: Tensor, heads: int, inverse: bool = False) -> Tensor:
    """Reorder a query or key projection [H, H] from interleaved rotary pairs (official) to
    half-split pairs (Hugging Face), or back.
    """
    size = weight.shape[0] // heads
    split = (heads, 2, size // 2) if inverse else (heads, size // 2, 2)
    return weight.reshape(*split, -1).transpose(1, 2).reshape(weight.shape)


LAYER_KEYS = {
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
"""Parameter names of a layer in Meta's and LlamaGen's code -> those of Hugging Face."""

_TOP_KEYS = {
    "cls_embedding.uncond_embedding": "null_caption",
    "cls_embedding.cap_proj.fc1.weight": "caption_projection.fc1.weight",
    "cls_embedding.cap_proj.fc2.weight": "caption_projection.fc2.weight",
    "cls_embedding.embedding_table.weight": "class_embedding.weight",
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def from_meta(state: Mapping[str, Tensor], heads: int, top: Mapping[str, str]) -> dict[str, Tensor]:
    """Translate the names of Meta's Llama code into Hugging Face's, and rotary pairs with them.
    Unknown names are kept, so strict loading reports them.

    Args:
        state: published weights.
        heads: number of attention heads.
        top: names outside the layers -> those of the network.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("layers."):
            result[top.get(name, name)] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if rest == "attention.wqkv.weight":
            for part, weight in zip("qkv", tensor.chunk(3), strict=True):
                weight = weight if part == "v" else permute_pairs(weight, heads)
                result[f"{prefix}self_attn.{part}_proj.weight"] = weight
        elif rest in ("attention.wq.weight", "attention.wk.weight"):
            result[f"{prefix}self_attn.{rest[11]}_proj.weight"] = permute_pairs(tensor, heads)
        elif rest.startswith(("attention.q_normalization.", "attention.k_normalization.")):
            kind = rest.rpartition(".")[2]
            permuted = permute_pairs(tensor[:, None], 1)[:, 0]
            result[f"{prefix}self_attn.{rest[10]}_norm.{kind}"] = permuted
        else:
            result[prefix + LAYER_KEYS.get(rest, rest)] = tensor
    return result


def from_official(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Translate official parameter names into those of `LlamaGen`; see `from_meta`."""
    return from_meta(state, heads, _TOP_KEYS)


def to_official(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The inverse of `from_official`."""
    keys = {new: old for old, new in (*_TOP_KEYS.items(), *LAYER_KEYS.items())}
    result = {}
    for key, value in state.items():
        prefix, _, name = key.removeprefix("model.layers.").partition(".")
        if key in keys:
            result[keys[key]] = value
        elif name == "self_attn.q_proj.weight":
            k, v = (state[key.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            pairs = [permute_pairs(part, heads, inverse=True) for part in (value, k)]
            result[f"layers.{prefix}.attention.wqkv.weight"] = torch.cat([*pairs, v])
        elif not name.startswith(("self_attn.k_proj.", "self_attn.v_proj.")):
            result[f"layers.{prefix}.{keys[name]}"] = value
    return result


PATCH = 16
"""Pixels along each side of a code's patch."""


LlamaGenSize = Literal["B", "L", "XL", "XXL", "3B"]


SIZES: dict[LlamaGenSize, tuple[int, int, int]] = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "3B": (24, 32, 3200),
}
"""Layers, heads and width, as in the official code."""


def llamagen_config(
    size: LlamaGenSize,
    image_size: int,
    caption_dim: int | None = None,
    num_classes: int | None = None,
    caption_tokens: int = 120,
    vocab_size: int = 16384,
) -> LlamaGenConfig:
    """The configuration of a published size.

    Args:
        size: name of the size.
        image_size: height and width of an image in pixels, a multiple of 16.
        caption_dim, num_classes: see `LlamaGenConfig`.
        caption_tokens: T of a text-conditional model.
        vocab_size: V.

    Raises:
        TemperaError: `image_size` is no multiple of 16.
    """
    layers, heads, width = SIZES[size]
    side = patches(image_size, PATCH, "image_size")
    return LlamaGenConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=-(-(8 * width // 3) // 256) * 256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        grid=(side, side),
        prefix_length=1 if caption_dim is None else caption_tokens,
        caption_dim=caption_dim,
        num_classes=num_classes,
    )


def load_llamagen(
    config: LlamaGenConfig,
    weights: str,
    files: list[str],
    hub: str,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LlamaGen:
    """Load a LlamaGen with published weights.

    Args:
        config: its sizes.
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        device, dtype: device and dtype of random weights; published weights keep those of their
            files.

    Raises:
        TemperaError: the files are missing or do not fit.
    """
    return load_pretrained(
        lambda: LlamaGen(config),
        PretrainedFiles(weights, files, hub),
        lambda state: from_official(state, config.num_attention_heads),
        device,
        dtype,
        ignore=("freqs_cis",),
    )
