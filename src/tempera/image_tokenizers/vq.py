"""The VQ image tokenizer of LlamaGen (Sun et al. 2024) with its official parameter names, at any
size; Chameleon's, the same network except for attention and normalisation, from the layout of
VQGAN (Esser et al. 2021); and MoVQ's (Zheng et al. 2022), whose decoder is modulated by the codes.

An image [B, 3, h·f, w·f] in [−1, 1] becomes codes [B, h, w]. LlamaGen's codebook is ℓ2-normalised
for both encoding and decoding; VQGAN's is not.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime.network_directory import parse_sizes, read_network
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.runtime.tensor_files import renamed

NORM_EPS = 1e-6


@dataclass(frozen=True)
class VQConfig:
    """Sizes; the defaults are LlamaGen's VQ-16. The downsampling factor f is 2^(levels − 1).

    Attributes:
        normalised: whether the codebook is ℓ2-normalised (its file then has usage counts).
        level_attention: whether the coarsest level has attention after its residual blocks, like
            the middle block.
        spatial_norms: whether the decoder's norms are MoVQ's `SpatialNorm`.
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
    spatial_norms: bool = False

    @property
    def untold(self) -> dict[str, Any]:
        """What no tensor of a file shows."""
        return {"norm_groups": self.norm_groups, "norm_eps": NORM_EPS, "hidden_act": "silu"}

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return int(2 ** (len(self.encoder_multipliers) - 1))


Norm = Callable[[int], nn.Module]
"""Makes the norm of so many channels."""


class SpatialNorm(nn.Module):
    """A GroupNorm whose scale and shift are 1×1 convolutions of the codes' vectors (MoVQ)."""

    def __init__(self, channels: int, groups: int, codebook_dim: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, channels, eps=NORM_EPS)
        self.conv_y = nn.Conv2d(codebook_dim, channels, 1)
        self.conv_b = nn.Conv2d(codebook_dim, channels, 1)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """[B, C, h, w] and the vectors of the codes, [B, D, …] → [B, C, h, w]."""
        vectors = F.interpolate(vectors, x.shape[-2:], mode="nearest")
        return torch.addcmul(self.conv_b(vectors), self.norm_layer(x), self.conv_y(vectors))


class Parts(nn.Sequential):
    """Parts in turn. `codes`, the vectors of the codes if norms are spatial, go to those that have
    norms.
    """

    @override
    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C', …]."""
        for part in self:
            normed = isinstance(part, SpatialNorm | ResBlock | AttnBlock | Level | Parts)
            x = part(x, *codes) if normed else part(x)
        return x


class ResBlock(nn.Module):
    """norm → swish → conv, twice, with a 1×1 shortcut where the width changes."""

    def __init__(self, inner: int, outer: int, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = norm(outer), nn.Conv2d(outer, outer, 3, padding=1)
        if inner != outer:
            self.nin_shortcut = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, inner, h, w] → [B, outer, h, w]; for `codes` see `Parts`."""
        h = self.conv1(F.silu(self.norm1(x, *codes)))
        h = self.conv2(F.silu(self.norm2(h, *codes)))
        skip = self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x
        out: Tensor = skip + h
        return out


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C, h, w]; for `codes` see `Parts`."""
        h = self.norm(x, *codes)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj_out(mixed.transpose(1, 2).reshape(x.shape))
        return x + out


class Level(nn.Module):
    """The residual blocks of one resolution, with or without attention, and the resampling that
    follows if there is one: "downsample" (padded right and below) or "upsample" (nearest).
    """

    def __init__(
        self, inner: int, outer: int, blocks: int, norm: Norm, attend: bool, resample: str
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(
            ResBlock(inner if i == 0 else outer, outer, norm) for i in range(blocks)
        )
        self.attn = nn.ModuleList(AttnBlock(outer, norm) for _ in range(blocks if attend else 0))
        self.resample = resample
        if resample == "downsample":
            pad, conv = nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(outer, outer, 3, stride=2)
            self.downsample = nn.Sequential(OrderedDict(pad=pad, conv=conv))
        if resample == "upsample":
            nearest, conv = nn.Upsample(scale_factor=2.0), nn.Conv2d(outer, outer, 3, padding=1)
            self.upsample = nn.Sequential(OrderedDict(nearest=nearest, conv=conv))

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, inner, h, w] → [B, outer, …]; for `codes` see `Parts`."""
        for i, block in enumerate(self.res):
            x = block(x, *codes)
            if i < len(self.attn):
                x = self.attn[i](x, *codes)
        return getattr(self, self.resample)(x) if self.resample else x


def _network(
    config: VQConfig, ends: tuple[int, int], widths: list[int], blocks: int, resample: str
) -> Parts:
    """Levels of `widths` between two convolutions to `ends` channels: the encoder, or the decoder,
    whose middle comes first. Attention is at the coarsest level.
    """
    decodes, count = resample == "upsample", len(widths) - 1
    coarsest = 0 if decodes else count - 1
    groups = config.norm_groups
    norm: Norm = partial(nn.GroupNorm, groups, eps=NORM_EPS)
    if decodes and config.spatial_norms:
        norm = partial(SpatialNorm, groups=groups, codebook_dim=config.codebook_dim)
    levels = Parts()
    for i, (inner, outer) in enumerate(pairwise(widths)):
        attend, further = config.level_attention and i == coarsest, resample * (i < count - 1)
        levels.append(Level(inner, outer, blocks, norm, attend, further))
    width = widths[0 if decodes else -1]
    first, last = ResBlock(width, width, norm), ResBlock(width, width, norm)
    middle = Parts(first, AttnBlock(width, norm), last)
    parts = OrderedDict[str, nn.Module](
        conv_in=nn.Conv2d(ends[0], widths[0], 3, padding=1),
        conv_blocks=levels,
        mid=middle,
        norm_out=norm(widths[-1]),
        swish=nn.SiLU(),
        conv_out=nn.Conv2d(widths[-1], ends[1], 3, padding=1),
    )
    order = ["conv_in", "mid", "conv_blocks", "norm_out", "swish", "conv_out"] if decodes else parts
    return Parts(OrderedDict((name, parts[name]) for name in order))


def encoder(config: VQConfig) -> Parts:
    """Image [B, 3, H, W] → latents [B, z, H/f, W/f]."""
    widths = [config.channels * factor for factor in (1, *config.encoder_multipliers)]
    return _network(config, (3, config.z_channels), widths, config.res_blocks, "downsample")


def decoder(config: VQConfig) -> Parts:
    """Latents [B, z, h, w], and the vectors of the codes if norms are spatial, → image
    [B, 3, h·f, w·f].
    """
    outer = [config.channels * factor for factor in reversed(config.decoder_multipliers)]
    widths = [outer[0], *outer]
    return _network(config, (config.z_channels, 3), widths, config.res_blocks + 1, "upsample")


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
        self.encoder, self.decoder = encoder(config), decoder(config)
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
        vectors = vectors.permute(0, 3, 1, 2)
        codes = [vectors] if self.config.spatial_norms else []
        image: Tensor = self.decoder(self.post_quant_conv(vectors), *codes)
        return image

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, h·f, w·f] in [−1, 1]."""
        return self.decode_latents(F.embedding(codes, self.quantize.codebook)).clamp(-1, 1)


