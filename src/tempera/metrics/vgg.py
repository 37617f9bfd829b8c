"""Precision and recall from VGG-16 features, as LANTERN measures them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import override

from tempera.metrics.distances import manifold_distances
from tempera.metrics.evaluators import Networks, at_least_1
from tempera.metrics.standard import Adapter
from tempera.metrics.vgg_layers import vgg16
from tempera.metrics.weights import WeightsFile, filled, not_of
from tempera.runtime.pretrained import read_tensors

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
        path = self.files[0].path()
        state = read_tensors(path)
        kept = {name: one for name, one in state.items() if not name.startswith("classifier.6")}
        try:
            return filled(lambda: vgg16(kept), kept, path, "torchvision's VGG-16")
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
