"""The arguments of transformers' `generate`, as far as an accelerated model takes them."""

import copy
from collections.abc import Mapping
from typing import Any

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "max_time": (),
    "stop_strings": (),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
"""Settings that change what `generate` draws or returns, with the values that change nothing,
besides None.
"""


class Settings:
    """A generation configuration and the arguments that override it.

    Args:
        config: a `GenerationConfig`.
        arguments: of `generate`.
        names: further arguments that the family takes.

    Attributes:
        config: the configuration with the arguments in place.
        inputs: the family's arguments.

    Raises:
        TemperaError: an argument or a setting is not possible.
    """

    def __init__(self, config: Any, arguments: Mapping[str, Any], names: set[str]) -> None:
        stated = {name: value for name, value in arguments.items() if value is not None}
        config = copy.copy(stated.pop("generation_config", config))
        self.inputs: dict[str, Any] = {}
        for name, value in stated.items():
            if name in names:
                self.inputs[name] = value
            elif hasattr(config, name):
                setattr(config, name, value)
            else:
                raise TemperaError(
                    f"generate's argument `{name}` is not possible with an accelerated model: "
                    "leave it away, or call the model's own generate."
                )
        for name, values in NEUTRAL.items():
            value = getattr(config, name, None)
            if value is not None and value not in values:
                raise TemperaError(
                    f"{name}={value} is not possible with an accelerated model: leave it away, or "
                    "call the model's own generate."
                )
        self.config = config

    def sampling(self, guidance: float) -> Sampling:
        """The sampling that they ask for; `guidance` where they name none, and defaults as of
        `generate`: greedy, or top-k 50.
        """
        config = self.config
        scale = guidance if config.guidance_scale is None else config.guidance_scale
        if not config.do_sample:
            return Sampling(float(scale), temperature=0.0)
        top_k = 50 if config.top_k is None else config.top_k
        top_p = 1.0 if config.top_p is None else config.top_p
        temperature = 1.0 if config.temperature is None else config.temperature
        min_p = config.min_p or 0.0
        return Sampling(float(scale), float(temperature), int(top_k), float(top_p), float(min_p))

    def new(self, prompt: int, image: int, most: int, codes: range) -> int:
        """How many ids to return behind the prompt.

        Args:
            prompt: ids of the prompt.
            image: ids of the image.
            most: ids of the image and its end.
            codes: ids of the image's codes.

        Raises:
            TemperaError: the image does not fit, or some of its codes are suppressed.
        """
        config = self.config
        if any(token in codes for token in config.suppress_tokens or ()):
            raise TemperaError(
                "suppress_tokens names codes of the image, which is not possible with an "
                "accelerated model: leave it away, or call the model's own generate."
            )
        room = config.max_new_tokens
        if room is None and config.max_length not in (None, 20):  # 20: the default of all models
            room = config.max_length - prompt
        if room is not None and room < image:
            raise TemperaError(
                f"max_new_tokens={room} ends before the image, which has {image} tokens: give at "
                "least that many, or leave it away."
            )
        return most if room is None else min(room, most)
