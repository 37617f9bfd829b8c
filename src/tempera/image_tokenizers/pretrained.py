"""The published image tokenizers of LlamaGen, Janus-Pro and Chameleon, each a `VQModel`."""

from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.image_tokenizers.vq import CHAMELEON, VQConfig, VQModel, from_janus, from_vqgan
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained


def load_llamagen_tokenizer(
    weights: str, files: list[str], hub: str, config: VQConfig | None = None
) -> VQModel:
    """LlamaGen's VQ-16, or another of its sizes, in its official layout; see
    `tempera.runtime.pretrained.PretrainedFiles`.
    """
    sizes = config or VQConfig()
    return load_pretrained(lambda: VQModel(sizes), PretrainedFiles(weights, files, hub))


def load_chameleon_tokenizer(
    weights: str, files: list[str], hub: str, lines: bool, config: VQConfig | None = None
) -> VQModel | LinedTokenizer:
    """Chameleon's VQGAN from `vqgan.ckpt`, with the decoder that Hugging Face's model lacks.

    Args:
        lines: whether the target ends every line of codes with an extra token.
    """
    sizes = config or CHAMELEON
    vq = load_pretrained(
        lambda: VQModel(sizes),
        PretrainedFiles(weights, files, hub),
        lambda state: from_vqgan(state, len(sizes.decoder_multipliers)),
    )
    return LinedTokenizer(vq) if lines else vq


def load_janus_tokenizer(
    weights: str, files: list[str], hub: str, config: VQConfig | None = None
) -> VQModel:
    """LlamaGen's VQ-16 as Janus-Pro has it, from the model's own file."""
    sizes = config or VQConfig()
    return load_pretrained(lambda: VQModel(sizes), PretrainedFiles(weights, files, hub), from_janus)
