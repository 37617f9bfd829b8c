"""Weights of eight bits, by torchao, and of four (`runtime.int4`).

Of eight bits, products are computed in the dtype of their inputs: what is rounded is the weights
alone, each row of a matrix with a scale of its own, to 127 steps on either side of 0 (LLM.int8's
"vector-wise" weights; Dettmers et al. 2022, section 2.1).
"""

from importlib.util import find_spec
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tempera.errors import TemperaError
from tempera.runtime.int4 import Int4Linear

WeightsDtype: TypeAlias = Literal["int8", "int4"]
QUANTISED: dict[torch.dtype, WeightsDtype] = {
    getattr(torch, kind): kind for kind in get_args(WeightsDtype)
}
"""Kinds by PyTorch's names for their integers."""


def check_quantises(option: str, kind: WeightsDtype, device: torch.device) -> None:
    """Raise TemperaError if this installation or the device cannot quantise, as an option asks."""
    if kind == "int4" and not _multiplies_int4(device):
        raise TemperaError(
            f"{option}=int4 needs a CPU or a GPU of NVIDIA's Ampere generation or later, but this "
            f"run is on {device}: give int8",
            option=option,
        )
    if kind == "int8" and find_spec("torchao") is None:
        raise TemperaError(
            f"{option}={kind} quantises by torchao, which is an extra: pip install "
            '"tempera-decoding[torchao]"',
            option=option,
        )


def _multiplies_int4(device: torch.device) -> bool:
    """Whether a device has the operators of `Int4Linear`, or may have them: a GPU elsewhere."""
    if device.type == "cuda" and torch.cuda.is_available() and not torch.version.hip:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type in ("cpu", "cuda", "meta")


@torch.no_grad()
def quantise(
    network: nn.Module, layer: nn.Module, kind: WeightsDtype, device: torch.device
) -> None:
    """Round the weights of the linear layers inside one of a network's modules, in place. Each is
    replaced before the next is read, so that no second copy of all weights is held.

    Args:
        network: the network.
        layer: the module.
        kind: how many bits they get.
        device: where they will be.

    Raises:
        TemperaError: they have sizes that four bits are not possible for.
    """
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # takes seconds

        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        return
    inside = {id(module) for module in layer.modules() if isinstance(module, nn.Linear)}
    for name in [name for name, module in network.named_modules() if id(module) in inside]:
        linear = cast(nn.Linear, network.get_submodule(name))
        network.set_submodule(name, Int4Linear.of(linear, device, name))


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is one that `quantise` made, or another that holds several tensors."""
    return bool(is_traceable_wrapper_subclass(weight))


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes: of a quantised one, those of the tensors that it holds."""
    if not is_quantised(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(tensor, name)) for name in names)
