"""The LAION aesthetic score, version 2 (Schuhmann 2022): a linear predictor on CLIP ViT-L-14."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.clip_model import ClipModel, preprocessed
from tempera.metrics.evaluators import Networks
from tempera.metrics.linear_chain import linear_chain
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile
from tempera.runtime.pretrained import read_tensors

NAME = "sac+logos+ava1-l14-linearMSE.pth"
URL = (
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/"
    "sac%2Blogos%2Bava1-l14-linearMSE.pth"
)


@dataclass(frozen=True)
class Aesthetic(Adapter):
    """The aesthetic score, about 1 to 10: linear layers without activations between them, applied
    to the picture's normalised CLIP embedding. It ignores the prompt.

    Args:
        weights: sac+logos+ava1-l14-linearMSE.pth, its directory or a URL.
        clip_model, clip_weights: the CLIP model that it was trained on; see
            `tempera.metrics.clip_model.ClipModel`.
    """

    weights: str = URL
    clip_model: str = "ViT-L-14"
    clip_weights: str | None = "openai"

    metrics = ("aesthetic",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        own = WeightsFile(self.weights, (NAME,))
        return (own, *ClipModel(self.clip_model, self.clip_weights).files)

    @override
    def network(self) -> nn.Module:
        path = self.files[0].path()
        return linear_chain(read_tensors(path), "layers.", path, "the aesthetic predictor of LAION")

    @override
    def load(self, device: torch.device) -> Networks:
        head = self.network().to(device)
        made, _, preprocess = ClipModel(self.clip_model, self.clip_weights).tools()
        clip: Any = made.to(device)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            images = preprocessed(pictures, preprocess).to(device)
            embedding = normalize(clip.encode_image(images).float(), dim=-1)
            return {"aesthetic": head(embedding)[:, 0]}

        return Networks(scores=[score])
