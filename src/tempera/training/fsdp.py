"""Split a frozen target and its draft among processes when they do not fit on one device: fully
sharded data parallelism (Zhao et al. 2023, arXiv 2304.11277) with PyTorch's `fully_shard`.

Every process keeps a part of each tensor. A layer gathers its tensors while it computes, and each
process receives the gradients of its own part, averaged over the processes. The training loop does
not change, and checkpoints hold whole tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def split_target(network: Any, device: torch.device) -> None:
    """Split the layers of a frozen network one by one, and move its other tensors to the device. No
    device holds more than two whole layers: the one that computes and the next.

    Embeddings and head stay whole in every process, since decoding uses them directly. From now on
    all processes must run the same number of forward passes, or run them inside `in_step`.

    Args:
        network: a target's network on any device, best on the CPU.
        device: the device of each process's part.
    """
    mesh, decoder = _mesh(device), network.model
    for layer in decoder.layers:
        _lay_out(layer)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    own = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    # layers under one root share streams and their buffers
    fully_shard(decoder, mesh=mesh, ignored_params=own)
    _move_rest(network, device)
    _pass(network)  # the first module called becomes the root; decoding would call a layer first


@contextmanager
def in_step(network: Any) -> Iterator[None]:
    """Let processes run a split network different numbers of times, for example if held-out images
    do not divide evenly, or rounding makes one decode a round longer. A process that has finished
    keeps running forward passes until all have.

    Code inside must not wait for other processes in any other way.
    """
    decoder = network.model
    if not isinstance(decoder, FSDPModule):
        yield
        return

    def announce(*_: Any) -> None:
        _passing(network, True)

    # first of the hooks, before the layer is gathered
    announced = network.model.layers[0].register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:
        announced.remove()
    while bool(_passing(network, False)):
        _pass(network)


def _passing(network: Any, this: bool) -> Tensor:
    """Number of processes that need another forward pass; `this` says whether this one does."""
    count: Tensor = network.lm_head.weight.new_full((), float(this))
    torch.distributed.all_reduce(count)
    return count


@torch.no_grad()
def _pass(network: Any) -> None:
    """One token through the layers."""
    token = network.lm_head.weight.new_zeros(1, 1, network.lm_head.in_features)
    position = torch.zeros(1, 1, dtype=torch.int64, device=token.device)
    network.model(
        inputs_embeds=token,
        attention_mask=token[None, ..., :1],
        position_ids=position,
        use_cache=False,
    )


def split_draft(draft: nn.Module, device: torch.device) -> nn.Module:
    """Split a draft in place; call this before making an optimiser for its parameters."""
    _lay_out(draft)
    fully_shard(draft, mesh=_mesh(device))
    return draft


@contextmanager
def gradients_stay(model: FSDPModule) -> Iterator[None]:
    """Accumulate a split draft's gradients without averaging them over the processes, for all parts
    of a batch but the last.
    """
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole(value: Tensor) -> Tensor:
    """The whole tensor. For a split tensor every process gathers its own copy, so all must call
    this together.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_split(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor that all processes have, split as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def _lay_out(module: nn.Module) -> None:
    """Make parameters contiguous, as splitting requires."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def _move_rest(network: nn.Module, device: torch.device) -> None:
    """Move the tensors that are not split; `nn.Module.to` would move the split layers too."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
