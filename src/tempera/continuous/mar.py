"""MAR, the masked autoregressive model of Li et al. 2024 ("Autoregressive image generation without
vector quantization"), in the official key layout: an encoder over the known tokens, a decoder over
the whole grid, and a diffusion head that draws each token (MIT licence).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.network_directory import parse_sizes, read_network
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained

EPSILON = 1e-6
_FREQUENCIES = 256


@dataclass(frozen=True)
class MARConfig:
    """Sizes; the defaults are MAR-B's.

    Attributes:
        grid: rows and columns of tokens.
        channels: channels of the image tokenizer's latents.
        patch: latents along each side of a token.
        width: width of encoder and decoder, which have `depth` blocks each.
        buffer: copies of the class embedding before the tokens.
        head_width, head_depth: width and number of blocks of the diffusion head.
    """

    grid: tuple[int, int] = (16, 16)
    channels: int = 16
    patch: int = 1
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    buffer: int = 64
    classes: int = 1000
    head_width: int = 1024
    head_depth: int = 6

    @property
    def length(self) -> int:
        """Tokens of an image, T."""
        return self.grid[0] * self.grid[1]

    @property
    def token_channels(self) -> int:
        """Channels of a token, D."""
        return self.channels * self.patch**2


MARSize = Literal["base", "large", "huge"]
SIZES: dict[MARSize, MARConfig] = {
    "base": MARConfig(),
    "large": MARConfig(width=1024, depth=16, heads=16, head_width=1280, head_depth=8),
    "huge": MARConfig(width=1280, depth=20, heads=16, head_width=1536, head_depth=12),
}


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, asking: Tensor | None = None) -> Tensor:
        """Self-attention over x [R, L, W]. keep, bool [R, 1, 1, L]: positions to attend to. asking
        [R, M, W]: the queries; by default x.
        """
        if asking is None:
            q, k, v = self._heads(self.qkv(x), 3)
        else:
            width = x.shape[-1]
            weight = self.qkv.weight
            bias = self.qkv.bias
            (q,) = self._heads(F.linear(asking, weight[:width], bias[:width]), 1)
            k, v = self._heads(F.linear(x, weight[width:], bias[width:]), 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[R, L, parts · W] → [R, heads, L, W / heads] each."""
        return tuple(x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4))


class Block(nn.Module):
    """A pre-norm transformer block as in ViT."""

    def __init__(self, config: MARConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.attn = Attention(width, config.heads)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        hidden = int(width * config.mlp_ratio)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, width))
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, only: Tensor | None = None) -> Tensor:
        """See `Attention`. Returns all positions, or `only` these, int64 [R, M]."""
        normed = self.norm1(x)
        if only is None:
            x = x + self.attn(normed, mask)
        else:
            x = _take(x, only) + self.attn(normed, mask, _take(normed, only))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TimeEmbedding(nn.Module):
    """Sinusoidal embedding of the time step, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Time steps of the training process, int64 [N] → [N, W]."""
        half = _FREQUENCIES // 2
        indices = torch.arange(half, dtype=torch.float32, device=t.device)
        rates = torch.exp(-math.log(10000) * indices / half)
        angles = t.float().unsqueeze(-1) * rates
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        out: Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return out


