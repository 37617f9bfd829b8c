"""Files of named tensors: read without running code, checked, and put into a network."""

import argparse
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import check_readable, reason

WRAPPERS = ("model_ema", "model", "module", "state_dict")
"""Entries in which trainers save the weights; averaged weights come first."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors or PyTorch file, memory-mapped, by name. Of what a trainer saved
    it takes the weights; averaged weights are preferred.

    Raises:
        TemperaError: the file has another format, is truncated, or contains objects that would run
            code when loaded.
    """
    check_readable(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        except SafetensorError as problem:
            raise TemperaError(
                f"{path} is cut off or no safetensors file ({problem}): get it again, or convert "
                "it if it is a pickle."
            ) from None
    refuse_programs(path)
    try:
        # LlamaGen's trainer saves its options with the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            mapped = zipfile.is_zipfile(path)  # the old format cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise TemperaError(
            f"{path} holds more than tensors or is no PyTorch file, and reading it could run "
            "code: copy its tensors with `python -m tempera.runtime.convert_checkpoint "
            f"{path} {path.with_suffix('.safetensors')}` and give that file, or download it again."
        ) from None
    except (RuntimeError, EOFError, LookupError, struct.error) as problem:
        raise TemperaError(
            f"{path} is cut off or no PyTorch file ({reason(problem)}): download it again."
        ) from None
    return named_tensors(loaded, path)


def refuse_programs(path: Path) -> None:
    """Raise TemperaError for a TorchScript archive, which torch would load as a program."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise TemperaError(
                    f"{path} is a TorchScript program, not a checkpoint: give the weights alone."
                )


def named_tensors(loaded: object, path: Path) -> dict[str, Tensor]:
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
    raise TemperaError(f"{path} holds no named tensors: give the file that was published.")


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
    missing = [name for name in expected if name not in state]
    left = [name for name in state if name not in expected]
    if missing and left:
        raise TemperaError(
            f"{source} is in another layout (it holds {left[0]}, not {missing[0]}): give the "
            "file as it was published."
        )
    if missing:
        raise TemperaError(
            f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}: "
            "download it again."
        )
    if left:
        raise TemperaError(
            f"{source} holds {len(left)} tensors that this model lacks, first {left[0]}: "
            "choose the model that they belong to."
        )
    for name, wanted in expected.items():
        if state[name].shape != wanted.shape:
            raise TemperaError(
                f"{source} is of another size ({name} is {tuple(state[name].shape)}, this "
                f"model's is {tuple(wanted.shape)}): choose the model that it belongs to, or "
                "another file."
            )
    check_values({name: state[name] for name in expected if expected[name].is_floating_point()},
                 source)  # fmt: skip
    network.load_state_dict(state, assign=any(one.is_meta for one in expected.values()))


def check_values(weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Refuse weights that load but mean nothing; see `fill`. Of a large tensor about a million
    evenly spaced entries are looked at.
    """
    zero: list[bool] = []
    for name, tensor in weights.items():
        if tensor.is_meta:
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
