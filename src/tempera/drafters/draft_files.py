"""Draft networks in files, and the drafts that decoding and training start from."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from tempera.decoding.trees import Tree
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.runtime.files import sha256_file
from tempera.runtime.installation import command
from tempera.runtime.network_directory import (
    CONFIG,
    WEIGHTS,
    draft_directory,
    parse_sizes,
    read_network,
    sized_network,
    write_network,
)
from tempera.runtime.network_identity import UNNAMED
from tempera.runtime.pretrained import RANDOM, are_sizes_enough, on_meta, randomise
from tempera.targets.transformer import TransformerTarget

log = logging.getLogger("tempera")
Network = TypeVar("Network", bound=DraftNetwork)
DraftDtype = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""Names of dtypes that a draft's weights can have."""


def torch_dtype(name: DraftDtype | None) -> torch.dtype | None:
    """The dtype of a name."""
    return None if name is None else getattr(torch, name)


def save_draft(network: DraftNetwork, directory: str | Path) -> None:
    """Write `config.json` and `model.safetensors` atomically.

    Raises:
        TemperaError: the directory cannot be written.
    """
    write_network(Path(directory), network.state_dict(), asdict(network.config))


def read_draft(kind: type[Network], directory: str | Path) -> Network:
    """Load a draft that `save_draft` wrote, from a directory or a repository of the hub; its sizes
    alone where they are enough.

    Raises:
        TemperaError: a file is missing, truncated, a pickle, or does not hold such a draft.
    """
    local = draft_directory(directory)
    what = f"a draft of type {kind.drafter}"

    def build(values: dict[str, Any]) -> Network:
        if "target" in values and "layer_sizes" not in values:
            raise _earlier(kind, values.get("model"), local)
        return kind(parse_sizes(kind.config_type, values))

    if are_sizes_enough():
        return sized_network(local, build, what)
    network = read_network(local, build, what=what)
    network.identity = sha256_file(local / WEIGHTS)[:16]
    return network


def _earlier(kind: type[DraftNetwork], model: object, directory: Path) -> TemperaError:
    """The error for a draft whose config.json an earlier version wrote."""
    trained = f"{command('train')} model={model} draft={kind.drafter}"
    return TemperaError(
        f"{directory / CONFIG} was written by an earlier version and has no layer_sizes: train "
        "the draft again, or replace this file with the config.json of a new draft with the same "
        f"options (`{trained} training.steps=1 hydra.run.dir=DIR` makes one) and keep this one's "
        "target."
    )


def draft_to_decode(
    kind: type[Network], path: str, target: TransformerTarget, **sizes: Any
) -> Network:
    """The draft of a directory; if `path` is `random`, an untrained one, with a warning. It costs
    as much as a trained one of these sizes, but almost none of its tokens are accepted.

    Args:
        kind: the class of the network.
        path: see `draft_directory`; or `random`.
        target: the draft's target.
        sizes: further fields of an untrained draft's configuration.
    """
    if path != RANDOM:
        local = draft_directory(path)
        other = kind.of_other_layout(local, target)
        return read_draft(kind, local) if other is None else other
    network = on_meta(
        lambda: kind.of(
            target.network,
            "any model: it is random",
            target.vocab_size,
            target.identity,
            **sizes,
        )
    )
    if not are_sizes_enough():
        log.warning(
            "draft: random weights, to measure the cost of drafting; almost none of its tokens "
            "will be accepted"
        )
        randomise(network, target.device, torch.float32)
    return network


def builder_of(kind: type[DraftNetwork]) -> Callable[..., StaticTreeDrafter]:
    """The function that builds the drafter of a trained draft network, for a `_target_`: of chains
    and static trees, with the draft model that the network names.
    """

    def build(
        path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
    ) -> StaticTreeDrafter:
        """Build the drafter.

        Args:
            path: a directory or hub repository (`owner/name`, or `owner/name@revision`) with
                `config.json` and `model.safetensors`; or `random`, see `draft_to_decode`.
            target: the target it was trained for.
            tree: static tree drafted every round.
            dtype: see `draft_pass.DraftPass`.

        Raises:
            TemperaError: it contains no valid draft, or one for another target or for shorter
                chains.
        """
        sizes = {"length": max(2, tree.max_depth)} if "length" in kind.sizes else {}
        network = draft_to_decode(kind, path, target, **sizes)
        return StaticTreeDrafter(kind.draft_model(network, target, torch_dtype(dtype)), tree)

    build.__name__ = build.__qualname__ = f"build_{kind.drafter}"
    build.__module__ = kind.__module__
    build.kind = kind  # type: ignore[attr-defined]
    return build


def draft_to_train(
    kind: type[Network],
    target: Any,
    model: str,
    start: str | None,
    features: Sequence[int],
    **sizes: Any,
) -> Network:
    """The draft that training starts from: that in the directory `start`, or an untrained one.

    Args:
        kind: the class of the network.
        target: a `TransformerTarget`.
        model: the target's name, shown in messages.
        start: directory of a trained draft; by default the weights are random.
        features, sizes: see `DraftNetwork.of`; a draft from `start` has its own.

    Raises:
        TemperaError: it has more slots than an image has tokens, or names no draft model.
    """
    if not hasattr(kind, "draft_model"):
        raise TemperaError(
            f"{kind.__name__} does not say how to draft with it: set its class attribute "
            "`draft_model` to a DraftModel that is made from a network and a target"
        )
    if start is not None:
        return read_draft(kind, start)
    network = kind.of(
        target.network, model, target.vocab_size, target.identity, tuple(features), **sizes
    )
    if network.slots > target.length:
        raise TemperaError(
            f"length={network.slots} is not valid: an image has {target.length} tokens, so "
            f"give 2 to {target.length}."
        )
    return network


def check_target(network: DraftNetwork, target: TransformerTarget) -> None:
    """Refuse a target that a draft was not trained for.

    Raises:
        TemperaError: it has no hidden states, or hidden size, vocabulary or identity differ, if the
            target's is known.
    """
    if not hasattr(target, "head"):
        raise TemperaError(
            "this method's draft network reads the hidden states of a TransformerTarget, but "
            f"{type(target).__name__} is not one: give method=ar, a method that needs no draft, "
            "such as sjd, or a drafter of your own",
            option="method",
        )
    config = network.config
    sizes = {
        "hidden size": (config.layer_sizes.width, target.head.hidden_size),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    for what, (own, other) in sizes.items():
        if own != other:
            raise TemperaError(
                f"the draft (made for {config.model}) has {what} {own}, but the target has "
                f"{other}: give a draft for this target."
            )
    if config.target != target.identity != UNNAMED and not are_sizes_enough():
        raise TemperaError(
            f"the draft was trained for model={config.model} with weights {config.target}, but "
            f"the target's weights are {target.identity}: "
            "train a draft for this target, or load the target it was trained for."
        )
