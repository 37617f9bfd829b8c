"""Precision and recall from VGG-16 features."""

from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import override

from tempera.metrics.distances import manifold_distances
from tempera.metrics.evaluators import Networks
from tempera.metrics.inception import extractor
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile

NAME = "vgg16-397923af.pth"


@dataclass(frozen=True)
class VGG(Adapter):
    """torchvision's VGG-16 in torch-fidelity, up to its second fully connected layer: 4,096
    features, those of LANTERN. (LANTERN resizes with antialiasing, torch-fidelity without.)

    Kynkäänniemi et al. (2019) use the same layer, after its ReLU, of a differently trained VGG-16;
    their numbers are close to these, but not equal.

    Args:
        weights: torchvision's vgg16-397923af.pth, its directory or a URL.
        neighbours: k of precision and recall.
    """

    weights: str = f"https://download.pytorch.org/models/{NAME}"
    neighbours: PositiveInt = 3

    metrics = distances = ("precision_vgg", "recall_vgg")

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, NAME),)

    @override
    def load(self, device: torch.device) -> Networks:
        network = extractor("VGG16", ["fc2"], self.files[0]).to(device)

        def features(pictures: Tensor) -> Tensor:
            found: Tensor = network(pictures.to(device))[0]
            return found

        return Networks(features, distances=manifold_distances(self.neighbours, "_vgg"))
