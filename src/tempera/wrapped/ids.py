"""Ids in and ids out: for code that makes its own prompts, and for diffusers' pipeline.

Shapes: B prompts, T ids of a prompt, V tokens of an image.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tempera.api import LoadedModel, whole_seed
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.runtime.torch_modes import usual_modes
from tempera.targets.glm_image import GLM_IMAGE
from tempera.targets.prompt_encoder import PADDING
from tempera.wrapped.target import WrappedTarget


@usual_modes()
def generate_ids(
    fast: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    negative_ids: Tensor | None = None,
    negative_mask: Tensor | None = None,
    seed: int | None = None,
    **pictures: Tensor | None,
) -> Tensor:
    """Images of prompts that are ids already, `fast.batch_size` of them together.

    Args:
        fast: what `tempera.accelerate` returned.
        input_ids: of the prompts, int64 [B, T].
        attention_mask: 0 where a prompt is padded, which is on the left, [B, T].
        negative_ids, negative_mask: the same of the unconditional rows; needed with guidance.
        seed: of the random draws; by default drawn from PyTorch's generator.
        pictures: what the model's processor makes of pictures in the prompts beside the ids, which
            have a placeholder for every code of a picture: pixel_values and image_sizes of Emu3;
            pixel_values, image_grid_thw and images_per_sample of GLM-Image.

    Returns:
        ids of the images, int64 [B, V].

    Raises:
        TemperaError: the prompts do not fit the model.
    """
    target: Any = fast.pipeline.target
    if not isinstance(target, WrappedTarget):
        raise TemperaError("ids need a model that tempera.accelerate returned: give that model.")
    seed = int(torch.randint(2**62, ())) if seed is None else whole_seed(seed)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    read = target.read(input_ids, mask, pictures)
    rows = _padded(read.ids.to(input_ids.device), attention_mask, "input_ids")
    if negative_ids is None and target.sampling.guided:
        raise TemperaError(
            "guidance needs negative_ids, those of the unconditional rows: give them, or load the "
            "model with guidance=1.",
            option="guidance",
        )
    null = rows[:, -1:]  # never read without guidance, but a prompt is not empty
    if negative_ids is not None:
        null = _padded(negative_ids, negative_mask, "negative_ids")
    if len(null) != len(rows):
        raise TemperaError(
            f"there are {len(null)} negative_ids for {len(rows)} prompts: give one row per prompt."
        )
    condition = _together(rows, null)
    if read.positions is not None:  # of a model without unconditional rows
        condition = torch.cat([condition, read.positions.to(condition)], 1)
    if condition.shape[-1] > target.spec.room:
        raise TemperaError(
            f"a prompt of {condition.shape[-1]} tokens and an image of {target.length} do not fit "
            f"the model's {target.spec.context} positions: shorten the prompt."
        )
    tokens = _decoded(fast, target, condition, seed).to(input_ids.device)
    return target.spec.token_ids.to(input_ids.device)[tokens]


def _decoded(fast: LoadedModel, target: WrappedTarget, condition: Tensor, seed: int) -> Tensor:
    """The tokens of the images of conditions [B, …], `fast.batch_size` of them together."""
    prompts = [Prompt(str(row), str(row)) for row in range(len(condition))]
    made = []
    with fast.turns.taken():
        for first in range(0, len(prompts), fast.batch_size):
            batch = slice(first, first + fast.batch_size)
            with target.reading(condition[batch]):
                seeds = [seed] * len(prompts[batch])
                made.append(fast.pipeline.tokens(prompts[batch], seeds=seeds).tokens)
    return torch.cat(made)


def _padded(ids: Tensor, mask: Tensor | None, name: str) -> Tensor:
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


def _together(rows: Tensor, null: Tensor) -> Tensor:
    """Prompts [B, T] and null prompts [B, T'], padded on the left to the longer: [B, 2, …]."""
    width = max(rows.shape[1], null.shape[1])
    rows = torch.nn.functional.pad(rows, (width - rows.shape[1], 0), value=PADDING)
    null = torch.nn.functional.pad(null, (width - null.shape[1], 0), value=PADDING)
    return torch.stack([rows, null], dim=1)


@contextmanager
def installed(fast: LoadedModel, model: Any, seed: int | None = None) -> Iterator[None]:
    """Inside the `with` block a GLM-Image's own `generate` makes images by a method, so that
    diffusers' pipeline runs as it is.

    Args:
        fast: the model, accelerated.
        model: the `GlmImageForConditionalGeneration`.
        seed: of the random draws of every call; by default drawn from PyTorch's generator.

    Raises:
        TemperaError: a call asks for something else than `fast` makes.
    """
    target: Any = fast.pipeline.target

    def generate(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        do_sample: bool = False,
        max_new_tokens: int | None = None,
        **others: Any,
    ) -> Tensor:
        """As the model's own: ids of prompts, int64 [B, T] -> those followed by the image, [B, T +
        V]. Raises TemperaError for arguments that would change the distribution.
        """
        pictures = {name: others.pop(name, None) for name in GLM_IMAGE.given}
        unlike = [name for name, value in others.items() if value is not None]
        if do_sample == target.sampling.greedy:
            unlike.append(f"do_sample={do_sample}")
        if unlike:
            raise TemperaError(
                f"generate asks for {unlike[0]}, which is not what the model was accelerated for: "
                "give tempera.accelerate the height, the width and the sampling."
            )
        image = generate_ids(fast, input_ids, attention_mask, seed=seed, **pictures)
        end = image.new_full((len(image), 1), model.config.image_end_token_id)
        return torch.cat([input_ids, torch.cat([image, end], 1)[:, :max_new_tokens]], 1)

    before = vars(model).get("generate")
    model.generate = generate
    try:
        yield
    finally:
        del model.generate
        if before is not None:
            model.generate = before
