"""Chameleon in transformers: Anole and Lumina-mGPT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.held.arguments import Settings
from tempera.held.family import Family
from tempera.held.network import HeldNetwork
from tempera.targets import chameleon
from tempera.targets.shared_vocabulary import PADDING, PromptEncoder
from tempera.targets.token_format import END_OF_TEXT, ModelSpec


class Chameleon(Family):
    """`ChameleonForConditionalGeneration`, which generates no images in transformers: Anole and
    Lumina-mGPT.

    Args:
        layout: the format of its images.
    """

    preset = "anole"
    layout: ModelSpec = chameleon.anole()

    @property
    @override
    def text(self) -> Any:
        return self.model.model

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "chameleon")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        ids = arguments.get("input_ids", arguments.get("inputs"))
        start = self.layout.prompt[-1:]
        begun = ids is not None and bool((ids[:, -1:] == torch.tensor(start).to(ids)).all())
        return "pixel_values" not in arguments and begun

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if self.processor is None or options:
            raise TemperaError(
                "prompts need the model's processor and no further options: give it to "
                "tempera.accelerate."
            )
        tokenizer = self.processor.tokenizer

        def tokenize(text: str) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

        condition, _ = PromptEncoder(self.layout, tokenize).encode(prompts)
        ids = condition[:, 0].to(self.model.device)
        return {"input_ids": ids.clamp(min=0), "attention_mask": (ids != PADDING).long()}

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        return self.layout

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        null = [piece for piece in self.layout.null if isinstance(piece, int)]
        if not null:
            null = [int(ids[0, -1])]  # never read, but a prompt is not empty
        return ids.new_tensor([null] * len(ids))


def in_ids(spec: ModelSpec, processor: Any) -> ModelSpec:
    """A format with the ids of the special tokens that it names.

    Args:
        spec: the format.
        processor: the model's; read if the format names some.

    Raises:
        TemperaError: it does, and there is no processor, or its tokenizer has no such token.
    """
    named = {*spec.special, END_OF_TEXT} & {*spec.prompt, *spec.null}
    if not named:
        return spec
    if processor is None:
        raise TemperaError(
            "this layout names tokens of the model's tokenizer: give its processor, too."
        )
    tokenizer = processor.tokenizer
    vocabulary = tokenizer.get_vocab()
    ids: dict[Any, int] = {}
    for name in named:
        text = tokenizer.eos_token if name == END_OF_TEXT else name
        if text not in vocabulary:
            raise TemperaError(f"the processor's tokenizer has no token {text}: give the model's.")
        ids[name] = vocabulary[text]
    prompt = tuple(ids.get(piece, piece) for piece in spec.prompt)
    null = tuple(ids.get(piece, piece) for piece in spec.null)
    return replace(spec, prompt=prompt, null=null, special=())
