"""Pictures as files. A picture is uint8 [3, H, W]."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tempera.runtime.files import replacing

Picture = NDArray[np.uint8]


def picture_path(directory: Path, prompt_id: str) -> Path:
    """Where a run directory keeps a prompt's picture."""
    return directory / "images" / f"{prompt_id}.png"


def write_picture(path: Path, picture: Picture) -> None:
    """As PNG, atomically."""
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(
            temporary, format="PNG"
        )


def read_picture(path: Path) -> Picture:
    """From PNG."""
    return np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1).copy()
