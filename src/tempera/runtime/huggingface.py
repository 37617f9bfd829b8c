"""Names from transformers, as in `huggingface.T5Config`: it takes seconds to import, so it waits
for the first of them. Import them only from here.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """A name of transformers, imported on first use."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("transformers"), name)