class HeadBlock(nn.Module):
    """Residual MLP with adaptive layer norm (adaLN): shift, scale and gate from the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, EPSILON)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """X [N, W] and the output of `adaLN_modulation`, [N, 3W] → [N, W]."""
        shift, scale, gate = modulation.chunk(3, -1)
        normed = torch.addcmul(shift, self.in_ln(x), 1 + scale)
        return torch.addcmul(x, gate, self.mlp(normed))


class HeadOutput(nn.Module):
    """Adaptive layer norm, then a linear map."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, EPSILON, elementwise_affine=False)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """X [N, W] and the output of `adaLN_modulation`, [N, 2W] → [N, out]."""
        shift, scale = modulation.chunk(2, -1)
        normed = torch.addcmul(shift, self.norm_final(x), 1 + scale)
        out: Tensor = self.linear(normed)
        return out


class DiffusionHead(nn.Module):
    """Predicts the noise of a token, and its variance as an interpolation between two bounds, from
    the decoder's output for the token.
    """

    def __init__(self, channels: int, condition: int, width: int, depth: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.final_layer = HeadOutput(width, 2 * channels)

    def forward(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        """X [N, D], time steps int64 [N], condition [N, W] → noise and variance [N, 2D]."""
        return self.predict(x, self.modulations(self.time_embed(t) + self.cond_embed(condition)))

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """Shift, scale and gate of each layer, from the sum of the embeddings of time and
        condition: [..., W] → [..., 3W or 2W] each.

        This is more than half of the head's work and does not depend on x, so a sampler computes it
        for many steps at once.
        """
        layers = [*self.res_blocks, self.final_layer]
        return [layer.adaLN_modulation(embedding) for layer in layers]

    def predict(self, x: Tensor, modulations: list[Tensor]) -> Tensor:
        """X [N, D] → noise and variance [N, 2D]."""
        x = self.input_proj(x)
        for block, modulation in zip(self.res_blocks, modulations[:-1], strict=True):
            x = block(x, modulation)
        out: Tensor = self.final_layer(x, modulations[-1])
        return out


class MAR(nn.Module):
    """The whole network. Tokens are in decoding order; `order` gives their positions in the image.

    Raises:
        TemperaError: the width is not a multiple of the number of heads.
    """

    def __init__(self, config: MARConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise TemperaError(
                f"width={config.width} is not divisible by the number of heads, {config.heads}: "
                "change one of the two."
            )
        self.config = config
        width = config.width
        slots = config.buffer + config.length
        self.class_emb = nn.Embedding(config.classes, width)
        self.fake_latent = nn.Parameter(torch.zeros(1, width))
        self.z_proj = nn.Linear(config.token_channels, width)
        self.z_proj_ln = nn.LayerNorm(width, EPSILON)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots, width))
        self.encoder_blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.encoder_norm = nn.LayerNorm(width, EPSILON)
        self.decoder_embed = nn.Linear(width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots, width))
        self.decoder_blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.decoder_norm = nn.LayerNorm(width, EPSILON)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, config.length, width))
        head = DiffusionHead(config.token_channels, width, config.head_width, config.head_depth)
        self.diffloss = nn.ModuleDict({"net": head})

    @property
    def head(self) -> DiffusionHead:
        """The diffusion head."""
        return self.diffloss["net"]  # type: ignore[return-value]

    def class_embedding(self, labels: Tensor, drop: Tensor) -> Tensor:
        """Labels int64 [R] → [R, W]; the null class where `drop`, bool [R], is True."""
        return torch.where(drop.unsqueeze(-1), self.fake_latent, self.class_emb(labels))

    def forward(
        self, tokens: Tensor, order: Tensor, lengths: Tensor, embedding: Tensor, indices: Tensor
    ) -> Tensor:
        """Compute the diffusion head's conditions.

        Args:
            tokens: the first K tokens of the order, float [R, K, D], with K ≥ max(`lengths`).
            order: position in the image of each place of the order, int64 [R, T].
            lengths: number of valid tokens, int64 [R].
            embedding: `class_embedding`, [R, W].
            slots: places of the order to predict, int64 [R, M].

        Returns:
            [R, M, W].
        """
        buffer = self.config.buffer
        count = tokens.shape[1]
        real = torch.arange(count, device=tokens.device) < lengths.unsqueeze(1)
        mask = F.pad(real, (buffer, 0), value=True)[:, None, None]
        where = order[:, :count]
        class_tokens = embedding.unsqueeze(1).expand(-1, buffer, -1)
        x = torch.cat([class_tokens, self.z_proj(tokens)], dim=1)
        x = self.z_proj_ln(x + _rows(self.encoder_pos_embed_learned, where, buffer))
        for block in self.encoder_blocks:
            x = block(x, mask)
        x = self.decoder_embed(self.encoder_norm(x))
        x = self._whole(x, where, real) + self.decoder_pos_embed_learned
        *blocks, last = self.decoder_blocks
        for block in blocks:
            x = block(x)
        predicted = order.gather(1, indices)
        x = last(x, only=buffer + predicted)  # its other positions are not used
        out: Tensor = self.decoder_norm(x) + self.diffusion_pos_embed_learned[0][predicted]
        return out

    def _whole(self, x: Tensor, where: Tensor, real: Tensor) -> Tensor:
        """Scatter encoded tokens to their positions in the image and fill the rest with mask
        tokens: [R, buffer + K, W] → [R, buffer + T, W].
        """
        buffer = self.config.buffer
        length = self.config.length
        masked = self.mask_token.to(x.dtype).expand(len(x), length + 1, -1)
        # tokens that are not valid go to a spare position
        slots = torch.where(real, where, length).unsqueeze(-1).expand(-1, -1, x.shape[-1])
        image = masked.scatter(1, slots, x[:, buffer:])[:, :length]
        return torch.cat([x[:, :buffer], image], dim=1)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """[R, L, W], int64 [R, M] → [R, M, W]."""
    return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _rows(table: Tensor, where: Tensor, buffer: int) -> Tensor:
    """Position embeddings of the buffer and of places in the image: [1, buffer + T, W], int64 [R,
    K] → [R, buffer + K, W].
    """
    of_buffer = table[:, :buffer].expand(len(where), -1, -1)
    of_image = table[0, buffer:][where]
    return torch.cat([of_buffer, of_image], dim=1)


def load_mar(
    weights: str,
    files: list[str],
    hub: str,
    size: MARSize = "base",
    config: MARConfig | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> MAR:
    """Load a MAR with published weights; the moving average if a file has both.

    Args:
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        size: `base`, `large` or `huge`.
        config: sizes to use instead of `size`.
        device, dtype: device and dtype of random weights; published weights keep those of their
            files.

    Raises:
        TemperaError: the files are missing or do not fit.
    """
    sizes = config or SIZES[size]
    published = PretrainedFiles(weights, files, hub)
    untold = {"heads": sizes.heads, "norm_eps": EPSILON, "hidden_act": "gelu"}
    return load_pretrained(lambda: MAR(sizes), published, device=device, dtype=dtype, untold=untold)


def read_mar(directory: str | Path) -> MAR:
    """The network saved in `directory` as config.json and model.safetensors, in evaluation mode."""
    network = read_network(directory, lambda values: MAR(parse_sizes(MARConfig, values)))
    return network.eval().requires_grad_(False)
