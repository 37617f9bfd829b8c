"""Precision and recall from VGG-16 features, as LANTERN measures them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import override

from tempera.metrics.distances import manifold_distances
from tempera.metrics.evaluators import Networks, at_least_1
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, filled
from tempera.runtime.pretrained import on_meta
from tempera.runtime.tensor_files import read_tensors
from tempera.runtime.torchvision import import_torchvision

NAME = "vgg16-397923af.pth"
EDGE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class VGG(Adapter):
    """torchvision's VGG-16 up to its second fully connected layer (`classifier[:4]`): 4,096
    features. (torch-fidelity's extractor ends there too, but resizes without antialiasing.)

    Kynkäänniemi et al. (2019) use the same layer, after its ReLU, of a differently trained VGG-16;
    their numbers are close to these, but not equal.

    Args:
        weights: torchvision's vgg16-397923af.pth, its directory or a URL.
        neighbours: k of precision and recall.
    """

    weights: str = f"https://download.pytorch.org/models/{NAME}"
    neighbours: int = 3

    metrics = distances = ("precision_vgg", "recall_vgg")

    def __post_init__(self) -> None:
        at_least_1(neighbours=self.neighbours)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, (NAME,)),)

    @override
    def network(self) -> nn.Module:
        path = self.files[0].path()
        whole: Any = on_meta(import_torchvision().models.vgg16)
        network: Any = filled(whole, read_tensors(path), path, "torchvision's VGG-16")
        network.classifier = network.classifier[:4]
        found: nn.Module = network
        return found

    @override
    def load(self, device: torch.device) -> Networks:
        network = self.network().to(device)

        def features(pictures: Tensor) -> Tensor:
            images = pictures.to(device).float() / 255
            images = interpolate(images, EDGE, mode="bilinear", antialias=True)
            mean, deviation = (
                images.new_tensor(values)[:, None, None] for values in (MEAN, DEVIATION)
            )
            found: Tensor = network((images - mean) / deviation)
            return found

        return Networks(features, distances=manifold_distances(self.neighbours, "_vgg"))
