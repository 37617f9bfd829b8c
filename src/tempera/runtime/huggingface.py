"""Names from transformers, as in `huggingface.T5Config`: it takes seconds to import, so it waits
for the first of them. Import them only from here.

transformers' models import torchvision if it is installed, which fails next to a CPU-only torch
unless `tempera.runtime.torchvision` repairs it first.
"""

import importlib
from typing import Any

from tempera.runtime.torchvision import import_torchvision


def __getattr__(name: str) -> Any:
    """A name of transformers, imported on first use."""
    if name.startswith("__"):
        raise AttributeError(name)
    import_torchvision()
    return getattr(importlib.import_module("transformers"), name)
