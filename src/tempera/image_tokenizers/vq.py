"""The VQ image tokenizer of LlamaGen (Sun et al. 2024) with its official parameter names, at any
size; Chameleon's, the same network except for attention and normalisation, from the layout of
VQGAN (Esser et al. 2021); MoVQ's (Zheng et al. 2022), whose decoder is modulated by the codes; and
Emu3.5's, an IBQ tokenizer (Shi et al. 2024, arXiv 2412.02692), in VQGAN's layout.

An image [B, 3, h·f, w·f] in [−1, 1] becomes codes [B, h, w]. LlamaGen's codebook is ℓ2-normalised
for both encoding and decoding; VQGAN's is not. IBQ takes the entry with the largest inner product.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.runtime.tensor_files import renamed

NORM_EPS = 1e-6


@dataclass(frozen=True)
class VQConfig:
    """Sizes; the defaults are LlamaGen's VQ-16. The downsampling factor f is 2^(levels − 1).

    Attributes:
        normalised: whether the codebook is ℓ2-normalised (its file then has usage counts).
        inner_product: whether a code is the entry with the largest inner product, not the nearest.
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
    inner_product: bool = False
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
        self.norm1 = norm(inner)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2 = norm(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
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
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C, h, w]; for `codes` see `Parts`."""
        h = self.norm(x, *codes)
        q = self.q(h).flatten(2).transpose(1, 2)
        k = self.k(h).flatten(2).transpose(1, 2)
        v = self.v(h).flatten(2).transpose(1, 2)
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
        self.attn = nn.ModuleList()
        if attend:
            self.attn.extend(AttnBlock(outer, norm) for _ in range(blocks))
        self.resample = resample
        if resample == "downsample":
            pad = nn.ZeroPad2d((0, 1, 0, 1))
            conv = nn.Conv2d(outer, outer, 3, stride=2)
            self.downsample = nn.Sequential(OrderedDict(pad=pad, conv=conv))
        if resample == "upsample":
            nearest = nn.Upsample(scale_factor=2.0)
            conv = nn.Conv2d(outer, outer, 3, padding=1)
            self.upsample = nn.Sequential(OrderedDict(nearest=nearest, conv=conv))

    def forward(self, x: Tensor, *codes: Tensor) -> Tensor:
        """[B, inner, h, w] → [B, outer, …]; for `codes` see `Parts`."""
        for i, block in enumerate(self.res):
            x = block(x, *codes)
            if i < len(self.attn):
                x = self.attn[i](x, *codes)
        if self.resample == "downsample":
            x = self.downsample(x)
        elif self.resample == "upsample":
            x = self.upsample(x)
        return x


def _network(
    config: VQConfig, ends: tuple[int, int], widths: list[int], blocks: int, resample: str
) -> Parts:
    """Levels of `widths` between two convolutions to `ends` channels: the encoder, or the decoder,
    whose middle comes first. Attention is at the coarsest level.
    """
    decodes = resample == "upsample"
    norm = _norm(config, spatial=decodes and config.spatial_norms)
    count = len(widths) - 1
    coarsest = 0 if decodes else count - 1
    levels = Parts()
    for i, (inner, outer) in enumerate(pairwise(widths)):
        attend = config.level_attention and i == coarsest
        further = resample if i < count - 1 else ""
        levels.append(Level(inner, outer, blocks, norm, attend, further))
    middle = _middle(widths[0 if decodes else -1], norm)
    parts = OrderedDict[str, nn.Module](conv_in=nn.Conv2d(ends[0], widths[0], 3, padding=1))
    if decodes:
        parts |= {"mid": middle, "conv_blocks": levels}
    else:
        parts |= {"conv_blocks": levels, "mid": middle}
    parts["norm_out"] = norm(widths[-1])
    parts["swish"] = nn.SiLU()
    parts["conv_out"] = nn.Conv2d(widths[-1], ends[1], 3, padding=1)
    return Parts(parts)


def _norm(config: VQConfig, spatial: bool) -> Norm:
    """The norm of a network's layers."""
    if spatial:
        return partial(SpatialNorm, groups=config.norm_groups, codebook_dim=config.codebook_dim)
    return partial(nn.GroupNorm, config.norm_groups, eps=NORM_EPS)


