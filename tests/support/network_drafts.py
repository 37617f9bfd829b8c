"""Drafters with tiny networks, one of each kind, that the same tests hold for."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tiny_networks import (
    GRID,
    TREE,
    VOCAB,
    captions,
    llamagen,
    tiny_dflash,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.dflash import DFlashDraft
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.medusa import MedusaDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.runtime.network_directory import write_network
from tempera.shapes.networks import TextEncoder
from tempera.targets.llamagen import LlamaGen
from tempera.targets.transformer import TransformerTarget

CHAIN = Tree.chain(4)
SIZES = 3, 3, 8
"""Branches, depth and nodes of EAGLE-2."""


def small_captions(prompts: list[str]) -> Any:
    """Fewer condition tokens of another width than the target's."""
    features, keep = captions(prompts)
    return features[:, 1:, :4] * keep[:, 1:, None], keep[:, 1:]


def small_network(vocab: int = VOCAB, grid: tuple[int, int] = GRID, seed: int = 0) -> LlamaGen:
    sizes = {"vocab_size": vocab, "grid": grid, "prefix_length": 4, "caption_dim": 4}
    sizes |= {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 1}
    return llamagen(seed, num_hidden_layers=2, **sizes)


def small_model(
    sampling: Sampling | None = None,
    seed: int = 3,
    grid: tuple[int, int] = GRID,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> TransformerTarget:
    """A model of another size with another prefix."""
    network = small_network(vocab, grid, seed).to(device, dtype)
    return tiny_target(sampling, network=network, conditioner=small_captions, **options)


def write_smaller(place: Path, vocab: int = VOCAB, grid: tuple[int, int] = GRID) -> None:
    """A smaller model for `load_smaller`."""
    network, encoder = small_network(vocab, grid), TextEncoder(4, 4, 1, 1)
    write_network(place, network.state_dict(), asdict(network.config))
    write_network(place / "text_encoder", encoder.state_dict(), encoder.config)


def eagle(target: Any, tree: Tree, features: tuple[int, ...] = (), dtype: Any = None) -> Any:
    model = EagleDraft(tiny_eagle(target, features=features), target, dtype=dtype)
    return StaticTreeDrafter(model, tree)


def eagle3(target: Any, tree: Tree, dtype: Any = None, features: tuple[int, ...] = ()) -> Any:
    model = EagleDraft(tiny_eagle3(target, features=features), target, dtype)
    return StaticTreeDrafter(model, tree)


def eagle2(target: Any, dtype: Any = None, sizes: tuple[int, ...] = SIZES) -> Any:
    model = EagleDraft(tiny_eagle(target), target, dtype, ranks=True)
    return DynamicTreeDrafter(model, target.vocab_size, *sizes)


def parallel(target: Any, tree: Tree, dtype: Any = None, **sizes: Any) -> Any:
    model = ParallelDraft(tiny_parallel(target, **sizes), target, dtype)
    return StaticTreeDrafter(model, tree)


def dflash(target: Any, tree: Tree, dtype: Any = None, **sizes: Any) -> Any:
    model = DFlashDraft(tiny_dflash(target, **sizes), target, dtype)
    return StaticTreeDrafter(model, tree)


def medusa(target: Any, tree: Tree, dtype: Any = None, **sizes: int) -> Any:
    network = tiny_medusa(target, **sizes)
    return StaticTreeDrafter(MedusaDraft(network, target, dtype), tree)


def independent(target: Any, tree: Tree, dtype: Any = None, **options: Any) -> Any:
    draft = small_model(dtype=dtype or target.dtype, device=target.device, **options)
    if target.compiled:
        draft.compile()
    return StaticTreeDrafter(IndependentDraft(draft, target), tree)


DRAFTERS = {
    "eagle": lambda target, dtype=None: eagle(target, CHAIN, (), dtype),
    "eagle tree": lambda target, dtype=None: eagle(target, TREE, (0, 1), dtype),
    "eagle2": eagle2,
    "eagle3": lambda target, dtype=None: eagle3(target, CHAIN, dtype),
    "eagle3 tree": lambda target, dtype=None: eagle3(target, TREE, dtype, (0, 1)),
    "parallel": lambda target, dtype=None: parallel(target, CHAIN, dtype, features=(0, 1)),
    "parallel tree": lambda target, dtype=None: parallel(target, TREE, dtype),
    "dflash": lambda target, dtype=None: dflash(target, CHAIN, dtype, features=(0, 1)),
    "dflash tree": lambda target, dtype=None: dflash(target, TREE, dtype, rank=4),
    "medusa": lambda target, dtype=None: medusa(target, CHAIN, dtype),
    "independent": lambda target, dtype=None: independent(target, TREE, dtype),
}
