"""Splitting a frozen target and the draft that learns from it among processes, where they do not fit on one device: fully sharded data
parallelism (Zhao et al. 2023, arXiv 2304.11277) by PyTorch's `fully_shard`.

Every process keeps a part of each tensor. A layer's are gathered while it computes; its gradients are summed where their part is. The loop
is that of the unsplit draft. What is saved is whole.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tempera.errors import TemperaError

_UNABLE = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported, FSDP is: configure accelerate with use_fsdp instead",
    "FSDP_OFFLOAD_PARAMS": "FSDP keeps the draft on its device here: set fsdp_offload_params to false",
    "FSDP_ACTIVATION_CHECKPOINTING": "a draft is one layer, with nothing to compute again: set fsdp_activation_checkpointing to false",
}


def launched() -> bool:
    """Whether accelerate was told to use FSDP (`accelerate launch --use_fsdp`, or `use_fsdp` in its configuration).

    Raises:
        TemperaError: it was told to do what cannot be done; or FSDP is for a single process.
    """
    for option, sentence in _UNABLE.items():
        if parse_flag_from_env(option):
            raise TemperaError(f"{sentence}.")
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise TemperaError("FSDP splits a draft among several processes, and there is one: give --num_processes, or leave FSDP out.")
    return True


def split_target(network: Any, device: torch.device) -> None:
    """Split the layers of a frozen network, one after the other, and move the rest of it: no device ever holds more than one whole layer.

    Embeddings and head stay whole, in every process; decoding uses them directly. All processes must compute together from now on.

    Args:
        network: see `TransformerTarget`; anywhere, best on the CPU.
        device: where each process's part will be.
    """
    mesh = _mesh(device)
    for layer in network.model.layers:
        _lay_out(layer)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    _move_rest(network, device)


def split_draft(draft: nn.Module, device: torch.device) -> nn.Module:
    """Split a draft, in place, before an optimiser is made for its parameters."""
    _lay_out(draft)
    fully_shard(draft, mesh=_mesh(device))
    return draft


@contextmanager
def gradients_stay(model: FSDPModule) -> Iterator[None]:
    """A split draft's gradients are not summed over the processes yet: those of one part of a batch, with others to come."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with nothing left out; of split ones every process gathers its own copy, so that all processes must ask together."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def as_split(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor that all processes have, split as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def _lay_out(module: nn.Module) -> None:
    """Store parameters row by row, which splitting needs."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def _move_rest(network: nn.Module, device: torch.device) -> None:
    """Move what is not split: `nn.Module.to` would take the split layers along, which are where they belong."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