def _middle(width: int, norm: Norm) -> Parts:
    """Two residual blocks with attention between them."""
    first = ResBlock(width, width, norm)
    last = ResBlock(width, width, norm)
    return Parts(first, AttnBlock(width, norm), last)


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
    """The nearest codebook entry, between unit vectors if the codebook is ℓ2-normalised; or that of
    the largest inner product.
    """

    codebook_used: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)
        nn.init.normal_(self.embedding.weight)
        self.normalised = config.normalised
        self.inner_product = config.inner_product
        if config.normalised:
            self.register_buffer("codebook_used", torch.zeros(65536))

    @property
    def codebook(self) -> Tensor:
        """The codebook as encoder and decoder use it, [V, D]; rows have length 1 if normalised."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.normalised else weight

    def nearest(self, z: Tensor) -> Tensor:
        """z [..., D] → code of the nearest entry, int64 [...]."""
        codebook = self.codebook
        if self.normalised:
            return (F.normalize(z, dim=-1) @ codebook.T).argmax(-1)
        if self.inner_product:
            return (z @ codebook.T).argmax(-1)
        return (2 * z @ codebook.T - codebook.pow(2).sum(-1)).argmax(-1)


class VQModel(ImageTokenizer):
    """Encoder, quantizer, decoder."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.codebook_size
        self.factor = config.factor
        self.encoder = encoder(config)
        self.decoder = decoder(config)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    @override
    def codebook(self) -> Tensor:
        """The codebook as encoder and decoder use it, [V, D]."""
        return self.quantize.codebook

    def latents(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → vectors [B, h, w, D] before quantisation, of length 1
        where the codebook is normalised.

        Raises:
            TemperaError: H or W is not a multiple of `factor`.
        """
        height, width = images.shape[-2:]
        if height % self.factor or width % self.factor:
            raise TemperaError(
                f"an image of {height}×{width} pixels cannot be divided into patches of "
                f"{self.factor} pixels: resize it to multiples of {self.factor}."
            )
        latents: Tensor = self.quant_conv(self.encoder(images)).permute(0, 2, 3, 1)
        return F.normalize(latents, dim=-1) if self.config.normalised else latents

    @override
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
EMU3_5 = VQConfig(
    codebook_size=131072,
    codebook_dim=256,
    channels=256,
    res_blocks=4,
    normalised=False,
    inner_product=True,
)
"""The sizes of Emu3.5's tokenizer, from transformers' conversion of its encoder (apertus1p5)."""


def load_vq(
    weights: str,
    files: list[str],
    hub: str,
    layout: Literal["llamagen", "vqgan", "movq", "ibq", "janus"] = "llamagen",
    lines: bool = False,
    config: VQConfig | None = None,
) -> VQModel | LinedTokenizer:
    """A published tokenizer.

    Args:
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        layout: LlamaGen's own; VQGAN's, with the decoder that Hugging Face's Chameleon lacks; MoVQ
            and IBQ, which have VQGAN's names; or Janus-Pro's, in the model's own file.
        lines: whether the target ends every line of codes with an extra token.
        config: sizes; by default those of Chameleon's for `vqgan`, of MoVQGAN-270M for `movq`, of
            Emu3.5's for `ibq`, and else of LlamaGen's VQ-16.
    """
    usual = {"vqgan": CHAMELEON, "movq": MOVQ, "ibq": EMU3_5}
    sizes = config or usual.get(layout, VQConfig())
    levels = len(sizes.decoder_multipliers)
    translate: dict[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]]] = {
        "llamagen": lambda state: state,
        "vqgan": lambda state: from_vqgan(state, levels),
        "movq": lambda state: from_vqgan(state, levels),
        "ibq": lambda state: from_vqgan(state, levels),
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
        from_coarsest = levels - 1 - level if finest_first else level
        names[rf"^decoder\.up\.{level}\."] = f"decoder.conv_blocks.{from_coarsest}."
    return renamed(state, names)


def from_janus(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Translate the names of Janus-Pro's image tokenizer in Hugging Face's layout; the rest of the
    model is dropped. Hugging Face looks up the nearest code without normalising; Janus's own code
    normalises, as this module.
    """
    tokenizer = {}
    for name, tensor in state.items():
        if name.startswith("model.vqmodel."):
            tokenizer[name] = tensor
    translated = from_vqgan(tokenizer, levels, finest_first=False)
    return {"quantize.codebook_used": torch.zeros(65536), **translated}
