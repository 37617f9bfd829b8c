"""The shipped CLIP (Radford et al. 2021): a small residual network that sees a picture, and a small
transformer that reads a caption.

open_clip trained it, and its files are in open_clip's layout. It is computed here so that the
shipped model's metrics need no more than torch; a test compares both.
"""

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tempera.runtime.files import read_json
from tempera.runtime.tensor_files import fill, read_tensors, renamed
from tempera.shapes.networks import SHIPPED

CONTEXT = 32
"""Tokens of a text."""
CHARACTERS = 512
"""The first tokens of CLIP's vocabulary: the bytes, within a word and at its end."""
TOKENS = (
    "on", "of", "an", "red", "chec", "black", "star", "white", "blue", "left", "green", "small",
    "ring", "brown", "pink", "cross", "large", "square", "orange", "above", "yellow", "purple",
    "background", "gray", "circle", "olive", "plain", "triangle", "striped", "teal", "kered",
)  # fmt: skip
"""CLIP's tokens of the world's words, in the order of their numbers there. The network has rows for
these only, after those of single characters; the rows of a text's start and end are the last.
"""
START = CHARACTERS + len(TOKENS)
END = START + 1
CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
_RENAMED = {
    r"^transformer\.resblocks\.": "text.layers.",
    r"^ln_final\.": "text.norm.",
    r"^token_embedding\.": "tokens.",
    r"\.attn\.": ".self_attn.",
    r"\.ln_(\d)\.": r".norm\1.",
    r"\.mlp\.c_fc\.": ".linear1.",
    r"\.mlp\.c_proj\.": ".linear2.",
}
"""Parts of the names in open_clip's file, and those of `Clip`."""


class Clip(nn.Module):
    """Both encoders, in open_clip's sizes; see its `model_cfg`."""

    def __init__(
        self, embed_dim: int, vision_cfg: dict[str, Any], text_cfg: dict[str, Any]
    ) -> None:
        super().__init__()
        width = text_cfg["width"]
        layer = nn.TransformerEncoderLayer(
            width,
            text_cfg["heads"],
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.visual = PictureEncoder(vision_cfg, embed_dim)
        self.tokens = nn.Embedding(text_cfg["vocab_size"], width)
        self.positional_embedding = nn.Parameter(torch.empty(text_cfg["context_length"], width))
        self.text = nn.TransformerEncoder(
            layer, text_cfg["layers"], norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        self.logit_scale = nn.Parameter(torch.empty(()))

    def encode_images(self, images: Tensor) -> Tensor:
        """Images float [B, 3, h, w] in [−1, 1] → embeddings [B, D] of length 1."""
        return F.normalize(self.visual(images), dim=-1)

    def encode_texts(self, ids: Tensor) -> Tensor:
        """Token ids int64 [B, T] → embeddings [B, D] of length 1: what a causal transformer knows
        at the end of the text.
        """
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        states = self.text(self.tokens(ids) + self.positional_embedding, mask, is_causal=True)
        last = states[torch.arange(len(ids)), (ids == END).int().argmax(-1)]
        return F.normalize(last @ self.text_projection, dim=-1)


class PictureEncoder(nn.Module):
    """CLIP's residual network: images [B, 3, h, w] → embeddings [B, D]. Three convolutions halve
    the image and a mean halves it again; three of four layers halve it as well.
    """

    def __init__(self, sizes: dict[str, Any], embed_dim: int) -> None:
        super().__init__()
        width = sizes["width"]
        self.conv1 = nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width // 2)
        self.conv3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(4 * width, 2 * width, 2))
        self.layer3 = nn.Sequential(Residual(8 * width, 4 * width, 2))
        self.layer4 = nn.Sequential(Residual(16 * width, 8 * width, 2))
        cells = (sizes["image_size"] // 32) ** 2
        heads = 32 * width // sizes["head_width"]
        self.attnpool = AttentionPool(cells, 32 * width, heads, embed_dim)

    @override
    def forward(self, images: Tensor) -> Tensor:
        states = self.bn1(self.conv1(images)).relu()
        states = self.bn2(self.conv2(states)).relu()
        states = self.bn3(self.conv3(states)).relu()
        states = F.avg_pool2d(states, 2)
        states = self.layer4(self.layer3(self.layer2(self.layer1(states))))
        pooled: Tensor = self.attnpool(states)
        return pooled


class Residual(nn.Module):
    """Three convolutions and a shortcut beside them, both over means of `stride`² pixels:
    [B, C, h, w] → [B, 4·width, h / stride, w / stride].
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        )
        self.stride = stride

    @override
    def forward(self, states: Tensor) -> Tensor:
        shortcut = self.downsample(F.avg_pool2d(states, self.stride))
        states = self.bn1(self.conv1(states)).relu()
        states = self.bn2(self.conv2(states)).relu()
        states = self.bn3(self.conv3(F.avg_pool2d(states, self.stride)))
        summed: Tensor = (states + shortcut).relu()
        return summed


class AttentionPool(nn.Module):
    """What the mean of all cells attends to, among itself and the cells: [B, C, h, w] → [B, D]."""

    def __init__(self, cells: int, channels: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.empty(cells + 1, channels))
        self.q_proj = nn.Linear(channels, channels)
        self.k_proj = nn.Linear(channels, channels)
        self.v_proj = nn.Linear(channels, channels)
        self.c_proj = nn.Linear(channels, embed_dim)

    @override
    def forward(self, states: Tensor) -> Tensor:
        cells = states.flatten(2).mT
        cells = torch.cat([cells.mean(1, keepdim=True), cells], 1) + self.positional_embedding
        query, key, value = (
            project(cells).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, cells, d]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        pooled = F.scaled_dot_product_attention(query[:, :, :1], key, value)
        projected: Tensor = self.c_proj(pooled.flatten(1))
        return projected


def load_clip(directory: Path = SHIPPED / "clip") -> Clip:
    """The network in a directory that open_clip or the recipe wrote, frozen."""
    sizes: Any = read_json(directory / CONFIG)["model_cfg"]
    network = Clip(**sizes)
    fill(network, renamed(read_tensors(directory / WEIGHTS), _RENAMED), directory / WEIGHTS)
    return network.eval().requires_grad_(False)


def tokenize(texts: list[str]) -> Tensor:
    """Ids int64 [B, `CONTEXT`] between `START` and `END`, padded with 0: CLIP's own tokens for what
    consists of the world's words and of single characters, and 0 for every other word. Words that
    are too many are cut off.
    """
    ids = torch.zeros(len(texts), CONTEXT, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"[^\W\d_]+|\d|[^\w\s]+|_+", text.lower())
        tokens = [token for word in words for token in _tokens(word)][: CONTEXT - 2]
        ids[row, : len(tokens) + 2] = torch.tensor([START, *tokens, END])
    return ids


def _tokens(word: str) -> list[int]:
    if word == "checkered":
        return [*_tokens("chec"), *_tokens("kered")]
    if word in TOKENS:
        return [CHARACTERS + TOKENS.index(word)]
    if len(word) == 1 and "!" <= word <= "~":
        return [CHARACTERS // 2 + ord(word) - ord("!")]
    return [0]
