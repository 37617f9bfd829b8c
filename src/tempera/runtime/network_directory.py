"""Networks stored as a directory: `config.json` and `model.safetensors`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import (
    check_readable,
    read_json,
    replacing,
    sha256_file,
    write_json,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_HEADS = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

NetworkType = TypeVar("NetworkType", bound=nn.Module)


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
    what: str,
    advice: str,
    translate: Callable[[dict[str, Tensor], NetworkType], dict[str, Tensor]] | None = None,
) -> NetworkType:
    """Read a network that `write_network` wrote. It computes in float32, whatever the dtype of its
    file.

    Args:
        directory: contains `config.json` and `model.safetensors`.
        build: contents of `config.json` → a network with random weights.
        what: what the directory should contain, for errors, such as "an EAGLE draft".
        advice: how to get such a directory, for errors.
        translate: tensors in the file's layout, and the network → tensors in the network's layout.

    Raises:
        TemperaError: a file is missing, truncated, a pickle, or does not hold such a network.
    """
    directory = Path(directory)
    network = sized_network(directory, build, what, advice)
    weights = _read_weights(directory / WEIGHTS)
    _fill(network, translate(weights, network) if translate else weights, directory)
    return network


def sized_network(
    directory: Path, build: Callable[[dict[str, Any]], NetworkType], what: str, advice: str
) -> NetworkType:
    """The network that a directory's `config.json` describes, without the weights beside it.

    Args:
        directory, build, what, advice: see `read_network`.

    Raises:
        TemperaError: a file is missing or a pickle, or `config.json` describes no such network.
    """
    check_files(directory, advice)
    config = read_json(directory / CONFIG)
    try:
        return build(config)
    except TemperaError:
        raise
    except Exception as problem:  # a wrong file may have any fields and sizes
        why = "its fields are others" if isinstance(problem, TypeError | KeyError) else problem
        raise TemperaError(
            f"{directory / CONFIG} does not describe {what} ({why}): {advice}."
        ) from problem


def tuples(value: Any) -> Any:
    """JSON with its lists converted to tuples, for dataclasses of sizes."""
    if isinstance(value, dict):
        return {name: tuples(item) for name, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def _fill(network: nn.Module, weights: dict[str, Tensor], directory: Path) -> None:
    """Copy the weights into the network."""
    expected = network.state_dict()
    wrong = [
        name
        for name in expected
        if name not in weights or weights[name].shape != expected[name].shape
    ]
    wrong += [name for name in weights if name not in expected]
    if wrong:
        raise TemperaError(
            f"{directory / WEIGHTS} does not fit {directory / CONFIG} (first at {wrong[0]}): take "
            "both files from one training run."
        )
    check_values(expected, weights, str(directory / WEIGHTS))
    network.load_state_dict(weights)


def check_values(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str
) -> None:
    """Refuse weights that load but mean nothing: integers without their scales, complex numbers,
    infinities and NaN, or matrices that are zero everywhere. Of a large tensor about a million
    evenly spaced entries are looked at.

    Args:
        expected: the network's tensors; those that are no floating-point numbers are not checked.
        weights: the file's, under the same names.
        source: what errors call the file.

    Raises:
        TemperaError: names the first such tensor.
    """
    zero: list[bool] = []
    for name, wanted in expected.items():
        tensor = weights[name]
        if not wanted.is_floating_point() or tensor.is_meta:
            continue
        if not tensor.is_floating_point():
            raise TemperaError(
                f"{source} holds {name} as {str(tensor.dtype).removeprefix('torch.')}: give "
                "weights in floating point, before any quantisation."
            )
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() >> 20)]
        if not sample.float().isfinite().all():
            raise TemperaError(f"{source} holds infinite numbers or NaN in {name}: get it again.")
        if tensor.dim() > 1:
            zero.append(not sample.any())
    if zero and all(zero):
        raise TemperaError(f"the weights in {source} are all zero: get the file again.")


def check_files(directory: Path, advice: str) -> None:
    """Refuse a directory that is missing, a pickle, or without one of the files.

    Raises:
        TemperaError: says which, and `advice`.
    """
    if directory.suffix.lower() in _PICKLES:
        raise TemperaError(
            f"{directory} is a pickle, which can run code when it is read: give a directory with "
            f"{CONFIG} and {WEIGHTS}."
        )
    if not directory.is_dir():
        raise TemperaError(f"there is no directory {directory}: {advice}.")
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix.lower() in _PICKLES)
    if pickles and not (directory / WEIGHTS).is_file():
        raise TemperaError(
            f"{directory} holds a pickle ({pickles[0]}) where {WEIGHTS} is expected: convert it "
            "to safetensors."
        )
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise TemperaError(f"the directory {directory} holds no {name}: {advice}.")


def _read_weights(path: Path) -> dict[str, Tensor]:
    check_readable(path)
    try:
        return load_file(path)
    except SafetensorError as problem:
        with path.open("rb") as file:
            head = file.read(2)
        if head in _PICKLE_HEADS:
            raise TemperaError(
                f"{path} is a pickle by its content, whatever its name: convert it to safetensors."
            ) from problem
        raise TemperaError(
            f"{path} is truncated or no safetensors file ({problem}): copy it again or train it "
            "again."
        ) from problem
