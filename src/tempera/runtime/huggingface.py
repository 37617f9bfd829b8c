"""Names from transformers. Import them only from here.

transformers' models import torchvision, which fails next to a CPU-only torch unless
`tempera.runtime.torchvision` repairs it first.
"""

import importlib
from typing import Any

from tempera.runtime.torchvision import import_torchvision

import_torchvision()

from transformers import LlamaConfig, LlamaModel  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

__all__ = [
    "LlamaConfig",
    "LlamaDecoderLayer",
    "LlamaModel",
]

_LATER = {
    "AttentionInterface": "transformers",
    "BlipTextConfig": "transformers.models.blip.configuration_blip",
    "BlipTextModel": "transformers.models.blip.modeling_blip_text",
    "BlipVisionConfig": "transformers.models.blip.configuration_blip",
    "BlipVisionModel": "transformers.models.blip.modeling_blip",
    "ChameleonConfig": "transformers.models.chameleon.configuration_chameleon",
    "ChameleonDecoderLayer": "transformers.models.chameleon.modeling_chameleon",
    "ChameleonModel": "transformers.models.chameleon.modeling_chameleon",
    "Emu3DecoderLayer": "transformers.models.emu3.modeling_emu3",
    "Emu3TextConfig": "transformers.models.emu3.configuration_emu3",
    "Emu3TextModel": "transformers.models.emu3.modeling_emu3",
    "Emu3VQVAE": "transformers.models.emu3.modeling_emu3",
    "Emu3VQVAEConfig": "transformers.models.emu3.configuration_emu3",
    "PreTrainedTokenizerFast": "transformers",
    "T5Config": "transformers.models.t5.configuration_t5",
    "T5EncoderModel": "transformers.models.t5.modeling_t5",
}
"""Names that only some models need, with their modules, which are imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
