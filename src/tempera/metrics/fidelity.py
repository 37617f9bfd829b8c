"""Networks of torch-fidelity: the Inception that defines FID, and VGG-16."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tempera.metrics.distances import DISTANCES, inception_score, precision, recall
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, check_weights, not_of
from tempera.runtime.files import reason

INCEPTION = "weights-inception-2015-12-05-6726825d.pth"
VGG16 = "vgg16-397923af.pth"
POOL = 2048
"""Width of Inception's features before the classifier; its logits follow them."""


@dataclass(frozen=True)
class Inception(Adapter):
    """TensorFlow's Inception of 2015 with the resizing that defines FID. FID, KID, precision and
    recall (as in ADM) use the 2,048 features before the classifier; the inception score uses the
    logits.

    Args:
        weights: torch-fidelity's weights-inception-2015-12-05-6726825d.pth, its directory or a URL.
    """

    weights: str

    distances = tuple(DISTANCES)
    metrics = (*distances, "inception_score")
    name = INCEPTION

    @override
    def load(self, device: torch.device) -> Networks:
        network = extractor("InceptionV3", ["2048", "logits_unbiased"], self.files[0]).to(device)

        def features(pictures: Tensor) -> Tensor:
            """[N, 3, H, W] -> pool features, then logits without bias, [N, 2048 + 1008]."""
            return torch.cat(network(pictures.to(device)), 1)

        statistics = {"inception_score": inception_score}
        return Networks(features, distances=DISTANCES, statistics=statistics, pool=POOL)


@dataclass(frozen=True)
class VGG(Adapter):
    """torchvision's VGG-16, up to its second fully connected layer: 4,096 features, those of
    LANTERN. (LANTERN resizes with antialiasing, torch-fidelity without.)

    Kynkäänniemi et al. (2019) use the same layer, after its ReLU, of a differently trained VGG-16;
    their numbers are close to these, but not equal.

    Args:
        weights: torchvision's vgg16-397923af.pth, its directory or a URL.
    """

    weights: str

    metrics = distances = ("precision_vgg", "recall_vgg")
    name = VGG16

    @override
    def load(self, device: torch.device) -> Networks:
        network = extractor("VGG16", ["fc2"], self.files[0]).to(device)

        def features(pictures: Tensor) -> Tensor:
            found: Tensor = network(pictures.to(device))[0]
            return found

        return Networks(features, distances={"precision_vgg": precision, "recall_vgg": recall})


def extractor(kind: str, features: list[str], file: WeightsFile) -> Any:
    """One of torch-fidelity's networks: pictures uint8 [B, 3, h, w] → tuple of features [B, D].

    Args:
        kind: the network, `InceptionV3` or `VGG16`.
        features: torch-fidelity's names of the features.
        file: its weights.

    Raises:
        TemperaError: they are unavailable or those of another network.
    """
    module = import_module(f"torch_fidelity.feature_extractor_{kind.lower()}")
    path = file.path()
    check_weights(path)
    try:
        return getattr(module, f"FeatureExtractor{kind}")(kind, features, str(path))
    except (RuntimeError, AttributeError) as problem:
        raise not_of(path, f"torch-fidelity's {kind}", reason(problem)) from None
