"""FID, KID, precision, recall and inception score, from the Inception network that defines FID."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import override

from tempera.metrics.distances import feature_distances, inception_score
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, check_weights, not_of
from tempera.runtime.files import reason
from tempera.runtime.torchvision import import_torchvision

NAME = "weights-inception-2015-12-05-6726825d.pth"
POOL = 2048
"""Width of the features before the classifier; its logits follow them."""


@dataclass(frozen=True)
class Inception(Adapter):
    """TensorFlow's Inception of 2015 with the resizing that defines FID, as in torch-fidelity. FID,
    KID, precision and recall (as in ADM) use the 2,048 features before the classifier; the
    inception score uses the logits.

    Args:
        weights: torch-fidelity's weights-inception-2015-12-05-6726825d.pth, its directory or a URL.
        neighbours: k of precision and recall.
        splits: number of parts for the inception score.
    """

    weights: str = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{NAME}"
    neighbours: PositiveInt = 3
    splits: PositiveInt = 10

    distances = ("fid", "kid", "precision", "recall")
    metrics = (*distances, "inception_score")

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, NAME),)

    @override
    def load(self, device: torch.device) -> Networks:
        network = extractor("InceptionV3", ["2048", "logits_unbiased"], self.files[0]).to(device)

        def features(pictures: Tensor) -> Tensor:
            return torch.cat(network(pictures.to(device)), 1)

        return Networks(
            features,
            distances=feature_distances(self.neighbours, POOL),
            statistics={
                "inception_score": lambda features, resamples: inception_score(
                    features[:, POOL:], resamples, self.splits
                )
            },
        )


def extractor(kind: str, features: list[str], file: WeightsFile) -> Any:
    """One of torch-fidelity's networks: pictures uint8 [B, 3, h, w] → tuple of features [B, D].

    Args:
        kind: the network, `InceptionV3` or `VGG16`.
        features: torch-fidelity's names of the features.
        file: its weights.

    Raises:
        TemperaError: they are unavailable or those of another network.
    """
    import_torchvision()  # torch-fidelity imports it
    module = import_module(f"torch_fidelity.feature_extractor_{kind.lower()}")
    path = file.path()
    check_weights(path)
    try:
        return getattr(module, f"FeatureExtractor{kind}")(kind, features, str(path))
    except (RuntimeError, AttributeError) as problem:
        raise not_of(path, f"torch-fidelity's {kind}", reason(problem)) from None