def read_vq(directory: str | Path) -> VQModel:
    """The tokenizer in `directory`, saved as config.json and model.safetensors, in eval mode."""
    model = read_network(directory, lambda values: VQModel(parse_sizes(VQConfig, values)))
    return model.eval().requires_grad_(False)


CHAMELEON = VQConfig(codebook_size=8192, codebook_dim=256, normalised=False, level_attention=False)
"""The sizes of Chameleon's image tokenizer, from its vqgan.yaml."""
MOVQ = VQConfig(
    codebook_dim=4,
    channels=256,
    encoder_multipliers=(1, 2, 2, 4),
    decoder_multipliers=(1, 2, 2, 4),
    z_channels=4,
    normalised=False,
    spatial_norms=True,
)
"""The sizes of MoVQGAN-270M, from its movqgan_270M.yaml."""


def load_vq(
    weights: str,
    files: list[str],
    hub: str,
    layout: Literal["llamagen", "vqgan", "movq", "janus"] = "llamagen",
    lines: bool = False,
    config: VQConfig | None = None,
) -> VQModel | LinedTokenizer:
    """A published tokenizer.

    Args:
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        layout: LlamaGen's own; VQGAN's, with the decoder that Hugging Face's Chameleon lacks; MoVQ,
            which has VQGAN's names; or Janus-Pro's, in the model's own file.
        lines: whether the target ends every line of codes with an extra token.
        config: sizes; by default those of Chameleon's for `vqgan`, of MoVQGAN-270M for `movq`, and
            else of LlamaGen's VQ-16.
    """
    sizes = config or {"vqgan": CHAMELEON, "movq": MOVQ}.get(layout, VQConfig())
    levels = len(sizes.decoder_multipliers)
    translate: dict[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]]] = {
        "llamagen": lambda state: state,
        "vqgan": lambda state: from_vqgan(state, levels),
        "movq": lambda state: from_vqgan(state, levels),
        "janus": lambda state: from_janus(state, levels),
    }
    published = PretrainedFiles(weights, files, hub)
    vq = load_pretrained(
        lambda: VQModel(sizes),
        published,
        translate[layout],
        ignore=("loss.", "ema_"),
        untold=sizes.untold,
    )
    return LinedTokenizer(vq) if lines else vq


def from_vqgan(
    state: Mapping[str, Tensor], levels: int, finest_first: bool = True
) -> dict[str, Tensor]:
    """Translate VQGAN's layout (`vqgan.ckpt`, or `model.vqmodel.` of a Chameleon) into this
    module's.

    Args:
        state: published weights.
        levels: number of resolutions.
        finest_first: whether the file numbers the decoder's levels from the finest, as VQGAN, or
            from the coarsest, as this module.
    """
    names = {
        r"^model\.vqmodel\.": "",
        r"\.mid\.block_1\.": ".mid.0.",
        r"\.mid\.attn_1\.": ".mid.1.",
        r"\.mid\.block_2\.": ".mid.2.",
        r"^(encoder\.down|decoder\.up)\.(\d+)\.block\.": r"\1.\2.res.",
        r"^encoder\.down\.": "encoder.conv_blocks.",
    }
    for level in range(levels):
        own = levels - 1 - level if finest_first else level
        names[rf"^decoder\.up\.{level}\."] = f"decoder.conv_blocks.{own}."
    return renamed(state, names)


def from_janus(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Translate the names of Janus-Pro's image tokenizer in Hugging Face's layout; the rest of the
    model is dropped. Hugging Face looks up the nearest code without normalising; Janus's own code
    normalises, as this module.
    """
    own = {name: tensor for name, tensor in state.items() if name.startswith("model.vqmodel.")}
    return {"quantize.codebook_used": torch.zeros(65536), **from_vqgan(own, levels, False)}
