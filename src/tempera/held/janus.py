"""Janus-Pro in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder
from tempera.held.arguments import Settings
from tempera.held.family import Family, Request
from tempera.held.network import HeldNetwork
from tempera.targets.shared_vocabulary import PADDING
from tempera.targets.token_format import ModelSpec


class Janus(Family):
    """`JanusForConditionalGeneration`."""

    preset = "janus_pro_7b"
    guidance = 5.0
    inputs: ClassVar[set[str]] = {*Family.inputs, "generation_mode"}

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        head = self.model.model.generation_head
        norm = torch.nn.Sequential(self.text.norm, head.proj_out, head.activation_fn)
        embed = self.model.prepare_embeddings_for_image_generation
        return HeldNetwork(self.text, head.vision_head, spec, "janus", norm, embed)

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("generation_mode") == "image")

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        chats = [f"<|User|>: {prompt}\n\n<|Assistant|>:" for prompt in prompts]
        return self.processed(chats, {"generation_mode": "image", **options})

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        tokens = self.model.model.vision_model.config.num_image_tokens
        side = round(tokens**0.5)
        codes = self.model.model.generation_head.vision_head.out_features
        context = self.text.config.max_position_embeddings
        return ModelSpec(side, side, codes, 0, (), (), context)

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        config = settings.config
        start = self._start_of_image(config)
        needed = {
            "bos_token_id": config.bos_token_id,
            "pad_token_id": config.pad_token_id,
            "generation_kwargs['boi_token_id']": start,
        }
        for name, value in needed.items():
            if value is None:
                raise TemperaError(
                    f"the model's generation_config has no {name}, which the unconditional rows "
                    "are made with: set it."
                )
        kept = (ids == config.bos_token_id) | (ids == start)
        null = torch.where(kept, ids, config.pad_token_id)
        return torch.where(rows == PADDING, PADDING, null)

    def _start_of_image(self, config: Any) -> Any:
        """The id before an image, of a generation configuration or else of the tokenizer; None if
        neither tells.
        """
        options = getattr(config, "generation_kwargs", None) or {}
        if options.get("boi_token_id") is not None or self.processor is None:
            return options.get("boi_token_id")
        tokenizer = self.processor.tokenizer
        return tokenizer.convert_tokens_to_ids(tokenizer.boi_token)

    @override
    def returned(self, request: Request, tokens: Tensor) -> Tensor:
        return tokens.to(request.prompt)

    @override
    def decoder(self) -> ImageDecoder:
        return _JanusDecoder(self.model)


@dataclass(frozen=True)
class _JanusDecoder:
    """The model's image decoder as an `ImageDecoder`."""

    model: Any

    def decode_codes(self, codes: Tensor) -> Tensor:
        """See `ImageDecoder`."""
        images: Tensor = self.model.decode_image_tokens(codes.flatten(1))
        return images.permute(0, 3, 1, 2)
