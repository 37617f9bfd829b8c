"""Weights of eight bits, by torchao. Products are computed in the dtype of their inputs: what is
rounded is the weights alone, each row of a matrix with a scale of its own, to 127 steps on either
side of 0 (LLM.int8's "vector-wise" weights; Dettmers et al. 2022, section 2.1).
"""

from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tempera.errors import TemperaError

WeightsDtype: TypeAlias = Literal["int8"]


def check_quantises(option: str, kind: WeightsDtype) -> None:
    """Raise TemperaError if this installation cannot quantise, as an option asks."""
    if find_spec("torchao") is None:
        raise TemperaError(
            f"{option}={kind} quantises by torchao, which is an extra: pip install "
            '"tempera-decoding[torchao]"',
            option=option,
        )


@torch.no_grad()
def quantise(module: nn.Module) -> None:
    """Round the weights of the linear layers inside a module to eight bits, in place. Each layer is
    replaced before the next is read, so that no second copy of all weights is held.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # takes seconds

    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is one that `quantise` made, or another that holds several tensors."""
    return bool(is_traceable_wrapper_subclass(weight))


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes: of a quantised one, those of the tensors that it holds."""
    if not is_quantised(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(tensor, name)) for name in names)
