"""GLM-Image in transformers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.held.arguments import Settings
from tempera.held.family import Family
from tempera.held.network import HeldNetwork
from tempera.targets.token_format import ModelSpec

OF_PROCESSOR = {"height": "target_h", "width": "target_w"}
"""The processor's names of options that are named as in diffusers."""


class GlmImage(Family):
    """`GlmImageForConditionalGeneration`."""

    preset = "anole"
    inputs: ClassVar[set[str]] = {*Family.inputs, "image_grid_thw", "images_per_sample"}

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "glm_image")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("image_grid_thw") is not None

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if self.processor is None:
            return self.processed(prompts, options)  # it raises the error
        renamed = {OF_PROCESSOR.get(name, name): value for name, value in options.items()}
        renamed |= {"return_tensors": "pt", "padding": True}
        chats = []
        for prompt in prompts:
            content = [{"type": "text", "text": prompt}]
            chats.append([{"role": "user", "content": content}])
        inputs = self.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, processor_kwargs=renamed
        )
        return dict(inputs.to(self.model.device))

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        grids = settings.inputs.get("image_grid_thw")
        distinct = set() if grids is None else set(_pairs(grids))
        if len(distinct) != 1:
            raise TemperaError(
                "image_grid_thw must have the two grids of a new image, large and preview, and "
                "the same for every prompt: images as prompts, and several sizes in a batch, are "
                "not possible with an accelerated model."
            )
        (_, lines, columns), (_, preview_lines, preview_columns) = distinct.pop()
        return ModelSpec(
            lines,
            columns,
            codes=self.model.config.vq_config.num_embeddings,
            first_code=0,
            prompt=(),
            null=(),
            context=self.text.config.max_position_embeddings,
            preview=(preview_lines, preview_columns),
        )

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        if settings.config.guidance_scale not in (None, 1):
            raise TemperaError("GLM-Image is not guided: leave guidance_scale away.")
        return rows[:, -1:]

    @override
    def ending(self, spec: ModelSpec) -> list[int]:
        return [int(self.model.config.image_end_token_id)]


Grid = tuple[int, int, int]
"""Frames, lines and columns of an image."""


def _pairs(grids: Tensor) -> list[tuple[Grid, Grid]]:
    """Every two grids of a tensor [2B, 3]; none for an odd number."""
    if len(grids) % 2:
        return []
    rows = [(int(frames), int(lines), int(columns)) for frames, lines, columns in grids]
    return list(zip(rows[::2], rows[1::2], strict=True))
