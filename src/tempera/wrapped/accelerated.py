"""`tempera.accelerate`: images in fewer passes from a transformers model that is in memory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from tempera.api import LoadedModel, load
from tempera.config.compose import composed, written
from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder, NoPictures
from tempera.runtime.torch_modes import usual_modes
from tempera.targets.chameleon import CHAMELEON
from tempera.targets.emu3 import EMU3
from tempera.targets.family import WrappedFamily
from tempera.targets.glm_image import GLM_IMAGE
from tempera.targets.janus import JANUS
from tempera.targets.token_format import ModelSpec
from tempera.wrapped.prompts import WrappedPrompts
from tempera.wrapped.sampling import sampling_of
from tempera.wrapped.target import WrappedTarget

FAMILIES = {family.model_class: family for family in (EMU3, JANUS, CHAMELEON, GLM_IMAGE)}
"""Families by the classes of their models in transformers."""
NO_PICTURES = NoPictures(
    "give accelerate a decoder= (for GLM-Image, GlmDecoder(pipe, GlmDecoderConfig()) of "
    "tempera.targets.glm_image), or call generate with images=False."
)
USUAL_WINDOW = 32
"""Guesses of `scd`, the usual method, in images that have as many tokens."""
INSIDE = {
    "PeftModel": "get_base_model()",
    "PeftMixedModel": "get_base_model()",
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}
"""Wrappers around models, and how they give the model back."""


@usual_modes()
def accelerate(
    model: nn.Module,
    processor: Any = None,
    method: str | None = None,
    *,
    draft: str | Path | None = None,
    decoder: ImageDecoder | None = None,
    layout: str | ModelSpec | None = None,
    height: int | None = None,
    width: int | None = None,
    image_prompts: bool | None = None,
    truncate: bool = False,
    **options: Any,
) -> LoadedModel:
    """Make images with a model that you hold, in fewer passes and with the same law: `tempera.load`
    with this model as the target. No file is read, no weight is copied, and the model is as before.

    The classes are `Emu3ForConditionalGeneration`, `JanusForConditionalGeneration`,
    `ChameleonForConditionalGeneration` (Anole, Lumina-mGPT), `GlmImageForConditionalGeneration`.

    Args:
        model: the model, in evaluation mode, on one device.
        processor: its processor; needed for prompts as text.
        method: a name of `conf/method/`, by default `scd`, which is exact and needs no draft.
        draft: of a method with one: a directory, or `owner/name` of the hub. It was trained for the
            same weights, which nothing checks.
        decoder: makes pictures of codes, in place of the model's own. Chameleon and GLM-Image have
            none in transformers.
        layout: the format of the images, by default the published one: a `ModelSpec`, or for a
            Chameleon `anole`, `lumina` or `lumina2`, since its weights do not tell.
        height, width: of the images in pixels, for Emu3, GLM-Image and Lumina-mGPT.
        image_prompts: whether prompts of a GLM-Image have pictures, as `image=` of `generate`.
            Their images have no preview, so the model reads these or texts alone.
        truncate: truncate prompts that are too long for the model, instead of stopping.
        options: as of `tempera.load`; those of the sampling are by default what the model's
            `generate` reads in its generation_config.

    Raises:
        TemperaError: the class, a part of the model, the method or an option is not supported.
    """
    if draft is not None:
        _check_has_draft(method, options.get("drafter"))
        options["drafter.path"] = str(draft)
    family = family_of(model)
    spec = layout_of(model, family, layout, height=height, width=width, image_prompts=image_prompts)
    held: Any = model
    prompts = WrappedPrompts(held, processor, spec, family, truncate=truncate)

    def usual() -> dict[str, Any]:
        stated = asdict(sampling_of(held.generation_config, family.guidance, spec))
        return {name: value for name, value in stated.items() if name not in options}

    def target(sampling: Sampling) -> WrappedTarget:
        return WrappedTarget(model, family, spec, prompts.encode, sampling, usual)

    if method is None and options.get("drafter") is None:
        options = {"window": min(USUAL_WINDOW, spec.length), **options}
    preset = layout if isinstance(layout, str) else family.preset
    own = NO_PICTURES if family.pictures is None else family.pictures(model)
    return load(preset, method, target=target, decoder=decoder or own, **usual(), **options)


def _check_has_draft(method: str | None, drafter: object) -> None:
    """Raise TemperaError for a method, or its other drafter, that uses no trained draft."""
    what = "scd, the usual method,"
    if method is not None:
        choices = [written("method", method)]
        if isinstance(drafter, str):
            choices.append(written("drafter", drafter))
        what = " with ".join(choices)
        if "path" in composed("generate", choices).drafter:
            return
    raise TemperaError(
        f"{what} uses no trained draft: leave draft= out, or give it with a method that uses one, "
        'such as method="eagle".'
    )


def family_of(model: nn.Module) -> WrappedFamily:
    """The family of a model.

    Raises:
        TemperaError: its class has none, or is a wrapper's.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise TemperaError(
            f"{names[0]} learns a prompt ({type(adapter).__name__}), which is not in the model "
            "inside it and would be skipped: give a model without it, or adapters of its layers."
        )
    for name in names:
        if name in INSIDE:
            raise TemperaError(
                f"{names[0]} is a wrapper, which an accelerated model would skip: give the model "
                f"inside it, model.{INSIDE[name]}."
            )
    raise TemperaError(
        f"{names[0]} is not supported: give an instance of one of {', '.join(FAMILIES)}."
    )


def layout_of(
    model: Any, family: WrappedFamily, layout: str | ModelSpec | None, **sizes: Any
) -> ModelSpec:
    """The format of a model's images.

    Args:
        model: the model.
        family: its family.
        layout: see `accelerate`.
        sizes: height, width and image_prompts; None where they are not given.

    Raises:
        TemperaError: there is no such layout or size, or the model's configuration states another
            format.
    """
    make = _named(family, layout)
    given = {name: size for name, size in sizes.items() if size is not None}
    for name in given:
        if name not in signature(make).parameters:
            raise TemperaError(f"the layout of these images has no {name}: leave it out.")
    spec = make(**given)
    for name, stated in family.stated(model).items():
        if getattr(spec, name) != stated:
            raise TemperaError(
                f"the model's configuration states {name}={stated}, but the format of its images "
                f"has {getattr(spec, name)}: give layout=, a ModelSpec of your model."
            )
    text = model.get_submodule(family.decoder).config
    last = int(spec.token_ids.max())
    if family.head == ("lm_head",) and last >= model.config.get_text_config().vocab_size:
        raise TemperaError(
            f"this layout uses token {last}, but the model has a vocabulary of {text.vocab_size}: "
            "give the model's own layout."
        )
    return replace(spec, context=text.max_position_embeddings)


def _named(family: WrappedFamily, layout: str | ModelSpec | None) -> Callable[..., ModelSpec]:
    """The function that makes a layout, perhaps by its name; of None, the only one.

    Raises:
        TemperaError: there is none of this name.
    """
    layouts = family.layouts
    if isinstance(layout, ModelSpec):
        return lambda: layout
    if layout is None and len(layouts) == 1:
        return next(iter(layouts.values()))
    if layout is None or layout not in layouts:
        raise TemperaError(
            f"layout={layout} does not state the format of this model's images: give "
            f"{', '.join(layouts)}, or a ModelSpec.",
            option="layout",
        )
    return layouts[layout]
