"""GLM-Image (Z.ai 2026): a GLM-4 decoder that draws the codes of a small preview, then those of the
image. Diffusion transformer, text encoder and autoencoder of diffusers' `GlmImagePipeline`, which
read the prompt as well, make the picture of them.

Weights are in the layout of Hugging Face's `GlmImageForConditionalGeneration`. Ids 0 … 16383 are
the codes themselves, 16384 starts an image; text ids follow. Sizes, positions and prompts are from
transformers' `models/glm_image`, sampling is from the model's repository.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.image_tokenizers.cosmos import UntrainedDecoder
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.runtime import huggingface
from tempera.runtime.files import reason
from tempera.runtime.hub import Repository
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained, note
from tempera.runtime.tensor_files import renamed
from tempera.targets.decoder_layer import LayerSizes
from tempera.targets.family import Asked, PromptedLM, Read, WrappedFamily, filled
from tempera.targets.prompt_state import PicturedText
from tempera.targets.rotary import MultimodalRotary
from tempera.targets.token_format import ModelSpec, patches

PATCH = 32
"""Pixels along each side of a code's patch."""
START = 16384


def glm_image(height: int = 1024, width: int = 1024, codes: int = 16384) -> ModelSpec:
    """GLM-Image's format: the prompt in the tokenizer's chat template, the two sizes in codes as
    text, and the start of the image. The preview has about 16×16 codes, in the proportions of the
    image. There is no unconditional row. Codes alone are drawn: transformers draws from all ids of
    the head, so that special ids, which must not come, count in its top-p.

    Args:
        height, width: pixels, multiples of 32.
        codes: size of the image codebook.

    Raises:
        TemperaError: a side is not a multiple of 32.
    """
    lines, columns = patches(height, PATCH, "height"), patches(width, PATCH, "width")
    small = int(math.sqrt(lines / columns) * 16), int(math.sqrt(columns / lines) * 16)
    sizes = f"<sop>{lines} {columns}<eop><sop>{small[0]} {small[1]}<eop>"
    return ModelSpec(
        lines,
        columns,
        codes,
        first_code=0,
        prompt=("{text}" + sizes, START),
        null=(),
        context=131072,
        preview=small,
        special=("<sop>", "<eop>"),
    )


class GlmImage(PromptedLM):
    """The part of GLM-Image that draws codes. For the arguments see `PromptedLM`."""

    def __init__(self, config: Any, sizes: LayerSizes, spec: ModelSpec) -> None:
        super().__init__(config, sizes, spec)
        rope = config.rope_parameters
        self.model.rotary = MultimodalRotary(
            sizes.head_dim,
            rope["rope_theta"],
            rope["mrope_section"],
            spec.grids,
            _turned(sizes.head_dim, rope),
        )
        self.lm_head = nn.Linear(sizes.width, config.vision_vocab_size, bias=False)


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Translate Hugging Face's names into those of `GlmImage`. Gate and up are apart; and the
    turned numbers of a head, which come first there, stand first in each of its halves
    (`rotary.Rotary`).
    """
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    result: dict[str, Tensor] = {}
    for name, tensor in renamed(state, {r"^model\.language_model\.": "model."}).items():
        if ".gate_up_proj." in name:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                result[name.replace("gate_up", part)] = piece
            continue
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{part}." in name:
                each = tensor.unflatten(0, (count, -1))
                turned = _turned(each.shape[1], sizes["rope_parameters"])
                tensor = each[:, _halves(each.shape[1], turned)].flatten(0, 1)
        result[name] = tensor
    return result


def _turned(head_dim: int, rope: Mapping[str, Any]) -> int:
    """How many numbers of a head are turned."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _halves(head_dim: int, turned: int) -> Tensor:
    """The order of a head's numbers in which those turned, the first ones, stand first in each
    half, int64 [head_dim].
    """
    turns, rest = torch.arange(turned), torch.arange(turned, head_dim)
    halves = zip(turns.chunk(2), rest.chunk(2), strict=False)
    return torch.cat([torch.cat(half) for half in halves]) if len(rest) else turns


