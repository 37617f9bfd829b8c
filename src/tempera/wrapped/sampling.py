"""The sampling that transformers' `generate` would do by a model's generation_config."""

from typing import Any

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.targets.token_format import ModelSpec

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
    "penalty_alpha": (0,),
    "dola_layers": (),
    "token_healing": (False,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
}
"""Settings that change what is drawn, with the values that change nothing, besides None."""


def sampling_of(config: Any, guidance: float, spec: ModelSpec) -> Sampling:
    """The sampling of a `GenerationConfig`, with the defaults of `generate`: greedy, or top-k 50.

    Args:
        config: the configuration.
        guidance: where it states none.
        spec: the format of the images.

    Raises:
        TemperaError: it has a setting that no sampling here has.
    """
    for name, values in NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in values:
            raise TemperaError(
                f"the model's generation_config has {name}={value}, which is not possible with an "
                "accelerated model: set it to None."
            )
    if config.cache_implementation == "quantized":
        raise TemperaError(
            "the model's generation_config has cache_implementation='quantized', but an "
            "accelerated model does not quantise its cache: set it to None."
        )
    for name, tokens in _suppressed(config).items():
        if any(_is_drawn(token, spec) for token in tokens):
            raise TemperaError(
                f"the model's generation_config suppresses codes of the image by {name}, which is "
                f"not possible with an accelerated model: set {name} to None."
            )
    scale = float(guidance if config.guidance_scale is None else config.guidance_scale)
    if not config.do_sample:
        return Sampling(scale, temperature=0.0)
    return Sampling(
        scale,
        temperature=float(1.0 if config.temperature is None else config.temperature),
        top_k=int(50 if config.top_k is None else config.top_k),
        top_p=float(1.0 if config.top_p is None else config.top_p),
        min_p=float(config.min_p or 0.0),
    )


def _suppressed(config: Any) -> dict[str, list[int]]:
    """The ids that `generate` may not draw, by the settings that forbid them. Before the least
    length these are the ends of a text.
    """
    found = {"suppress_tokens": list(config.suppress_tokens or ())}
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    for name in ("min_length", "min_new_tokens"):
        if getattr(config, name, None):
            found[name] = ends
    return found


def _is_drawn(token: int, spec: ModelSpec) -> bool:
    """Whether a token is a code of the image or ends a line."""
    return 0 <= token - spec.first_code < spec.codes or token == spec.line_end
