"""The VQ image tokenizer of LlamaGen (Sun et al. 2024) with its official parameter names, at any
size; and Chameleon's, the same network except for attention and normalisation, from the layout of
VQGAN (Esser et al. 2021).

An image [B, 3, h·f, w·f] in [−1, 1] becomes codes [B, h, w]. LlamaGen's codebook is ℓ2-normalised
for both encoding and decoding; VQGAN's is not.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime.network_directory import parse_sizes, read_network
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained


@dataclass(frozen=True)
class VQConfig:
    """Sizes; the defaults are LlamaGen's VQ-16. The downsampling factor f is 2^(levels − 1).

    Attributes:
        normalised: whether the codebook is ℓ2-normalised (its file then has usage counts).
        level_attention: whether the coarsest level has attention after its residual blocks, like
            the middle block.
    """

    codebook_size: int = 16384
    codebook_dim: int = 8
    channels: int = 128
    encoder_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    decoder_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    z_channels: int = 256
    norm_groups: int = 32
    normalised: bool = True
    level_attention: bool = True

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return int(2 ** (len(self.encoder_multipliers) - 1))


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResBlock(nn.Module):
    """norm → swish → conv, twice, with a 1×1 shortcut where the width changes."""

    def __init__(self, inner: int, outer: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inner, groups), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = _norm(outer, groups), nn.Conv2d(outer, outer, 3, padding=1)
        if inner != outer:
            self.nin_shortcut = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inner, h, w] → [B, outer, h, w]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        skip = self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x
        out: Tensor = skip + h
        return out


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(channels, groups)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C, h, w]."""
        h = self.norm(x)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj_out(mixed.transpose(1, 2).reshape(x.shape))
        return x + out


class Resample(nn.Module):
    """A convolution that halves (stride 2, padded right and below) or, after nearest upsampling,
    doubles the resolution.
    """

    def __init__(self, channels: int, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(channels, channels, 3, stride=1 if up else 2, padding=1 if up else 0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] → half or double the resolution."""
        out: Tensor = self.conv(
            F.interpolate(x, scale_factor=2.0, mode="nearest")
            if self.up
            else F.pad(x, (0, 1, 0, 1))
        )
        return out


class ResolutionLevel(nn.Module):
    """The residual blocks of one resolution, with attention at the coarsest one, and the resampling
    that follows.
    """

    def __init__(
        self, inner: int, outer: int, blocks: int, groups: int, attend: bool, resample: str | None
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(
            ResBlock(inner if i == 0 else outer, outer, groups) for i in range(blocks)
        )
        self.attn = nn.ModuleList(AttnBlock(outer, groups) for _ in range(blocks if attend else 0))
        if resample:
            setattr(self, resample, Resample(outer, up=resample == "upsample"))
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        """[B, inner, h, w] → [B, outer, …]."""
        for i, block in enumerate(self.res):
            x = block(x)
            if i < len(self.attn):
                x = self.attn[i](x)
        return getattr(self, self.resample)(x) if self.resample else x


def _middle(channels: int, groups: int) -> nn.ModuleList:
    first, last = (ResBlock(channels, channels, groups) for _ in range(2))
    return nn.ModuleList([first, AttnBlock(channels, groups), last])


class Encoder(nn.Module):
    """Image [B, 3, H, W] → latents [B, z, H/f, W/f]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in (1, *config.encoder_multipliers)]
        last, groups = len(widths) - 2, config.norm_groups
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            ResolutionLevel(widths[i], widths[i + 1], config.res_blocks, groups, *further)
            for i, further in enumerate(
                [(False, "downsample")] * last + [(config.level_attention, None)]
            )
        )
        self.mid = _middle(widths[-1], groups)
        self.norm_out = _norm(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Latents [B, z, h, w] → image [B, 3, h·f, w·f]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        outer = [config.channels * m for m in reversed(config.decoder_multipliers)]
        inner = [outer[0], *outer[:-1]]
        last, groups, attended = len(outer) - 1, config.norm_groups, config.level_attention
        self.conv_in = nn.Conv2d(config.z_channels, outer[0], 3, padding=1)
        self.mid = _middle(outer[0], groups)
        self.conv_blocks = nn.ModuleList(
            ResolutionLevel(
                inner[i],
                outer[i],
                config.res_blocks + 1,
                groups,
                attended and i == 0,
                None if i == last else "upsample",
            )
            for i in range(last + 1)
        )
        self.norm_out = _norm(outer[-1], groups)
        self.conv_out = nn.Conv2d(outer[-1], 3, 3, padding=1)

    @override
    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    """The nearest codebook entry; if the codebook is ℓ2-normalised, between unit vectors."""

    codebook_used: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)
        nn.init.normal_(self.embedding.weight)
        self.normalised = config.normalised
        if config.normalised:
            self.register_buffer("codebook_used", torch.zeros(65536))

    @property
    def codebook(self) -> Tensor:
        """The codebook as encoder and decoder use it, [V, D]; rows have length 1 if normalised."""
        return (
            F.normalize(self.embedding.weight, dim=-1) if self.normalised else self.embedding.weight
        )

    def nearest(self, z: Tensor) -> Tensor:
        """z [..., D] → code of the nearest entry, int64 [...]."""
        if self.normalised:
            return (F.normalize(z, dim=-1) @ self.codebook.T).argmax(-1)
        return (2 * z @ self.codebook.T - self.codebook.pow(2).sum(-1)).argmax(-1)


