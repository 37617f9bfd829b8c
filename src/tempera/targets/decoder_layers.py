"""One decoder layer of each family of targets, for a draft of the same architecture."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tempera.errors import TemperaError
from tempera.runtime.huggingface import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding
from tempera.targets.llamagen import GridRotary, LlamaGenConfig


def _llamagen(network: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    config = LlamaGenConfig(**{**network, "grid": tuple(network["grid"])})
    return LlamaDecoderLayer(config.llama(layers=1), layer_idx=0), GridRotary(config)


def _llama(network: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    config = LlamaConfig(**{**network, "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    return LlamaDecoderLayer(config, layer_idx=0), LlamaRotaryEmbedding(config)


def _chameleon(network: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    from tempera.targets.chameleon import draft_parts

    return draft_parts(network)


def _emu3(network: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    from tempera.targets.emu3 import draft_parts

    return draft_parts(network)


FAMILIES: dict[str, Callable[[dict[str, Any]], tuple[nn.Module, nn.Module]]] = {
    "llamagen": _llamagen,
    "llama": _llama,
    "chameleon": _chameleon,
    "emu3_text_model": _emu3,
}
"""Family of networks -> its decoder layer and rotary embedding, from the network's configuration.
"""


def _family(name: str) -> Callable[[dict[str, Any]], tuple[nn.Module, nn.Module]]:
    if name not in FAMILIES:
        raise TemperaError(
            f"there is no EAGLE draft for networks of the family {name!r}: choose one of "
            f"{', '.join(FAMILIES)}, or add it."
        )
    return FAMILIES[name]
