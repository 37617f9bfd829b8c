"""Files of named tensors: read without running code, checked, and put into a network."""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.files import check_readable, reason

WRAPPERS = ("model_ema", "model", "module", "state_dict")
"""Entries in which trainers save the weights; averaged weights come first."""
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes whose numbers mean something without scales beside them."""
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
_ALLOWED = {("collections", "OrderedDict"), *(("torch._utils", name) for name in _REBUILD)}


class StandIn:
    """Takes the place of an object of any class, and ignores its contents."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = __init__


class TensorUnpickler(pickle.Unpickler):
    """Builds tensors and plain containers; everything else becomes a `StandIn`."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        return StandIn


_ONLY_TENSORS = SimpleNamespace(
    __name__=__name__,
    Unpickler=TensorUnpickler,
    load=lambda file, **options: TensorUnpickler(file, **options).load(),
)


def read_tensors(path: Path, skip_objects: bool = False) -> dict[str, Tensor]:
    """All tensors of a safetensors or PyTorch file, memory-mapped, by name, without running code
    from the file. Of what a trainer saved it takes the weights; averaged weights are preferred.

    Args:
        path: the file.
        skip_objects: leave out what is not a tensor, such as Lightning's callbacks. Otherwise such
            a file is refused, for callers who give it to a library that would run it.

    Raises:
        TemperaError: the file has another format, is truncated, or contains objects.
    """
    check_readable(path)
    objects: Any = {"pickle_module": _ONLY_TENSORS} if skip_objects else {}
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
        mapped = zipfile.is_zipfile(path)  # the old format cannot be mapped
        names = zipfile.ZipFile(path).namelist() if mapped else []
        if any(name.endswith("/constants.pkl") for name in names):
            raise ValueError("it is a TorchScript program")
        loaded = torch.load(
            path, map_location="cpu", mmap=mapped, weights_only=not skip_objects, **objects
        )
    except Exception as problem:  # what damaged pickles raise
        told = reason(problem)
        if isinstance(problem, pickle.UnpicklingError) and not skip_objects:
            told = "it holds more than tensors, or is damaged"
        raise TemperaError(
            f"{path} is truncated or not a file of weights ({told}): download it again, or "
            "convert it to safetensors."
        ) from None
    return _named_tensors(loaded, path)


def _named_tensors(loaded: object, path: Path) -> dict[str, Tensor]:
    """The weights in what a PyTorch file held.

    Raises:
        TemperaError: there are none.
    """
    for name in WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    if isinstance(loaded, dict):
        tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise TemperaError(f"{path} contains no named tensors: give the file that was published.")


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under other names: in each name every regular expression is replaced."""
    result = {}
    for name, tensor in state.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def fill(network: nn.Module, state: Mapping[str, Tensor], source: Path | str) -> None:
    """Put the tensors of `state` into a network: a network on the meta device takes them as they
    are, without a copy; any other copies them into its own.

    Args:
        network: the network.
        state: tensors in the network's layout.
        source: what errors call `state`.

    Raises:
        TemperaError: the layout or a size differs, tensors are missing or left over, or they mean
            nothing: integers without their scales, complex numbers, infinities and NaN, or matrices
            that are zero everywhere.
    """
    expected = network.state_dict()
    wrong = [f"{name} is missing" for name in expected.keys() - state.keys()]
    wrong += [f"{name} is unknown" for name in state.keys() - expected.keys()]
    wrong += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(wanted.shape)}"
        for name, wanted in expected.items()
        if name in state and state[name].shape != wanted.shape
    ]
    if wrong:
        raise TemperaError(
            f"{source} is truncated or belongs to another model ({len(wrong)} of {len(expected)} "
            f"tensors differ; {min(wrong)}): choose the model of these weights, or download them "
            "again."
        )
    floating = [name for name, wanted in expected.items() if wanted.is_floating_point()]
    check_values({name: state[name] for name in floating}, source)
    network.load_state_dict(state, assign=any(wanted.is_meta for wanted in expected.values()))


def check_values(weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Refuse weights that load but mean nothing; see `fill`. Of a large tensor about a million
    evenly spaced entries are looked at.
    """
    zero: list[bool] = []
    for name, tensor in weights.items():
        if tensor.is_meta:
            continue
        if tensor.dtype not in PLAIN:
            raise TemperaError(
                f"{source} holds {name} as {str(tensor.dtype).removeprefix('torch.')}: give "
                "weights in bfloat16, float16, float32 or float64, before any quantisation."
            )
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() >> 20)]
        if not sample.float().isfinite().all():
            raise TemperaError(
                f"{source} holds infinite numbers or NaN in {name}: download it again."
            )
        if tensor.dim() > 1:
            zero.append(not sample.any())
    if zero and all(zero):
        raise TemperaError(f"the weights in {source} are all zero: download the file again.")
