"""torchvision's VGG-16 with the widths of a checkpoint."""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from tempera.runtime.torchvision import import_torchvision

POOLED = ("features.5.", "features.10.", "features.17.", "features.24.")
"""The convolutions that follow a max-pooling layer; one more pooling follows the last convolution.
"""


def vgg16(state: Mapping[str, Tensor]) -> nn.Module:
    """A VGG-16 up to its second fully connected layer (`classifier[:4]`), without the weights.

    Args:
        state: tensors in torchvision's layout.

    Raises:
        KeyError: it lacks a layer.
    """
    vgg = import_torchvision().models.vgg
    layers: list[int | str] = []
    for name in (name for name in state if re.fullmatch(r"features\.\d+\.weight", name)):
        layers += ["M"] if name.startswith(POOLED) else []
        layers.append(len(state[name]))
    if not layers:
        raise KeyError("features.0.weight")
    network: nn.Module = vgg.VGG(vgg.make_layers([*layers, "M"]), init_weights=False)
    wide = state["classifier.0.weight"]
    network.classifier = nn.Sequential(
        nn.Linear(wide.shape[1], len(wide)),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(len(wide), len(state["classifier.3.weight"])),
    )
    return network
