"""ImageReward (Xu et al. 2023): BLIP ViT-L with a text encoder that attends to the picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.blip import bert_tokenizer, blip_encoders, text_state
from tempera.metrics.clip_model import preprocessed
from tempera.metrics.evaluators import Networks
from tempera.metrics.linear_chain import linear_chain
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile
from tempera.runtime.tensor_files import read_tensors
from tempera.runtime.torchvision import import_open_clip

MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
"""Of the raw rewards, from ImageReward's code; scores are normalised by them."""
WORDS = 35
"""Tokens of a prompt; the rest is cut."""


@dataclass(frozen=True)
class ImageReward(Adapter):
    """ImageReward: roughly standard normal over pictures of common models; higher is better.

    Args:
        weights: ImageReward.pt, its directory or a hub id.
        tokenizer: tokenizer.json of bert-base-uncased, its directory or a hub id.
    """

    weights: str = "THUDM/ImageReward"
    tokenizer: str = "google-bert/bert-base-uncased"

    metrics = ("image_reward",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (
            WeightsFile(self.weights, ("ImageReward.pt",)),
            WeightsFile(self.tokenizer, ("tokenizer.json",)),
        )

    @override
    def network(self) -> nn.Module:
        path = self.files[0].path()
        state = read_tensors(path)
        vision, text = blip_encoders(state, path, "ImageReward")
        head = linear_chain(state, "mlp.layers.", path, "ImageReward")
        return nn.ModuleDict({"vision": vision, "text": text, "head": head})

    @override
    def load(self, device: torch.device) -> Networks:
        network: Any = self.network().to(device)
        tokenizer = bert_tokenizer(self.files[1].path())
        edge = network["vision"].config.image_size
        preprocess = import_open_clip().image_transform(edge, is_train=False)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            images = preprocessed(pictures, preprocess).to(device)
            texts = tokenizer(
                [prompt.text for prompt in prompts],
                padding="max_length",
                truncation=True,
                max_length=WORDS,
                return_tensors="pt",
            ).to(device)
            first = text_state(network["vision"], network["text"], images, texts)
            rewards = network["head"](first)[:, 0]
            return {"image_reward": (rewards - MEAN) / DEVIATION}

        return Networks(scores=[score])
