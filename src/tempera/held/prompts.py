"""Prompts of a model that its user holds: the family's format, and the tokenizer of its processor.

Shapes: B prompts, T ids of a prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tempera.errors import TemperaError
from tempera.targets.family import HeldFamily
from tempera.targets.prompt_state import Conditioner
from tempera.targets.shared_vocabulary import TURN, PromptEncoder, in_turn
from tempera.targets.token_format import END_OF_TEXT, ModelSpec


def encoder(
    spec: ModelSpec, processor: Any, config: Any, family: HeldFamily, *, truncate: bool
) -> Conditioner:
    """What encodes prompts.

    Args:
        spec: the format.
        processor: the model's; without one texts are refused.
        config: the model's generation_config.
        family: the model's.
        truncate: see `PromptEncoder`.

    Raises:
        TemperaError: the processor is another model's.
    """
    if processor is None:
        return _refused
    kinds = [kind.__name__ for kind in type(processor).__mro__]
    if family.processor not in kinds:
        raise TemperaError(
            f"{kinds[0]} is not the processor of a {family.held}: give its {family.processor}."
        )
    tokenizer = processor.tokenizer

    def tokenize(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    names = {*spec.special}
    if END_OF_TEXT in spec.prompt:
        names.add(tokenizer.eos_token)
        prompt = (tokenizer.eos_token if p == END_OF_TEXT else p for p in spec.prompt)
        spec = replace(spec, prompt=tuple(prompt))
    if spec.null_filling is not None:  # as the model's generate fills it
        if config.pad_token_id is None:
            raise TemperaError(
                "the model's generation_config has no pad_token_id, which the unconditional rows "
                "are made with: set it."
            )
        filling = tokenizer.convert_ids_to_tokens(int(config.pad_token_id))
        names.add(filling)
        spec = replace(spec, null_filling=filling)
    if family.chat and processor.chat_template is None:
        raise TemperaError("the processor has no chat template: give the model's own processor.")
    if family.chat:
        turn = processor.apply_chat_template(TURN, tokenize=False)
        spec = in_turn(spec, str(turn), "the processor's chat template")
    _check_tokenizer(spec, tokenizer, [name for name in names if len(tokenize(name)) != 1])
    return PromptEncoder(spec, tokenize, truncate).encode


def _check_tokenizer(spec: ModelSpec, tokenizer: Any, missing: Sequence[str]) -> None:
    """Raise TemperaError for the tokenizer of another model.

    Args:
        spec: the format.
        tokenizer: the processor's.
        missing: tokens of the format that it does not have.
    """
    ids = [piece for piece in (*spec.prompt, *spec.null) if isinstance(piece, int)]
    last = max(tokenizer.get_vocab().values())
    beyond = [number for number in ids if number > last]
    for token in [*missing, *beyond]:
        raise TemperaError(
            f"the processor's tokenizer has no token {token}, which prompts of this model have: "
            "give the model's own processor, or the format of your model as layout=ModelSpec(...)."
        )


def _refused(prompts: list[str]) -> Any:
    """In place of a conditioner where there is no processor."""
    raise TemperaError(
        "prompts need the model's processor: give it to tempera.accelerate, or call "
        "tempera.held.ids.generate_ids with ids."
    )
