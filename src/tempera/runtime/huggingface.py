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

__all__ = ["LlamaConfig", "LlamaDecoderLayer", "LlamaModel"]

_LAYERS = {"ChameleonDecoderLayer": "chameleon", "Emu3DecoderLayer": "emu3"}
"""Names that transformers does not export, with the models that they are part of."""


def __getattr__(name: str) -> Any:
    """Names that only some models need, imported on first use."""
    model = _LAYERS.get(name)
    module = f"transformers.models.{model}.modeling_{model}" if model else "transformers"
    return getattr(importlib.import_module(module), name)