class VQModel(nn.Module):
    """Encoder, quantizer, decoder."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    def vocab_size(self) -> int:
        """Number of codes."""
        return self.config.codebook_size

    @property
    def codebook(self) -> Tensor:
        """The codebook as encoder and decoder use it, [V, D]."""
        return self.quantize.codebook

    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels of an image of these lines and columns of codes."""
        return grid[0] * self.config.factor, grid[1] * self.config.factor

    def latents(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → vectors [B, h, w, D] before quantisation, of length 1
        where the codebook is normalised.
        """
        if images.shape[-1] % self.config.factor or images.shape[-2] % self.config.factor:
            raise TemperaError(
                f"an image of {images.shape[-2]}×{images.shape[-1]} pixels does not divide into "
                f"{self.config.factor}-pixel patches: "
                f"resize it to multiples of {self.config.factor}."
            )
        latents: Tensor = self.quant_conv(self.encoder(images)).permute(0, 2, 3, 1)
        return F.normalize(latents, dim=-1) if self.config.normalised else latents

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, h·f, w·f] in [−1, 1] → codes int64 [B, h, w]."""
        return self.quantize.nearest(self.latents(images))

    def decode_latents(self, vectors: Tensor) -> Tensor:
        """Codebook vectors [B, h, w, D] → images [B, 3, h·f, w·f], about [−1, 1]."""
        image: Tensor = self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))
        return image

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, h·f, w·f] in [−1, 1]."""
        return self.decode_latents(F.embedding(codes, self.quantize.codebook)).clamp(-1, 1)


def read_vq(directory: str | Path) -> VQModel:
    """The tokenizer in `directory`, saved as config.json and model.safetensors, in eval mode."""
    model = read_network(
        directory,
        lambda values: VQModel(parse_sizes(VQConfig, values)),
        "an image tokenizer",
        "give a directory that train_draft/build_shapes.py wrote",
    )
    return model.eval().requires_grad_(False)


CHAMELEON = VQConfig(codebook_size=8192, codebook_dim=256, normalised=False, level_attention=False)
"""The sizes of Chameleon's image tokenizer, from its vqgan.yaml."""


def load_vq(
    weights: str,
    files: list[str],
    hub: str,
    layout: Literal["llamagen", "vqgan", "janus"] = "llamagen",
    lines: bool = False,
    config: VQConfig | None = None,
) -> VQModel | LinedTokenizer:
    """A published tokenizer.

    Args:
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        layout: LlamaGen's own; VQGAN's, with the decoder that Hugging Face's Chameleon lacks; or
            Janus-Pro's, in the model's own file.
        lines: whether the target ends every line of codes with an extra token.
        config: sizes; by default those of Chameleon's for `vqgan`, and else of LlamaGen's VQ-16.
    """
    sizes = config or (CHAMELEON if layout == "vqgan" else VQConfig())
    levels = len(sizes.decoder_multipliers)
    translate: dict[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]]] = {
        "llamagen": lambda state: state,
        "vqgan": lambda state: from_vqgan(state, levels),
        "janus": from_janus,
    }
    published = PretrainedFiles(weights, files, hub)
    vq = load_pretrained(lambda: VQModel(sizes), published, translate[layout])
    return LinedTokenizer(vq) if lines else vq


_PREFIX = "model.vqmodel."  # in the file of a whole Chameleon or Janus-Pro
_NAMES = (
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.conv_blocks.\1.res."),
    (r"^encoder\.down\.(\d+)\.(attn|downsample)\.", r"encoder.conv_blocks.\1.\2."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)


def _renamed(name: str, levels: int | None) -> str:
    """A name of VQGAN's in this module; `levels` if its decoder numbers them from the finest."""
    name = name.removeprefix(_PREFIX)
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    if up := re.match(r"decoder\.up\.(\d+)\.(block|attn|upsample)\.", name):
        level = int(up[1]) if levels is None else levels - 1 - int(up[1])
        part = "res" if up[2] == "block" else up[2]
        name = f"decoder.conv_blocks.{level}.{part}.{name[up.end() :]}"
    return name


def from_vqgan(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Translate VQGAN's layout (`vqgan.ckpt`, or `model.vqmodel.` of a Chameleon) into this
    module's. Its decoder numbers levels from the finest, ours from the coarsest. Tensors that only
    training needs (`loss.`) are dropped.
    """
    return {
        _renamed(name, levels): tensor
        for name, tensor in state.items()
        if not name.removeprefix(_PREFIX).startswith("loss.")
    }


def from_janus(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate the names of Janus-Pro's image tokenizer in Hugging Face's layout; the rest of the
    model is dropped. Its decoder numbers levels from the coarsest, as this module. Hugging Face
    looks up the nearest code without normalising; Janus's own code normalises, as this module.
    """
    own = {_renamed(name, None): x for name, x in state.items() if name.startswith(_PREFIX)}
    return {"quantize.codebook_used": torch.zeros(65536), **own}
