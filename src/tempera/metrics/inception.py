"""FID, KID, precision, recall and inception score, from the Inception network that defines FID."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.metrics.distances import feature_distances, inception_score
from tempera.metrics.evaluators import Networks, at_least_1
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, not_of
from tempera.runtime.tensor_files import check_values, read_tensors
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
    neighbours: int = 3
    splits: int = 10

    distances = ("fid", "kid", "precision", "recall")
    metrics = (*distances, "inception_score")

    def __post_init__(self) -> None:
        at_least_1(neighbours=self.neighbours, splits=self.splits)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, (NAME,)),)

    @override
    def network(self) -> nn.Module:
        import_torchvision()
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        path = self.files[0].path()
        state = read_tensors(path)  # refuses unsafe files, which the next call would load
        check_values({key: one for key, one in state.items() if one.dtype != torch.int64}, path)
        try:
            network: nn.Module = FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048", "logits_unbiased"], str(path)
            )
        except (RuntimeError, AttributeError):
            found = next(iter(state), "nothing")
            raise not_of(path, "torch-fidelity's Inception", f"it holds {found}") from None
        return network

    @override
    def load(self, device: torch.device) -> Networks:
        network: Any = self.network().to(device)

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
