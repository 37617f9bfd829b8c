"""EAGLE drafts in the public layout of EAGLE-1's code (Li et al. 2024), which LANTERN's drafts
share (Jang et al. 2025): `embed_tokens`, `fc` and `layers.0`, beside a `config.json`. Such a draft
embeds image tokens itself: LANTERN's LlamaGen drafts have the target's head for it.

Shapes: R rows, T prefix tokens, H hidden size.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tempera.errors import TemperaError
from tempera.runtime.network_directory import PICKLE, WEIGHTS
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.tensor_files import read_tensors, renamed
from tempera.targets.llamagen import LlamaGen, permute_pairs
from tempera.targets.transformer import TransformerTarget

INPUTS = {256: "t2i", 576: "c2i", 1024: "t2i2"}
"""The `input_type` of LANTERN's LlamaGen drafts, by the number of image tokens."""


class PublicDraft(NamedTuple):
    """An EAGLE draft as public code stores it.

    Attributes:
        file: its weights.
        tensors: by the names of `eagle_network.EagleModel`.
        eps: epsilon of its norms.
    """

    file: Path
    tensors: dict[str, Tensor]
    eps: float


def read_public(directory: Path, target: TransformerTarget) -> PublicDraft:
    """Read the draft in a directory.

    Raises:
        TemperaError: it cannot be read, or is not of the target's sizes.
    """
    eps = _stated(directory, target)["rms_norm_eps"]
    file = next(file for file in (directory / WEIGHTS, directory / PICKLE) if file.is_file())
    return PublicDraft(file, _translated(read_tensors(file), target), eps)


def _stated(directory: Path, target: TransformerTarget) -> dict[str, Any]:
    """What `config.json` states of which the tensors' sizes tell nothing; all but the epsilon of
    the norms must be as in the target.
    """
    sizes = target.network.config
    wanted = {"num_attention_heads": sizes.num_attention_heads}
    if is_llamagen(target.network):
        kind = "llama"
        wanted["rope_theta"] = sizes.rope_base
        wanted |= {"input_type": INPUTS[sizes.length]} if sizes.length in INPUTS else {}
    else:
        kind = sizes.model_type.partition("_text")[0]
        wanted["rope_theta"] = sizes.rope_parameters["rope_theta"]
    files = PretrainedFiles(str(directory), (WEIGHTS, PICKLE), "")
    stated = files.stated({"rms_norm_eps": 1e-6, **wanted}, kind)
    for name, value in wanted.items():
        if stated[name] != value:
            raise TemperaError(
                f"the draft in {directory} has {name}={stated[name]}, but the target has {value}: "
                "give a draft for this target, or choose its model."
            )
    return stated


def _translated(tensors: Mapping[str, Tensor], target: TransformerTarget) -> dict[str, Tensor]:
    """The tensors by our names; LlamaGen's rotary pairs are interleaved there."""
    found = renamed(tensors, {r"^layers\.0\.": "layer."})
    for name in found:
        if is_llamagen(target.network) and re.search(r"\.[qk]_proj\.", name):
            found[name] = permute_pairs(found[name], target.network.config.num_attention_heads)
    return found


def is_llamagen(network: Any) -> bool:
    """Whether it is LlamaGen's, whose drafts are LANTERN's."""
    return isinstance(network, LlamaGen)
