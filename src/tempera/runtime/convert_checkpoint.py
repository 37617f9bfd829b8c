"""Copy the tensors of a PyTorch checkpoint to safetensors, without running code from the file.

    python -m tempera.runtime.convert_checkpoint vqgan.ckpt vqgan.safetensors

For checkpoints that hold more than tensors, such as those of Lightning with their callbacks.
Whatever is neither a tensor nor a plain container is replaced by an empty stand-in.
"""

import argparse
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.files import check_readable, replacing
from tempera.runtime.tensor_files import named_tensors, refuse_programs

_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}


class StandIn:
    """Takes the place of an object of any class, and ignores its contents."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Ignore an element."""

    def extend(self, values: object) -> None:
        """Ignore elements."""


class TensorUnpickler(pickle.Unpickler):
    """Builds tensors and plain containers; everything else becomes a `StandIn`."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        return StandIn


def salvage(path: Path) -> dict[str, Tensor]:
    """The named tensors of a checkpoint, from the entry that its trainer wrote them to.

    Raises:
        TemperaError: the file cannot be read or holds no named tensors.
    """
    check_readable(path)
    refuse_programs(path)
    only_tensors: Any = SimpleNamespace(
        __name__=__name__,
        Unpickler=TensorUnpickler,
        load=lambda file, **options: TensorUnpickler(file, **options).load(),
    )
    try:
        loaded = torch.load(
            path, map_location="cpu", pickle_module=only_tensors, weights_only=False
        )
    except Exception as problem:  # what damaged pickles raise
        raise TemperaError(
            f"{path} is no PyTorch checkpoint ({type(problem).__name__}): download it again."
        ) from None
    return named_tensors(loaded, path)


def convert(source: Path, target: Path) -> int:
    """Write the tensors of `source` to `target`, a .safetensors file; returns their number.

    Raises:
        TemperaError: see `salvage`; or the name of `target` has another ending.
    """
    if target.suffix != ".safetensors":
        raise TemperaError(f"{target} does not end in .safetensors: name it so.")
    tensors = {name: value.detach().clone().contiguous() for name, value in salvage(source).items()}
    with replacing(target) as temporary:
        save_file(tensors, temporary)
    return len(tensors)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, metavar="CKPT")
    parser.add_argument("target", type=Path, metavar="SAFETENSORS")
    given = parser.parse_args()
    try:
        count = convert(given.source, given.target)
    except TemperaError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)
    print(f"{count} tensors: {given.target}")


if __name__ == "__main__":
    main()