PARTS = ("transformer", "text_encoder", "vae")
PIPELINE = "diffusers' pipeline (a transformer of 7B, a text encoder and an autoencoder)"
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

    factor = PATCH
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

        Raises:
            TemperaError: a prompt has pictures, whose codes the pipeline would need, too.
        """
        if any(isinstance(prompt, PicturedText) for prompt in prompts):
            raise TemperaError(
                "GlmDecoder cannot make pictures for prompts that contain pictures: run "
                "diffusers' pipeline inside tempera.wrapped.ids.installed, or call generate with "
                "images=False."
            )
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
    code. `instead_of`: see `UntrainedDecoder`.
    """

    factor = PATCH
    reads_prompts = True

    def __init__(self, config: GlmDecoderConfig, instead_of: str = "") -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.codebook_size
        self.colours = UntrainedDecoder(config.codebook_size, PATCH, instead_of)

    def decode_codes(self, codes: Tensor, prompts: Sequence[str] = ()) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, 32·h, 32·w]."""
        out: Tensor = self.colours(codes.unsqueeze(1))[:, :, 0].clamp(-1, 1)
        return out


def load_glm_decoder(
    weights: str,
    hub: str,
    steps: int = 50,
    guidance: float = 1.5,
    codes: int = 16384,
    dtype: torch.dtype = torch.float32,
) -> GlmDecoder | UntrainedGlmDecoder:
    """Load the parts of GLM-Image that make pictures, with diffusers.

    Args:
        weights, hub: see `PretrainedFiles`; `weights="random"` gives `UntrainedGlmDecoder`.
        steps: of the denoising.
        guidance: of the denoising.
        codes: number of codes.
        dtype: that weights are read in.

    Raises:
        TemperaError: diffusers is not installed, or the files are missing or not a pipeline's.
    """
    config = GlmDecoderConfig(codes, steps, guidance)
    files = PretrainedFiles(weights, FILES, hub)
    if files.random or note(files):
        nothing = PretrainedFiles("random", FILES, hub)
        instead_of = "" if files.random else PIPELINE
        return load_pretrained(lambda: UntrainedGlmDecoder(config, instead_of), nothing)
    kind = _pipeline_class()
    return GlmDecoder(_pipeline(kind, _pipeline_directory(weights, hub), dtype), config)


def _pipeline_directory(weights: str, hub: str) -> Path:
    """The directory of the pipeline, downloaded if `weights` is a repository.

    Raises:
        TemperaError: it is not a pipeline's.
    """
    repository = None if Path(weights).exists() else Repository.named(weights)
    directory = Path(weights) if repository is None else repository.snapshot(FILES)
    if not (directory / FILES[0]).is_file():
        command = Repository(hub).command(list(FILES), "DIR")
        raise TemperaError(
            f"{directory} contains no {FILES[0]}: get the pipeline with `{command}` and give "
            "model.tokenizer_weights=DIR, or random for patches of colour instead of pictures."
        )
    return directory


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


def _pipeline(kind: Any, directory: Path, dtype: torch.dtype) -> Any:
    """The pipeline of a class in a directory, without its autoregressive part.

    Raises:
        TemperaError: diffusers cannot read it.
    """
    try:
        pipeline = kind.from_pretrained(
            directory,
            vision_language_encoder=None,
            processor=None,
            local_files_only=True,
            dtype=dtype,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise TemperaError(
            f"{directory} is not GLM-Image's pipeline ({reason(problem)}): download it again."
        ) from problem
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _seed(codes: Tensor) -> int:
    """A seed of an image's codes."""
    digest = hashlib.sha256(repr(codes.tolist()).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def held_layout(height: int = 1024, width: int = 1024, image_prompts: bool = False) -> ModelSpec:
    """GLM-Image's format, also for prompts with pictures: they have no preview.

    Args:
        height, width: see `glm_image`.
        image_prompts: whether prompts have pictures.
    """
    spec = glm_image(height, width)
    if not image_prompts:
        return spec
    text = f"{{text}}<sop>{spec.lines} {spec.columns}<eop>"
    return replace(spec, prompt=(text, START), preview=None, pictures=True)


def _read(asked: Asked) -> Read:
    """Pictures are codes in GLM-Image's prompts. Their positions are those of the model's own code.

    Raises:
        TemperaError: the prompts ask for other images than the format's.
    """
    model, given = asked.model, asked.given
    grids, counts = given["image_grid_thw"], given["images_per_sample"]
    pictured = "pixel_values" in given
    wanted = [[1, *grid] for grid in reversed(asked.spec.grids)]
    parts = grids.split(counts.tolist()) if int(counts.sum()) == len(grids) else [grids]
    last = [part[-len(wanted) :].tolist() for part in parts]
    if pictured != asked.spec.pictures or last != [wanted] * len(asked.ids):
        what = "with pictures in them" if pictured else "of text alone"
        raise TemperaError(
            f"prompts {what} that ask for image_grid_thw={last[0]} are not what the model was "
            f"accelerated for: give tempera.accelerate image_prompts={pictured}, and the height "
            "and the width."
        )
    if not pictured:
        return Read(asked.ids)
    features = model.get_image_features(given["pixel_values"], grids, counts).pooler_output
    codes = model.get_image_tokens(features).flatten()
    ids = filled(asked.ids, model.config.image_token_id, codes)
    inner = model.model
    saved = inner._prefill_len, inner._cached_decode_position_ids
    positions, _ = inner.get_rope_index(ids, grids, counts, asked.mask)
    inner._prefill_len, inner._cached_decode_position_ids = saved
    return Read(ids, positions.transpose(0, 1))


GLM_IMAGE = WrappedFamily(
    name="glm_image",
    config=lambda **sizes: huggingface.GlmImageTextConfig(**sizes),
    layer={"output_bias": False, "four_norms": True},
    network=GlmImage,
    translate=translate,
    unused=("model.visual.", "model.vqmodel."),
    model_class="GlmImageForConditionalGeneration",
    preset="glm_image",
    decoder="model.language_model",
    decoders=("GlmImageTextModel",),
    embedding=("model.language_model.embed_tokens",),
    layouts={"glm_image": held_layout},
    stated=lambda model: {"codes": model.config.vq_config.num_embeddings},
    chat=True,
    given=("pixel_values", "image_grid_thw", "images_per_sample"),
    read=_read,
)
