"""Make `import torchvision` work where it is installed: open_clip, timm, torchmetrics.image and
transformers' models import it.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_LIBRARIES: list[torch.library.Library] = []
"""Keeps the declared schemas alive: they disappear when their `Library` is garbage-collected."""


def import_torchvision() -> ModuleType | None:
    """Import torchvision, also next to a CPU-only torch whose matching torchvision wheel cannot
    load its compiled operators; None where it is not installed.

    In that case the import fails with "operator torchvision::nms does not exist". Declaring the
    schemas of the two operators repairs it; nothing here calls them. They are declared only after
    the failure, because Python aborts on a second declaration of an operator.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as problem:
        if "torchvision::nms" not in str(problem):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _LIBRARIES.append(library)
    return importlib.import_module("torchvision")


def import_open_clip() -> ModuleType:
    """Import open_clip, which imports torchvision."""
    import_torchvision()
    return importlib.import_module("open_clip")
