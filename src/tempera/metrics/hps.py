"""HPSv2.1 (Wu et al. 2023), a CLIP ViT-H-14 trained on human preferences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.clip import clip_scorer, load_open_clip
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile
from tempera.runtime.torchvision import import_open_clip


@dataclass(frozen=True)
class HPS(Adapter):
    """HPSv2.1: 100 × the cosine between the embeddings of picture and prompt, as `hpsv2.evaluate`
    prints it. (`hpsv2.score` returns the cosine itself, and uses v2.0 by default.) The longer side
    of a picture is resized, and zeros fill the rest.

    Args:
        weights: HPS_v2.1_compressed.pt, its directory or a hub id; HPS_v2_compressed.pt gives v2.0.
        model: open_clip's name of the architecture.
    """

    weights: str = "xswu/HPSv2"
    model: str = "ViT-H-14"

    metrics = ("hpsv2",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, "HPS_v2.1_compressed.pt"),)

    @override
    def load(self, device: torch.device) -> Networks:
        path = str(self.files[0].path())
        network, _, tokenizer = load_open_clip(self.model, path, "HPSv2")
        preprocess = import_open_clip().image_transform(
            network.visual.image_size, is_train=False, resize_mode="longest"
        )
        clip_score = clip_scorer(network, tokenizer, preprocess, device)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            return {"hpsv2": 100 * clip_score(pictures, prompts)["clip_score"]}

        return Networks(scores=[score])
