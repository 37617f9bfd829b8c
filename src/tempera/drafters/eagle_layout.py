"""EAGLE drafts in the public layout of EAGLE-1's code (Li et al. 2024), which LANTERN's drafts
share (Jang et al. 2025): `embed_tokens`, `fc` and `layers.0`, beside a `config.json`. Such a draft
embeds image tokens itself: LANTERN's LlamaGen drafts have the target's head for it.

Shapes: R rows, T prefix tokens, H hidden size.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tempera.decoding.interfaces import drafts
from tempera.decoding.trees import Tree
from tempera.drafters.draft_files import DraftDtype, draft_to_decode, torch_dtype
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.runtime.files import read_json, sha256_file
from tempera.runtime.network_directory import CONFIG, PICKLE, WEIGHTS, draft_directory
from tempera.runtime.pretrained import RANDOM, PretrainedFiles, on_meta
from tempera.runtime.tensor_files import fill, read_tensors, renamed
from tempera.targets.llamagen import LlamaGen, permute_pairs
from tempera.targets.transformer import TransformerTarget

INPUTS = {256: "t2i", 576: "c2i", 1024: "t2i2"}
"""The `input_type` of LANTERN's LlamaGen drafts, by the number of image tokens."""


def load_eagle(path: str, target: TransformerTarget) -> EagleModel:
    """The EAGLE draft of a target.

    Args:
        path: a directory or hub repository (`owner/name`, or `owner/name@revision`) in our layout
            or in the public one; or `random`, see `draft_files.draft_to_decode`.
        target: the target it was trained for.

    Raises:
        TemperaError: it cannot be had or read, or is not of the target's sizes.
    """
    if path == RANDOM:
        return draft_to_decode(EagleModel, path, target)
    place = draft_directory(path)
    if "target" in read_json(place / CONFIG):
        return draft_to_decode(EagleModel, path, target)
    stated = _stated(place, target)
    file = next(file for file in (place / WEIGHTS, place / PICKLE) if file.is_file())
    tensors = _translated(read_tensors(file), target)

    def make() -> EagleModel:
        made = EagleModel.of(target.network, path, target.vocab_size, target.identity)
        made.is_public = True
        made.reads_captions = not _is_llamagen(target.network)
        sizes = target.network.config
        made.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        layer: Any = made.layer
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.eps = stated["rms_norm_eps"]
        if "layer.input_layernorm.weight" not in tensors:
            layer.input_layernorm = nn.Identity()
        if "fc.bias" not in tensors:
            made.fc.register_parameter("bias", None)
        return made

    draft = on_meta(make)
    fill(draft, tensors, file)
    draft.identity = sha256_file(file)[:16]
    return draft


def build_eagle(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The EAGLE drafter of a trained draft.

    Args:
        path: see `load_eagle`.
        target: the target it was trained for.
        tree: static tree drafted every round.
        dtype: see `draft_pass.DraftPass`.

    Raises:
        TemperaError: it is no valid draft, or one for another target.
    """
    network = load_eagle(path, target)
    model = EagleDraft(network, target, dtype=torch_dtype(dtype))
    return StaticTreeDrafter(model, tree)


@drafts(lambda depth, nodes, **_: min(depth, nodes))
def build_eagle2(
    path: str,
    target: TransformerTarget,
    branches: int = 10,
    depth: int = 5,
    nodes: int = 59,
    dtype: DraftDtype | None = None,
) -> DynamicTreeDrafter:
    """The EAGLE-2 drafter of a trained EAGLE draft. See `dynamic_tree.DynamicTreeDrafter` and
    `build_eagle`.

    Raises:
        TemperaError: it is no valid draft, or one for another target, or the tree
            is impossible.
    """
    network = load_eagle(path, target)
    model = EagleDraft(network, target, torch_dtype(dtype), ranks=True)
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)


def _stated(place: Path, target: TransformerTarget) -> dict[str, Any]:
    """What `config.json` states of which the tensors' sizes tell nothing; all but the epsilon of
    the norms must be as in the target.
    """
    sizes = target.network.config
    wanted = {"num_attention_heads": sizes.num_attention_heads}
    if _is_llamagen(target.network):
        kind = "llama"
        wanted["rope_theta"] = sizes.rope_base
        wanted |= {"input_type": INPUTS[sizes.length]} if sizes.length in INPUTS else {}
    else:
        kind = sizes.model_type.partition("_text")[0]
        wanted["rope_theta"] = sizes.rope_parameters["rope_theta"]
    files = PretrainedFiles(str(place), (WEIGHTS, PICKLE), "")
    stated = files.stated({"rms_norm_eps": 1e-6, **wanted}, kind)
    for name, value in wanted.items():
        if stated[name] != value:
            raise TemperaError(
                f"the draft in {place} has {name}={stated[name]}, the target {value}: give a draft "
                "for this target, or choose its model."
            )
    return stated


def _translated(tensors: Mapping[str, Tensor], target: TransformerTarget) -> dict[str, Tensor]:
    """The tensors by our names; LlamaGen's rotary pairs are interleaved there."""
    found = renamed(tensors, {r"^layers\.0\.": "layer."})
    for name in found:
        if _is_llamagen(target.network) and re.search(r"\.[qk]_proj\.", name):
            found[name] = permute_pairs(found[name], target.network.config.num_attention_heads)
    return found


def _is_llamagen(network: Any) -> bool:
    """Whether it is LlamaGen's, whose drafts are LANTERN's."""
    return isinstance(network, LlamaGen)
