"""ImageReward (Xu et al. 2023): BLIP ViT-L (Li et al. 2022) with a text encoder that attends to the
picture, and five linear layers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.clip import preprocessed
from tempera.metrics.evaluators import Networks
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, not_of
from tempera.runtime.pretrained import on_meta
from tempera.runtime.tensor_files import fill, read_tensors, renamed

MEAN = 0.16717362830052426
DEVIATION = 1.0333394966054072
"""Of the raw rewards, from ImageReward's code; scores are normalised by them."""
TOKENS = 35
"""Tokens of a prompt; the rest is cut."""
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "layer_norm_eps": 1e-6,
}
TEXT = {"hidden_size": 768, "encoder_hidden_size": 1024, "num_attention_heads": 12}
"""BLIP's sizes, as transformers names them; the others are its defaults."""
HEAD = (1024, 128, 64, 16, 1)
"""Widths of the linear layers."""
RENAMED = {
    r"^mlp\.layers\.": "head.",
    r"^blip\.text_encoder\.": "text.",
    r"^blip\.visual_encoder\.": "vision.",
    r"^vision\.cls_token": "vision.embeddings.class_embedding",
    r"^vision\.pos_embed": "vision.embeddings.position_embedding",
    r"^vision\.patch_embed\.proj\.": "vision.embeddings.patch_embedding.",
    r"^vision\.norm\.": "vision.post_layernorm.",
    r"^vision\.blocks\.(\d+)\.attn\.proj\.": r"vision.blocks.\1.self_attn.projection.",
    r"^vision\.blocks\.(\d+)\.attn\.": r"vision.blocks.\1.self_attn.",
    r"^vision\.blocks\.(\d+)\.norm(\d)\.": r"vision.blocks.\1.layer_norm\2.",
    r"^vision\.blocks\.": "vision.encoder.layers.",
}
"""Beginnings of the names in ImageReward.pt, and those of `Reward`."""
OWN = r"(vision|head|text(?!\.pooler|.*position_ids$))\."
"""Beginnings of the names that `Reward` has."""


@dataclass(frozen=True)
class ImageReward(Adapter):
    """ImageReward: roughly standard normal over pictures of common models; higher is better.

    Args:
        weights: ImageReward.pt, its directory or a hub id.
        tokenizer: tokenizer.json of bert-base-uncased, its directory or a hub id.
    """

    weights: str
    tokenizer: str

    metrics = ("image_reward",)
    name = "ImageReward.pt"

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (*super().files, WeightsFile(self.tokenizer, "tokenizer.json"))

    @override
    def load(self, device: torch.device) -> Networks:
        """See `Adapter.load`: raises TemperaError for a file that holds other weights."""
        import open_clip  # takes seconds

        from tempera.runtime.huggingface import PreTrainedTokenizerFast

        path = self.files[0].path()
        network = on_meta(Reward)
        try:
            state = renamed(read_tensors(path), RENAMED)
            weights = {name: state[name] for name in state if re.match(OWN, name)}
            fill(network, weights, path)
        except TemperaError as problem:
            raise not_of(path, "ImageReward", str(problem)) from None
        positions = torch.arange(network.text.config.max_position_embeddings)  # in no file
        network.text.embeddings.position_ids = positions[None]
        network = network.float().eval().requires_grad_(False).to(device)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(self.files[1].path()), pad_token="[PAD]"
        )
        preprocess = open_clip.image_transform(VISION["image_size"], is_train=False)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            images = preprocessed(pictures, preprocess).to(device)
            texts = tokenizer(
                [prompt.text for prompt in prompts],
                padding="max_length",
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            ).to(device)
            return {"image_reward": network(images, texts["input_ids"], texts["attention_mask"])}

        return Networks(scores=[score])


class Reward(nn.Module):
    """Preprocessed pictures [B, 3, h, w], ids and mask of the prompts, int64 [B, L] → rewards [B].
    The text encoder's state of the first token is what the head reads.
    """

    def __init__(self) -> None:
        from tempera.runtime import huggingface as hf

        super().__init__()
        self.vision: Any = hf.BlipVisionModel(hf.BlipVisionConfig(**VISION))
        self.text: Any = hf.BlipTextModel(hf.BlipTextConfig(**TEXT), add_pooling_layer=False)
        layers: list[nn.Module] = []
        for into, out in zip((TEXT["hidden_size"], *HEAD), HEAD, strict=False):
            layers += [nn.Linear(into, out), nn.Dropout()]
        del layers[7], layers[-1]  # the last layers have none between them
        self.head = nn.Sequential(*layers)

    @override
    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.vision(images).last_hidden_state
        read = self.text(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=states,
            encoder_attention_mask=mask.new_ones(states.shape[:2]),
        )
        reward: Tensor = self.head(read.last_hidden_state[:, 0])[:, 0]
        return (reward - MEAN) / DEVIATION
