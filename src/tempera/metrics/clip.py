"""CLIP score, computed by any model that open_clip knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.clip_model import ClipModel, Preprocess, Tokenizer, preprocessed
from tempera.metrics.evaluators import Networks, Score
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile


@dataclass(frozen=True)
class ClipScore(Adapter):
    """CLIP score: the cosine between the embeddings of picture and prompt.

    Args:
        model, weights: see `ClipModel`. LANTERN, LlamaGen and Cool-SD use OpenAI's ViT-B-32.
        prefix: put before every prompt; LANTERN and LlamaGen use "A photo depicts ".
    """

    model: str = "ViT-B-32"
    weights: str | None = "openai"
    prefix: str = ""

    metrics = ("clip_score",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return ClipModel(self.model, self.weights).files

    @override
    def network(self) -> nn.Module:
        return ClipModel(self.model, self.weights).network()

    @override
    def load(self, device: torch.device) -> Networks:
        tools = ClipModel(self.model, self.weights).tools()
        return Networks(scores=[clip_scorer(*tools, device, self.prefix)])


def clip_scorer(
    model: Any,
    tokenizer: Tokenizer,
    preprocess: Preprocess,
    device: torch.device,
    prefix: str = "",
) -> Score:
    """The score `clip_score` (Hessel et al. 2021) without its factor 2.5: the cosine between an
    open_clip model's embeddings of image and prompt.
    """
    model = model.to(device).eval()

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        images = preprocessed(pictures, preprocess).to(device)
        texts = tokenizer([prefix + prompt.text for prompt in prompts])
        image = normalize(model.encode_image(images).float(), dim=-1)
        text = normalize(model.encode_text(texts.to(device)).float(), dim=-1)
        return {"clip_score": (image * text).sum(-1)}

    return score
