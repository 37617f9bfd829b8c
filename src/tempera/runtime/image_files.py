"""The pictures of a run as files. A picture is uint8 [3, H, W]."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, replacing
from tempera.runtime.image_decoding import decode_picture

Picture = NDArray[np.uint8]
AGAIN = "delete it, and repeat the command that made the run"
MADE_BY = "tempera"
"""Name of the text in a picture's file that says what it belongs to."""
PIXELS = "pixels"
"""Name of the text with the hash of its pixels."""


def picture_path(directory: Path, prompt_id: str) -> Path:
    """Path of a prompt's picture in a run directory."""
    return directory / "images" / f"{prompt_id}.png"


def write_picture(path: Path, picture: Picture, made_by: str) -> None:
    """Write a picture as PNG, atomically. Its text says what it belongs to, and the hash of its
    size and pixels.

    Args:
        path: of the file; its name is the prompt's id.
        picture: the pixels.
        made_by: identity of the run.
    """
    text = PngInfo()
    text.add_text(MADE_BY, f"{made_by}/{path.stem}")
    text.add_text(PIXELS, _hash(picture))
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=text)


def _hash(picture: Picture) -> str:
    """Of a picture's size and pixels."""
    digest = hashlib.sha256(str(picture.shape).encode())
    digest.update(picture.tobytes())
    return digest.hexdigest()


def is_whole(path: Path, made_by: str) -> bool:
    """Whether a file holds a picture to its end, by the checksums of its parts.

    Raises:
        TemperaError: it holds one that something else made than `made_by`.
    """
    try:
        with Image.open(regular_file(path)) as picture:
            text = picture.info.get(MADE_BY)
            picture.verify()
    except Exception:  # Pillow may raise anything on damaged bytes
        return False
    if text != f"{made_by}/{path.stem}":
        raise _foreign(path)
    return True


def read_picture(path: Path, made_by: str) -> Picture:
    """Read a picture that `write_picture` wrote.

    Raises:
        TemperaError: the file is missing or damaged, or holds another picture.
    """
    regular_file(path)
    try:
        with Image.open(path) as file:
            text = file.info.get(MADE_BY)
            pixels = file.info.get(PIXELS)
            picture = np.asarray(decode_picture(file)).transpose(2, 0, 1).copy()
    except Exception as problem:  # Pillow may raise anything on damaged bytes
        raise TemperaError(
            f"{path} cannot be read as a picture ({shortened(str(problem))}): {AGAIN}."
        ) from None
    if text != f"{made_by}/{path.stem}" or pixels != _hash(picture):
        raise _foreign(path)
    return picture


def _foreign(path: Path) -> TemperaError:
    """The error for a picture of something else."""
    return TemperaError(f"{path} is not the picture that this run made: {AGAIN}.")
