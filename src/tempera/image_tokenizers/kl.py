"""The image tokenizer behind continuous tokens: the KL autoencoder of latent diffusion (Rombach et
al. 2022), as MAR trained it (KL-16).

Its networks are those of the VQ tokenizer (`tempera.image_tokenizers.vq`), but latents are vectors
drawn from N(mean, std²), with 16 channels in the official size, scaled to about unit variance.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tempera.image_tokenizers.vq import VQConfig, decoder, encoder, from_vqgan
from tempera.runtime.network_directory import parse_sizes, read_network
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained


@dataclass(frozen=True)
class KLConfig:
    """Sizes; the defaults are MAR's KL-16.

    Attributes:
        networks: encoder and decoder; `z_channels` is the number of the latents' channels.
        scale: latents are multiplied by it.
        patch: latents along each side of a token.
    """

    networks: VQConfig = field(default_factory=lambda: VQConfig(z_channels=16))
    scale: float = 0.2325
    patch: int = 1


class KLModel(nn.Module):
    """Encoder and decoder. Parameter names are those of `kl16.ckpt`, except for the blocks
    (`tempera.image_tokenizers.vq.from_vqgan`).
    """

    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.networks.z_channels
        self.encoder = encoder(replace(config.networks, z_channels=2 * channels))
        self.decoder = decoder(config.networks)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] in [−1, 1] → mean and log-variance of their latents, [B, C, h, w]
        each, before scaling.
        """
        mean, log_variance = self.quant_conv(self.encoder(images)).chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)

    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Images → tokens [B, h, w, D]: the latents' means, or, with standard normal noise [B, C,
        h, w], draws.
        """
        mean, log_variance = self.moments(images)
        if noise is None:
            return self.tokens(mean)
        std = (0.5 * log_variance).exp()
        return self.tokens(mean + std * noise)

    def tokens(self, latents: Tensor) -> Tensor:
        """Latents [B, C, h·p, w·p] as `moments` describes them → tokens [B, h, w, D]."""
        return patchify(latents.permute(0, 2, 3, 1) * self.config.scale, self.config.patch)

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Tokens [B, h, w, D] → images [B, 3, H, W], about [−1, 1]."""
        latents = unpatchify(codes, self.config.patch) / self.config.scale
        latents = latents.permute(0, 3, 1, 2).to(self.post_quant_conv.weight.dtype)
        image: Tensor = self.decoder(self.post_quant_conv(latents))
        return image


def load_kl(weights: str, files: list[str], hub: str, config: KLConfig | None = None) -> KLModel:
    """A published KL tokenizer, `kl16.ckpt`; see `tempera.runtime.pretrained.PretrainedFiles`."""
    sizes = config or KLConfig()
    levels = len(sizes.networks.decoder_multipliers)
    return load_pretrained(
        lambda: KLModel(sizes),
        PretrainedFiles(weights, files, hub),
        lambda state: from_vqgan(state, levels),
        untold={"scale": sizes.scale, **sizes.networks.untold},
    )


def read_kl(directory: str | Path) -> KLModel:
    """The tokenizer in `directory`, saved as config.json and model.safetensors, in eval mode."""

    def build(values: dict[str, Any]) -> KLModel:
        return KLModel(parse_sizes(KLConfig, values))

    model = read_network(directory, build)
    return model.eval().requires_grad_(False)


def patchify(latents: Tensor, patch: int) -> Tensor:
    """Latents [B, h·p, w·p, C] → tokens [B, h, w, C·p²]."""
    batch, height, width, channels = latents.shape
    folded = latents.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return folded.permute(0, 1, 3, 5, 2, 4).flatten(3)


def unpatchify(tokens: Tensor, patch: int) -> Tensor:
    """The inverse of `patchify`."""
    batch, height, width, channels = tokens.shape
    folded = tokens.reshape(batch, height, width, channels // patch**2, patch, patch)
    return folded.permute(0, 1, 4, 2, 5, 3).reshape(batch, height * patch, width * patch, -1)
