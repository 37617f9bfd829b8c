"""PickScore (Kirstain et al. 2023), a CLIP ViT-H-14 trained on users' choices between pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.metrics.clip_model import preprocessed
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, filled
from tempera.runtime.files import read_json
from tempera.runtime.pretrained import read_tensors
from tempera.runtime.torchvision import import_open_clip


@dataclass(frozen=True)
class PickScore(Adapter):
    """PickScore: exp(logit scale) × the cosine between the embeddings of picture and prompt.

    We use open_clip's tokenizer and preprocessing. PickScore's own processor, that of
    laion/CLIP-ViT-H-14-laion2B-s32B-b79K, differs only in the padding of texts, which a causal text
    encoder ignores.

    Args:
        weights: a directory with config.json and model.safetensors, or a hub id.
    """

    weights: str = "yuvalkirstain/PickScore_v1"

    metrics = ("pick_score",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (
            WeightsFile(self.weights, ("config.json",)),
            WeightsFile(self.weights, ("model.safetensors", "pytorch_model.bin")),
        )

    @override
    def network(self) -> nn.Module:
        from tempera.runtime.huggingface import CLIPConfig, CLIPModel

        config, weights = (file.path() for file in self.files)
        state = {
            name: tensor
            for name, tensor in read_tensors(weights).items()
            if not name.endswith("position_ids")
        }
        made = CLIPConfig.from_dict(read_json(config))
        network: nn.Module = filled(lambda: CLIPModel(made), state, weights, "PickScore")
        return network

    @override
    def load(self, device: torch.device) -> Networks:
        open_clip = import_open_clip()
        network: Any = self.network().to(device)
        vision, text = network.config.vision_config, network.config.text_config
        preprocess = open_clip.image_transform(vision.image_size, is_train=False)
        tokenizer = open_clip.SimpleTokenizer(context_length=text.max_position_embeddings)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            ids = tokenizer([prompt.text for prompt in prompts]).to(device)
            images = preprocessed(pictures, preprocess).to(device)
            found = network(input_ids=ids, pixel_values=images)
            cosine = (
                normalize(found.image_embeds, dim=-1) * normalize(found.text_embeds, dim=-1)
            ).sum(-1)
            return {"pick_score": network.logit_scale.exp() * cosine}

        return Networks(scores=[score])
