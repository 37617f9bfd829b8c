"""Pictures of GLM-Image's codes, by the diffusion transformer, text encoder and autoencoder of
diffusers' `GlmImagePipeline`, which read the prompt as well.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.image_tokenizers.cosmos import UntrainedDecoder
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.runtime.files import reason
from tempera.runtime.hub import Repository
from tempera.runtime.pretrained import PretrainedFiles, is_noted, load_pretrained

FACTOR = 32
PARTS = ("transformer", "text_encoder", "vae")
FILES = ("model_index.json", "tokenizer/*", "scheduler/*", *(f"{part}/*" for part in PARTS))


@dataclass(frozen=True)
class GlmDecoderConfig:
    """Number of codes, denoising steps, and guidance of the denoising."""

    codebook_size: int = 16384
    steps: int = 50
    guidance: float = 1.5


class GlmDecoder(ImageTokenizer):
    """Codes and prompts → pictures. There is no encoder: GLM-Image's own is a vision transformer
    for images as prompts.

    Args:
        pipeline: a `diffusers.GlmImagePipeline`, whose autoregressive part is not used.
        config: its options.
    """

    factor = FACTOR
    reads_prompts = True

    def __init__(self, pipeline: Any, config: GlmDecoderConfig) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.config = config
        self.vocab_size = config.codebook_size
        self.parts = nn.ModuleList(getattr(pipeline, part) for part in PARTS)

    def decode_codes(self, codes: Tensor, prompts: Sequence[str]) -> Tensor:
        """Codes int64 [B, h, w] and their B prompts → images [B, 3, 32·h, 32·w] in [−1, 1]. The
        noise of a picture depends on its codes alone.
        """
        height, width = self.image_size((codes.shape[1], codes.shape[2]))
        fine = codes.repeat_interleave(2, -1).repeat_interleave(2, -2)
        output = self.pipeline(
            prompt=list(prompts),
            height=height,
            width=width,
            prior_token_ids=fine.flatten(1),
            num_inference_steps=self.config.steps,
            guidance_scale=self.config.guidance,
            generator=[torch.Generator().manual_seed(_seed(image)) for image in codes],
            output_type="np",
        )
        pictures = torch.from_numpy(output.images).to(codes.device)
        return pictures.permute(0, 3, 1, 2) * 2 - 1


class UntrainedGlmDecoder(ImageTokenizer):
    """What stands in for the pipeline with `weights=random`: a colour of 32×32 pixels for every
    code.
    """

    factor = FACTOR
    reads_prompts = True

    def __init__(self, config: GlmDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.codebook_size
        self.colours = UntrainedDecoder(config.codebook_size, FACTOR)

    def decode_codes(self, codes: Tensor, prompts: Sequence[str] = ()) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, 32·h, 32·w]."""
        out: Tensor = self.colours(codes.unsqueeze(1))[:, :, 0].clamp(-1, 1)
        return out


def load_glm_decoder(
    weights: str, hub: str, steps: int = 50, guidance: float = 1.5, codes: int = 16384
) -> GlmDecoder | UntrainedGlmDecoder:
    """Load the parts of GLM-Image that make pictures, with diffusers.

    Args:
        weights, hub: see `PretrainedFiles`; `weights="random"` gives `UntrainedGlmDecoder`.
        steps: of the denoising.
        guidance: of the denoising.
        codes: number of codes.

    Raises:
        TemperaError: diffusers is not installed, or the files are missing or not a pipeline's.
    """
    config = GlmDecoderConfig(codes, steps, guidance)
    files = PretrainedFiles(weights, FILES, hub)
    if files.random or is_noted(files):
        nothing = PretrainedFiles("random", FILES, hub)
        return load_pretrained(lambda: UntrainedGlmDecoder(config), nothing)
    kind = _pipeline_class()
    return GlmDecoder(_pipeline(kind, _place(weights, hub)), config)


def _place(weights: str, hub: str) -> Path:
    """The directory of the pipeline, downloaded if `weights` is a repository.

    Raises:
        TemperaError: it is not a pipeline's.
    """
    repository = None if Path(weights).exists() else Repository.named(weights)
    place = Path(weights) if repository is None else repository.snapshot(FILES)
    if not (place / FILES[0]).is_file():
        command = Repository(hub).command(list(FILES), "DIR")
        raise TemperaError(
            f"{place} holds no {FILES[0]}: get the pipeline with `{command}` and give "
            "model.tokenizer_weights=DIR, or random for patches of colour instead of pictures."
        )
    return place


def _pipeline_class() -> Any:
    """`diffusers.GlmImagePipeline`.

    Raises:
        TemperaError: diffusers is not installed.
    """
    try:
        from diffusers import GlmImagePipeline
    except ImportError as problem:
        raise TemperaError(
            "GLM-Image's pictures need diffusers: pip install 'tempera-decoding[diffusers]', or "
            "give model.tokenizer_weights=random for patches of colour instead of pictures."
        ) from problem
    return GlmImagePipeline


def _pipeline(kind: Any, place: Path) -> Any:
    """The pipeline of a class in a directory, without its autoregressive part.

    Raises:
        TemperaError: diffusers cannot read it.
    """
    try:
        pipeline = kind.from_pretrained(
            place, vision_language_encoder=None, processor=None, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise TemperaError(
            f"{place} is not GLM-Image's pipeline ({reason(problem)}): get it again."
        ) from problem
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _seed(codes: Tensor) -> int:
    """A seed of an image's codes."""
    digest = hashlib.sha256(repr(codes.tolist()).encode()).digest()
    return int.from_bytes(digest[:7], "big")
