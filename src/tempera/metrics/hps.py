"""HPSv2.1 (Wu et al. 2023), a CLIP ViT-H-14 trained on human preferences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize, pad
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.clip import load_open_clip
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile
from tempera.runtime.torchvision import import_open_clip


@dataclass(frozen=True)
class HPS(Adapter):
    """HPSv2.1: 100 × the cosine between the embeddings of picture and prompt, as `hpsv2.evaluate`
    prints it. (`hpsv2.score` returns the cosine itself, and uses v2.0 by default.)

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
        return (WeightsFile(self.weights, ("HPS_v2.1_compressed.pt",)),)

    @override
    def network(self) -> nn.Module:
        return load_open_clip(self.model, self.files[0].path(), "HPSv2")

    @override
    def load(self, device: torch.device) -> Networks:
        network: Any = self.network().to(device)
        tokenizer = import_open_clip().get_tokenizer(self.model)
        edge = network.visual.image_size[0]

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            images = normalize(network.encode_image(_input(pictures.to(device), edge)), dim=-1)
            ids = tokenizer([prompt.text for prompt in prompts]).to(device)
            texts = normalize(network.encode_text(ids), dim=-1)
            return {"hpsv2": 100 * (images * texts).sum(-1)}

        return Networks(scores=[score])


def _input(pictures: Tensor, edge: int) -> Tensor:
    """Pictures uint8 [B, 3, h, w] → [B, 3, edge, edge]. As in HPSv2, they become floats before the
    longer side is resized to `edge` (bicubic), and zeros fill the rest.
    """
    constants = import_open_clip().constants
    scale = edge / max(pictures.shape[-2:])
    size = [round(side * scale) for side in pictures.shape[-2:]]
    images = pictures.float() / 255
    if size != list(pictures.shape[-2:]):
        images = interpolate(images, size, mode="bicubic", antialias=True)
    high, wide = (edge - side for side in size)
    images = pad(images, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
    mean, deviation = (
        images.new_tensor(values)[:, None, None]
        for values in (constants.OPENAI_DATASET_MEAN, constants.OPENAI_DATASET_STD)
    )
    return (images - mean) / deviation
