"""LlamaGen (Sun et al. 2024): a Llama decoder over a grid of image tokens, conditioned on a prefix
of caption features or on a class label.

The decoder has a two-dimensional rotary embedding; the official checkpoints' key layout is
translated on load. Notation: R rows, T condition tokens, D caption
feature width, H hidden size, V codebook size, S sequence length.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.runtime.tensor_files import renamed
from tempera.targets.decoder_layer import Decoder, LayerSizes
from tempera.targets.rotary import Rotary, turns
from tempera.targets.token_format import patches


@dataclass(frozen=True)
class LlamaGenConfig:
    """Sizes of a LlamaGen: text-conditional if `caption_dim` is set, class-conditional if
    `num_classes` is.

    Raises:
        TemperaError: the head size is not a multiple of 4, or not exactly one of the two is set.
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
                "head size that is not a multiple of 4, which the two-dimensional rotary "
                "embedding needs: change one of the two."
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

    @property
    def layer_sizes(self) -> LayerSizes:
        """Sizes of a decoder layer."""
        heads = self.num_attention_heads
        return LayerSizes(
            self.hidden_size, self.intermediate_size, heads, heads, self.head_dim, self.norm_eps
        )


class GridRotary(Rotary):
    """LlamaGen's two-dimensional rotary embedding: half of each head encodes the row, half the
    column.

    Condition tokens have cos = sin = 0. This zeroes their queries and keys, so every query attends
    to them with score 0.

    Args:
        head_dim: D.
        theta: base of the frequencies.
        columns: of the grid.
    """

    def __init__(self, head_dim: int, theta: float, columns: int) -> None:
        super().__init__(head_dim, theta)
        self.columns = columns

    @override
    def table(self, count: int, prefix: int, device: torch.device) -> Tensor:
        quarter = self.head_dim // 4
        speeds = self.theta ** (-torch.arange(quarter, device=device).float() / quarter)
        index = torch.arange(count, device=device)[:, None] - prefix
        row, column = index // self.columns, index % self.columns
        angles = torch.cat([row * speeds, column * speeds], -1)
        return turns(angles.cos() * (index >= 0), angles.sin() * (index >= 0))


class LlamaGen(nn.Module):
    """The network: a decoder (`model`) with a condition embedding and a head whose weights are not
    tied to the token embedding. Implements `network.TargetNetwork`.
    """

    spec = None

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        rotary = GridRotary(config.head_dim, config.rope_base, config.grid[1])
        self.model = Decoder(
            config.layer_sizes, config.num_hidden_layers, config.vocab_size, rotary
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.caption_dim is not None:
            fc1 = nn.Linear(config.caption_dim, config.hidden_size, bias=False)
            fc2 = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.caption_projection = nn.Sequential(
                OrderedDict(fc1=fc1, gelu=nn.GELU("tanh"), fc2=fc2)
            )
            self.null_caption = nn.Parameter(
                torch.randn(config.prefix_length, config.caption_dim) / config.caption_dim**0.5
            )
        elif config.num_classes is not None:
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed image tokens, int64 [...] → [..., H]."""
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def embed_prefix(self, condition: Tensor, mask: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the condition; null-conditioned rows have the prompt's padding.

        Args:
            condition: caption features [R, T, D], or class labels int64 [R].
            mask: False on padding, bool [R, T]; T = 1 for a class label.
            drop: rows that are null-conditioned, bool [R].

        Returns:
            [R, T, H], and `mask`.
        """
        if self.config.num_classes is not None:
            labels = torch.where(drop, self.config.num_classes, condition)
            return self.class_embedding(labels)[:, None], mask
        features = torch.where(
            drop[:, None, None], self.null_caption.to(condition.dtype), condition
        )
        return self.caption_projection(features.to(self.model.embed_tokens.weight.dtype)), mask


def permute_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder a query or key projection [H, H], or the norm [H] of one, from interleaved rotary
    pairs (official) to half-split pairs (Hugging Face).
    """
    split = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return split.transpose(1, 2).reshape(weight.shape)


_META = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^layers\.": "model.layers.",
    r"\.attention\.w([qkvo])\.": r".self_attn.\1_proj.",
    r"\.attention\.([qk])_normalization\.": r".self_attn.\1_norm.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"^cls_embedding\.uncond_embedding": "null_caption",
    r"^cls_embedding\.cap_proj\.": "caption_projection.",
    r"^cls_embedding\.embedding_table\.": "class_embedding.",
}
"""Names in Meta's Llama code, and those of LlamaGen's condition -> Hugging Face's and ours."""


def from_meta(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Translate names and rotary pairs of Meta's Llama code, in which LlamaGen and Anole are
    published. Other names are kept, so strict loading reports what is unknown.

    Args:
        state: published weights.
        heads: number of attention heads.
    """
    single: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".attention.wqkv." not in name:
            single[name] = tensor
            continue
        for part, weight in zip("qkv", tensor.chunk(3), strict=True):
            single[name.replace("wqkv", f"w{part}")] = weight
    for name, weight in single.items():
        if re.match(r"layers\..*\.attention\.(wq|wk)\.", name):
            single[name] = permute_pairs(weight, heads)
        if re.match(r"layers\..*\.attention\.[qk]_normalization\.", name):
            single[name] = permute_pairs(weight, 1)
    return renamed(single, _META)


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
        TemperaError: `image_size` is not a multiple of 16.
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
        lambda state: from_meta(state, config.num_attention_heads),
        device,
        dtype,
        ignore=("freqs_cis",),
        untold={
            "num_attention_heads": config.num_attention_heads,
            "norm_eps": config.norm_eps,
            "rope_base": config.rope_base,
            "rope_layout": "rows and columns, in pairs",
            "hidden_act": "silu",
        },
    )
