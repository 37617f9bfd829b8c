"""Pictures as files. A picture is uint8 [3, H, W]."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, replacing

Picture = NDArray[np.uint8]


def picture_path(directory: Path, prompt_id: str) -> Path:
    """Path of a prompt's picture in a run directory."""
    return directory / "images" / f"{prompt_id}.png"


def write_picture(path: Path, picture: Picture) -> None:
    """Write a picture as PNG, atomically."""
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(
            temporary, format="PNG"
        )


def is_whole(path: Path) -> bool:
    """Whether a file holds a picture to its end, by the checksums of its parts."""
    try:
        with Image.open(regular_file(path)) as picture:
            picture.verify()
    except Exception:  # Pillow may raise anything on damaged bytes
        return False
    return True


def read_picture(path: Path) -> Picture:
    """Read a picture from PNG.

    Raises:
        TemperaError: the file is missing or damaged.
    """
    regular_file(path)
    try:
        picture = Image.open(path).convert("RGB")
    except Exception as problem:  # Pillow may raise anything on damaged bytes
        raise TemperaError(
            f"{path} cannot be read as a picture ({shortened(str(problem))}): delete it, and the "
            "next evaluation in this directory generates it again from its tokens."
        ) from None
    return np.asarray(picture).transpose(2, 0, 1).copy()
