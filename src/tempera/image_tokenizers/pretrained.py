"""The published image tokenizers of LlamaGen and of Chameleon, both of them a `VQModel`."""

from typing import Any

import torch

from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.image_tokenizers.vq import CHAMELEON, VQConfig, VQModel, from_vqgan
from tempera.runtime.pretrained import PretrainedFiles, fill, on_meta, randomise, read

OPTION = "model.tokenizer_weights"


def load_llamagen_tokenizer(
    weights: str, files: list[str], hub: str, config: VQConfig | None = None
) -> VQModel:
    """LlamaGen's VQ-16, or another of its sizes, in its official layout; see
    `tempera.runtime.pretrained.PretrainedFiles`.
    """
    return _load(PretrainedFiles(weights, files, hub, OPTION), config or VQConfig(), vqgan=False)


def load_chameleon_tokenizer(
    weights: str, files: list[str], hub: str, lines: bool, config: VQConfig | None = None
) -> VQModel | LinedTokenizer:
    """Chameleon's VQGAN, encoder and decoder (which Hugging Face's has not), from `vqgan.ckpt`.

    Args:
        lines: whether the target ends every line of codes with a token of its own.
    """
    vq = _load(PretrainedFiles(weights, files, hub, OPTION), config or CHAMELEON, vqgan=True)
    return LinedTokenizer(vq) if lines else vq


def _load(release: PretrainedFiles, config: VQConfig, vqgan: bool) -> VQModel:
    model: Any = on_meta(lambda: VQModel(config))
    if release.random:
        randomise(model, torch.device("cpu"), torch.float32)
    else:
        found = release.find()
        state = read(found)
        fill(
            model,
            from_vqgan(state, len(config.decoder_multipliers)) if vqgan else state,
            str(found[0]),
        )
    vq: VQModel = model
    return vq
