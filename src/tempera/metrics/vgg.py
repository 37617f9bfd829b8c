"""Precision and recall from VGG-16 features, as LANTERN measures them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import override

from tempera.metrics.distances import manifold_distances
from tempera.metrics.evaluators import Networks, at_least_1
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, filled, not_of
from tempera.runtime.pretrained import read_tensors
from tempera.runtime.torchvision import import_torchvision

NAME = "vgg16-397923af.pth"
EDGE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_POOLED = ("features.5.", "features.10.", "features.17.", "features.24.")
"""The convolutions that follow a max-pooling layer; one more pooling follows the last convolution.
"""


@dataclass(frozen=True)
class VGG(Adapter):
    """torchvision's VGG-16 up to its second fully connected layer (`classifier[:4]`): 4,096
    features.

    Kynkäänniemi et al. (2019) use the same layer, after its ReLU, of a differently trained VGG-16;
    their numbers are close to these, but not equal.

    Args:
        weights: torchvision's vgg16-397923af.pth, its directory or a URL.
        neighbours: k of precision and recall.
    """

    weights: str = f"https://download.pytorch.org/models/{NAME}"
    neighbours: int = 3

    metrics = ("precision_vgg", "recall_vgg")
    distances = ("precision_vgg", "recall_vgg")

    def __post_init__(self) -> None:
        at_least_1(neighbours=self.neighbours)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, (NAME,)),)

    @override
    def network(self) -> nn.Module:
        path = self.files[0].path()
        state = read_tensors(path)
        kept = {name: one for name, one in state.items() if not name.startswith("classifier.6")}
        try:
            return filled(lambda: _network(kept), kept, path, "torchvision's VGG-16")
        except KeyError as missing:
            raise not_of(path, "torchvision's VGG-16", f"it lacks {missing}") from None

    @override
    def load(self, device: torch.device) -> Networks:
        network = self.network().to(device)
        mean, deviation = (
            torch.tensor(values, device=device)[:, None, None] for values in (MEAN, DEVIATION)
        )

        def features(pictures: Tensor) -> Tensor:
            images = interpolate(
                pictures.to(device).float() / 255, EDGE, mode="bilinear", antialias=True
            )
            found: Tensor = network((images - mean) / deviation)
            return found

        return Networks(features, distances=manifold_distances(self.neighbours, "_vgg"))


def _network(state: Mapping[str, Tensor]) -> nn.Module:
    """A VGG-16 of torchvision's layers with the checkpoint's widths, without its last layer."""
    vgg = import_torchvision().models.vgg
    layers: list[int | str] = []
    for name in (name for name in state if re.fullmatch(r"features\.\d+\.weight", name)):
        layers += ["M"] if name.startswith(_POOLED) else []
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
