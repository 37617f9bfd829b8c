"""Prompts of a model that its user holds: the family's format, and the tokenizer, chat template and
special tokens that processor and model have when prompts are encoded.

Shapes: B prompts, T ids of a prompt.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.runtime.files import reason
from tempera.targets.family import WrappedFamily
from tempera.targets.glm_image import PATCH
from tempera.targets.prompt_encoder import (
    PADDING,
    PromptEncoder,
    Tokenize,
    Turn,
    numbered,
    plain_turn,
    too_long,
    turn_of,
)
from tempera.targets.prompt_state import PicturedText
from tempera.targets.token_format import END_OF_TEXT, ModelSpec
from tempera.wrapped.target import read_pictures


class WrappedPrompts:
    """Encodes prompts as the model's processor does, and their unconditional rows as its
    `generate`.

    Args:
        model: the model.
        processor: the model's; without one texts are refused.
        spec: the format.
        family: the model's.
        truncate: see `PromptEncoder`.

    Raises:
        TemperaError: the processor is another model's.
    """

    def __init__(
        self, model: Any, processor: Any, spec: ModelSpec, family: WrappedFamily, *, truncate: bool
    ) -> None:
        self._model = model
        self._processor = processor
        self._spec = spec
        self._family = family
        self._truncate = truncate
        self._tokenizer: Any = None
        self._last = 0  # its last id, which takes a while to find
        if processor is not None:
            self._encoder()

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """See `PromptEncoder.encode`.

        Raises:
            TemperaError: also without a processor.
        """
        if self._processor is None:
            raise TemperaError(
                "prompts need the model's processor: give it to tempera.accelerate, or call "
                "tempera.wrapped.ids.generate_ids with ids."
            )
        encoder = self._encoder()
        if not self._spec.pictures:
            return encoder.encode(prompts)
        rows = [self._pictured(prompt, where) for prompt, where in numbered(prompts)]
        width = max(row.shape[-1] for row in rows)
        padded = [functional.pad(row, (width - row.shape[-1], 0), value=PADDING) for row in rows]
        condition = torch.cat(padded)
        return condition, condition[:, 0] != PADDING

    def _pictured(self, prompt: str, where: str) -> Tensor:
        """The ids of a prompt with pictures, twice, and its positions: int64 [1, 5, T]; `where` is
        what errors call it.

        Raises:
            TemperaError: it has no pictures, they cannot be read, or it is too long.
        """
        if not isinstance(prompt, PicturedText):
            raise TemperaError(
                f"{where} has no picture: call generate with image=, or tempera.accelerate without "
                "image_prompts."
            )
        spec, processor = self._spec, self._processor
        parts = [{"type": "image"}] * len(prompt.pictures) + [{"type": "text", "text": prompt}]
        turn = [{"role": "user", "content": parts}]
        try:
            given = processor(
                text=[processor.apply_chat_template(turn, tokenize=False)],
                images=[list(prompt.pictures)],
                target_h=spec.lines * PATCH,
                target_w=spec.columns * PATCH,
                return_tensors="pt",
            )
        except (ValueError, TypeError, AttributeError) as problem:
            raise TemperaError(
                f"the model's processor does not read the pictures of {where} "
                f"({reason(problem)}): give other pictures."
            ) from problem
        ids, mask = given.pop("input_ids"), given.pop("attention_mask")
        if ids.shape[1] > spec.room:
            raise too_long(f"{where}, with its pictures,", ids.shape[1], spec.room)
        named = {name: given[name] for name in self._family.given}
        read = read_pictures(self._model, self._family, spec, ids, mask, named)
        assert read.positions is not None
        return torch.cat([read.ids[None], read.ids[None], read.positions], 1)

    def _encoder(self) -> PromptEncoder:
        """What encodes prompts, as processor and model are now."""
        processor, spec = self._processor, self._spec
        kinds = [kind.__name__ for kind in type(processor).__mro__]
        if self._family.processor not in kinds:
            raise TemperaError(
                f"{kinds[0]} is not the processor of a {self._family.model_class}: give its "
                f"{self._family.processor}."
            )
        tokenizer = processor.tokenizer

        def tokenize(text: str) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

        names = [*spec.special]
        if END_OF_TEXT in spec.prompt:
            names.append(tokenizer.eos_token)
            prompt = (tokenizer.eos_token if p == END_OF_TEXT else p for p in spec.prompt)
            spec = replace(spec, prompt=tuple(prompt))
        ids = [piece for piece in (*spec.prompt, *spec.null) if isinstance(piece, int)]
        filling: tuple[int, set[int]] | None = None
        if spec.null_filling is not None:
            filling = _filling(self._model.generation_config)
            ids.append(filling[0])
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._last = tokenizer, max(tokenizer.get_vocab().values())
        beyond = [token for token in ids if token > self._last]
        for missing in [*(name for name in names if len(tokenize(name)) != 1), *beyond]:
            raise TemperaError(
                f"the processor's tokenizer has no token {missing}, which prompts of this model "
                "have: give the model's own processor, or the format of your model as "
                "layout=ModelSpec(...)."
            )
        turn = _turn(processor) if self._family.chat else plain_turn
        return _Encoder(spec, tokenize, self._truncate, turn, filling)


class _Encoder(PromptEncoder):
    """A `PromptEncoder` with the unconditional rows of a held model.

    Args:
        spec, tokenize, truncate, turn: see `PromptEncoder`.
        filling: the id that replaces the tokens of a prompt in the unconditional row, and those
            that stay; None for a format with a null prompt.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenize: Tokenize,
        truncate: bool,
        turn: Turn,
        filling: tuple[int, set[int]] | None,
    ) -> None:
        super().__init__(spec, tokenize, truncate, turn)
        self._filling = filling

    @override
    def _null(self, row: list[int]) -> list[int]:
        if self._filling is None:
            return super()._null(row)
        filling, retained = self._filling
        return [token if token in retained else filling for token in row]


def _filling(config: Any) -> tuple[int, set[int]]:
    """The id that `generate` fills unconditional rows with, and those that it leaves there.

    Args:
        config: the model's generation_config.

    Raises:
        TemperaError: it does not state them.
    """
    kwargs: Any = getattr(config, "generation_kwargs", None) or {}
    stated: dict[str, Any] = {
        "pad_token_id": config.pad_token_id,
        "generation_kwargs['boi_token_id']": kwargs.get("boi_token_id"),
    }
    for name, token in stated.items():
        if token is None:
            raise TemperaError(
                f"the model's generation_config has no {name}, which the unconditional rows need: "
                "set it."
            )
    filling, begin = map(int, stated.values())
    return filling, {config.bos_token_id, begin}


def _turn(processor: Any) -> Turn:
    """A processor's chat template around a text.

    Raises:
        TemperaError: it has none, or gives the text not back.
    """
    if processor.chat_template is None:
        raise TemperaError("the processor has no chat template: give the model's own processor.")
    apply: Callable[..., Any] = processor.apply_chat_template
    return turn_of(lambda turn: str(apply(turn, tokenize=False)), "the processor's chat template")
