"""Networks stored as a directory: `config.json` and `model.safetensors`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, reason, replacing, sha256_file, write_json
from tempera.runtime.hub import Repository
from tempera.runtime.tensor_files import fill, read_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PICKLE = "pytorch_model.bin"
NETWORK = "such a network"
WHOLE = "give a complete directory that tempera has written"
"""What to do where a network's files are missing."""

NetworkType = TypeVar("NetworkType", bound=nn.Module)
Sizes = TypeVar("Sizes")


def weights_hash(directory: Path) -> str | None:
    """16 hexadecimal digits that identify the weights in a directory; None if it holds none."""
    path = directory / WEIGHTS
    return sha256_file(path)[:16] if path.is_file() else None


def write_network(
    directory: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str = ""
) -> None:
    """Write configuration and weights, each file atomically.

    Args:
        directory: created if necessary.
        state: the weights; no two tensors may share memory.
        config: the configuration that `read_network` builds the network from.
        prefix: prefix of both file names, such as open_clip's `open_clip_`.

    Raises:
        TemperaError: the directory cannot be written.
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with replacing(directory / f"{prefix}{WEIGHTS}") as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    write_json(directory / f"{prefix}{CONFIG}", config)


def read_network(
    directory: str | Path,
    build: Callable[[dict[str, Any]], NetworkType],
    translate: Callable[[dict[str, Tensor], NetworkType], dict[str, Tensor]] | None = None,
    what: str = NETWORK,
) -> NetworkType:
    """Read a network that `write_network` wrote. It computes in float32, whatever the dtype of its
    file.

    Args:
        directory: contains `config.json` and `model.safetensors`.
        build: contents of `config.json` → a network with random weights.
        translate: tensors in the file's layout, and the network → tensors in the network's layout.
        what: what errors call the network.

    Raises:
        TemperaError: a file is missing, truncated, a pickle, or does not hold such a network.
    """
    directory = Path(directory)
    network = sized_network(directory, build, what)
    weights = read_tensors(directory / WEIGHTS)
    fill(network, translate(weights, network) if translate else weights, directory / WEIGHTS)
    return network


def sized_network(
    directory: Path, build: Callable[[dict[str, Any]], NetworkType], what: str = NETWORK
) -> NetworkType:
    """The network that a directory's `config.json` describes, without the weights beside it; for
    arguments and errors see `read_network`.
    """
    check_files(directory)
    config = read_json(directory / CONFIG)
    try:
        return build(config)
    except TemperaError:
        raise
    except Exception as problem:  # a wrong file may have any fields and sizes
        raise TemperaError(
            f"{directory / CONFIG} does not describe {what} ({reason(problem)}): give a directory "
            "that holds one."
        ) from problem


def parse_sizes(kind: type[Sizes], values: Mapping[str, Any]) -> Sizes:
    """The dataclass of sizes that a `config.json` holds, its lists as tuples.

    Raises:
        ValueError: a field is missing, unknown, or of another type than the dataclass declares.
    """
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"it has no field {unknown[0]}")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as problem:
        raise ValueError(reason(problem)) from None


def draft_directory(path: str | Path, advice: str = "give a draft's directory") -> Path:
    """The directory of a draft: `path` itself, or the files of the hub repository `owner/name` or
    `owner/name@revision`, downloaded unless the cache has them.

    Raises:
        TemperaError: they cannot be had, or some are missing; then the error ends with `advice`.
    """
    local = Path(path).expanduser()
    if not local.exists() and (repository := Repository.named(str(path))):
        local = repository.snapshot([CONFIG, WEIGHTS, PICKLE])
    check_files(local, advice, (WEIGHTS, PICKLE))
    return local


def check_files(directory: Path, advice: str = WHOLE, weights: Sequence[str] = (WEIGHTS,)) -> None:
    """Refuse a directory that is missing, or without `config.json` or one of the files `weights`.

    Raises:
        TemperaError: says which, and `advice`.
    """
    if not directory.is_dir():
        raise TemperaError(f"there is no directory {directory}: {advice}.")
    for names in ((CONFIG,), weights):
        if not any((directory / name).is_file() for name in names):
            raise TemperaError(
                f"the directory {directory} contains no {names[0]}: {advice}; weights in a pickle "
                "(.bin, .pt) must be converted to safetensors."
            )
