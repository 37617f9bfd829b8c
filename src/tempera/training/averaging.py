"""A moving average of weights, which validates better than the weights themselves."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


def moving_average(network: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of a network's weights, to update after every step. In the
    first steps it follows faster, so that the initial weights do not stay in it.
    """

    def follow(average: Tensors, weights: Tensors, updates: Tensor | int) -> None:
        count = int(updates)
        torch._foreach_lerp_(average, weights, 1 - min(decay, (1 + count) / (10 + count)))

    return AveragedModel(network, multi_avg_fn=follow)
