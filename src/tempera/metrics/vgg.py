"""Precision and recall from VGG-16 features, as LANTERN measures them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import override

from tempera.metrics.distances import manifold_distances
from tempera.metrics.evaluators import Networks, at_least_1
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, filled
from tempera.runtime.tensor_files import read_tensors
from tempera.runtime.torchvision import import_torchvision

NAME = "vgg16-397923af.pth"
EDGE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        path, last = self.files[0].path(), "classifier.6"
        state = {name: one for name, one in read_tensors(path).items() if not name.startswith(last)}
        return filled(_until_second_layer, state, path, "torchvision's VGG-16")

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


def _until_second_layer() -> nn.Module:
    network: nn.Module = import_torchvision().models.vgg16()
    network.classifier = network.classifier[:4]  # type: ignore[index]
    return network
