"""Emu3 in transformers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder
from tempera.held.arguments import Settings
from tempera.held.family import Family, padded
from tempera.held.network import HeldNetwork
from tempera.image_tokenizers.emu3 import Emu3Tokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.targets import emu3
from tempera.targets.token_format import ModelSpec


class Emu3(Family):
    """`Emu3ForConditionalGeneration`."""

    preset = "emu3"
    inputs: ClassVar[set[str]] = {
        *Family.inputs,
        "image_sizes",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "prefix_allowed_tokens_fn",
    }

    @property
    @override
    def text(self) -> Any:
        return self.model.model.text_model

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "emu3")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        ids = arguments.get("input_ids", arguments.get("inputs"))
        start = self._id("<|image token|>", optional=True)
        begun = ids is not None and start is not None and bool((ids[:, -1] == start).all())
        return "pixel_values" not in arguments and ("image_sizes" in arguments or begun)

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        options = {"return_for_image_generation": True, **options}
        negative = self.processed([emu3.NEGATIVE] * len(prompts), options)
        positive = self.processed([prompt + emu3.POSITIVE for prompt in prompts], options)
        return {
            **positive,
            "negative_prompt_ids": negative["input_ids"],
            "negative_prompt_attention_mask": negative["attention_mask"],
        }

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        mapping = self.model.model.vocabulary_mapping
        first = mapping.image_tokens[0]
        codes = len(mapping.image_tokens)
        ids_of_codes = [mapping.img2bpe[code] for code in range(codes)]
        if ids_of_codes != list(range(first, first + codes)):
            raise TemperaError(
                "the ids of this model's image codes are not consecutive, which is not supported."
            )
        lines, columns = self._size(settings, ids)
        context = self.text.config.max_position_embeddings
        end = mapping.eol_token_id
        spec = ModelSpec(lines, columns, codes, first, (), (), context, line_end=end)
        allowed = settings.inputs.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            line = torch.cat([ids[0], ids.new_full((columns,), first)])
            if [int(token) for token in allowed(0, line)] != [end]:
                raise TemperaError(
                    f"prefix_allowed_tokens_fn does not end a line of {columns} codes with the end "
                    "of line alone, as Emu3's images have it: leave it away."
                )
        return spec

    def _size(self, settings: Settings, ids: Tensor) -> tuple[int, int]:
        """Lines and columns of codes, of `image_sizes` or else in the prompt, as `90*90`."""
        sizes = settings.inputs.get("image_sizes")
        if sizes is None:
            sizes = [self._size_in_prompt(row) for row in ids.tolist()]
        distinct = {(int(height), int(width)) for height, width in sizes}
        if len(distinct) > 1:
            raise TemperaError(
                f"the images of a batch have {len(distinct)} sizes: give those of one size at a "
                "time."
            )
        return distinct.pop()

    def _size_in_prompt(self, ids: list[int]) -> tuple[str, str]:
        """Lines and columns of codes, as a prompt tells them between start and token of the image.

        Raises:
            TemperaError: it does not, or there is no processor to read it.
        """
        start = self._id("<|image start|>")
        if ids[-1] != self._id("<|image token|>") or start not in ids or self.processor is None:
            raise TemperaError(
                "the size of the images is not known: give image_sizes, as the processor returns "
                "them with return_for_image_generation=True."
            )
        after_start = len(ids) - ids[::-1].index(start)
        size = self.processor.tokenizer.decode(ids[after_start:-1])
        height, _, width = size.partition("*")
        return height, width

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        negative = settings.inputs.get("negative_prompt_ids")
        if negative is None:
            return rows[:, -1:]  # as generate takes it
        mask = settings.inputs.get("negative_prompt_attention_mask")
        return padded(negative, mask, "negative_prompt_ids").expand(len(rows), -1)

    @override
    def ending(self, spec: ModelSpec) -> list[int]:
        end = self.text.config.eos_token_id
        return [self._id("<|extra_201|>"), self._id("<|image end|>"), int(end)]

    @override
    def decoder(self) -> ImageDecoder:
        return LinedTokenizer(Emu3Tokenizer(self.model.model.vqmodel))

    def _id(self, name: str, optional: bool = False) -> Any:
        """The id of a special token; without one an error, or None if it is optional."""
        token = self.model.model.vocabulary_mapping.vocab_map.get(name)
        if token is None and not optional:
            raise TemperaError(
                f"the vocabulary_map of the model's configuration has no {name}: load the model "
                "with the configuration of its own repository."
            )
        return token
