"""What families of models do differently: where the parts of a model are, what precedes an image,
and what transformers' `generate` returns. Each family has a module beside this one.

Shapes: B prompts, T ids of a prompt, V image tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder
from tempera.held.arguments import Settings
from tempera.held.network import HeldNetwork
from tempera.targets.shared_vocabulary import PADDING
from tempera.targets.token_format import ModelSpec


@dataclass(frozen=True)
class Request:
    """Images to generate.

    Attributes:
        prompt: ids of the prompts as the caller gave them, int64 [B, T].
        condition: ids of each prompt and of its null prompt, int64 [B, 2, T'], padded on the left
            with `PADDING`.
        spec: format of the images.
        settings: the caller's settings.
    """

    prompt: Tensor
    condition: Tensor
    spec: ModelSpec
    settings: Settings


class Family(ABC):
    """A family of models.

    Args:
        model: the model.
        processor: its processor; None if prompts are given as ids alone.
    """

    guidance: float = 1.0
    """Guidance where the model's generation_config states none, as in the model's `generate`."""
    preset: ClassVar[str]
    """A preset of conf/model/ with the same kind of tokens."""
    inputs: ClassVar[set[str]] = {"input_ids", "inputs", "attention_mask"}
    """Arguments of `generate` besides settings."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor

    @abstractmethod
    def network(self, spec: ModelSpec) -> HeldNetwork:
        """The model as a target's network."""

    @abstractmethod
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of `generate` asks for an image."""

    @abstractmethod
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` for prompts, made by the processor.

        Args:
            prompts: texts, B of them.
            options: further arguments of the processor, such as a size.

        Returns:
            ids int64 [B, T] and their mask under transformers' names, and what the family adds.

        Raises:
            TemperaError: there is no processor, or it has no such option.
        """

    @abstractmethod
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        """The format of the images that a call asks for; its prompts are empty.

        Args:
            settings: the call's settings, with the family's arguments as `settings.inputs`.
            ids: of the prompts as given, int64 [B, T].

        Raises:
            TemperaError: the call does not tell the size, or the images of a batch differ in it.
        """

    @abstractmethod
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        """The prompts of the unconditional rows of guidance; they are not read without guidance.

        Args:
            settings: see `spec`.
            rows: ids of the prompts with `PADDING` where they are masked, int64 [B, T].
            ids: the same as given.

        Returns:
            int64 [B, T'], with `PADDING` on the left.

        Raises:
            TemperaError: the model's settings lack what they are made of.
        """

    @property
    def text(self) -> Any:
        """The decoder."""
        return self.model.model.language_model

    def decoder(self) -> ImageDecoder | None:
        """The model's image decoder, if it has one."""
        return None

    def ending(self, spec: ModelSpec) -> list[int]:
        """Ids behind the image in what `generate` returns."""
        return []

    def request(self, arguments: Mapping[str, Any]) -> Request:
        """Read a call of `generate`.

        Raises:
            TemperaError: it asks for something impossible.
        """
        settings = Settings(self.model.generation_config, arguments, self.inputs)
        inputs = settings.inputs
        ids = inputs.get("input_ids", inputs.get("inputs"))
        if ids is None:
            raise TemperaError("there are no input_ids: give what the processor returns.")
        rows = padded(ids, inputs.get("attention_mask"), "input_ids")
        null = self.null(settings, rows, ids)
        return Request(ids, together(rows, null), self.spec(settings, ids), settings)

    def returned(self, request: Request, tokens: Tensor) -> Tensor:
        """Tokens [B, V] as the ids that `generate` returns."""
        spec = request.spec
        prompt = request.prompt
        image = spec.token_ids.to(tokens.device)[tokens]
        ending = image.new_tensor(self.ending(spec)).expand(len(image), -1)
        new = torch.cat([image, ending], dim=1)
        codes = range(spec.first_code, spec.first_code + spec.codes)
        count = request.settings.new(prompt.shape[1], image.shape[1], new.shape[1], codes)
        return torch.cat([prompt, new[:, :count].to(prompt)], dim=1)

    def processed(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        """What the processor makes of prompts.

        Raises:
            TemperaError: there is no processor.
        """
        if self.processor is None:
            raise TemperaError(
                "prompts need the model's processor: give it to tempera.accelerate, or call "
                "generate_ids with ids."
            )
        inputs = self.processor(text=prompts, padding=True, return_tensors="pt", **options)
        return dict(inputs.to(self.model.device))


def padded(ids: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """Ids [B, T] with `PADDING` where a mask is 0.

    Raises:
        TemperaError: the last id of a row is masked.
    """
    if mask is None:
        return ids
    if not bool((mask[:, -1] == 1).all()):
        raise TemperaError(
            f"{name} is padded on the right: give the processor padding_side='left', since "
            "images continue the last id."
        )
    return torch.where(mask == 1, ids, PADDING)


def together(rows: Tensor, null: Tensor) -> Tensor:
    """Prompts [B, T] and null prompts [B, T'], padded on the left to the longer: [B, 2, …]."""
    width = max(rows.shape[1], null.shape[1])
    rows = torch.nn.functional.pad(rows, (width - rows.shape[1], 0), value=PADDING)
    null = torch.nn.functional.pad(null, (width - null.shape[1], 0), value=PADDING)
    return torch.stack([rows, null], dim=1)
