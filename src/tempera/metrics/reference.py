"""Real images that generated pictures are compared with."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tempera.errors import TemperaError
from tempera.metrics.evaluators import Pictures

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
LEAST = 16
"""Fewer images are no reference."""


@dataclass(frozen=True)
class Reference:
    """Images of a directory, cut to their central square and resized to the size of the generated
    pictures.

    Args:
        directory: png, jpg and webp files, also in directories inside it; None for no reference.
        size: edge length in pixels, instead of that of the generated pictures.
    """

    directory: str | None = None
    size: int | None = None

    @property
    def given(self) -> bool:
        """Whether there is a reference."""
        return self.directory is not None

    @property
    def identity(self) -> str:
        """A hash of the options and of the names and sizes of the files."""
        text = [repr(self), *(f"{file.name}:{file.stat().st_size}" for file in self._files())]
        return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise TemperaError unless there are enough images."""
        count = len(self._files())
        if count < LEAST:
            raise TemperaError(
                f"{self.directory} holds {count} images: give a directory of {LEAST} or more real "
                "images (png, jpg or webp) to compare with."
            )

    def pictures(self, edge: int) -> Iterator[Pictures]:
        """The images in batches, uint8 [B, 3, h, w].

        Args:
            edge: of the generated pictures, in pixels.
        """
        files = self._files()
        for first in range(0, len(files), 50):
            yield np.stack([_square(path, self.size or edge) for path in files[first : first + 50]])

    def _files(self) -> list[Path]:
        if self.directory is None:
            return []
        found = Path(self.directory).expanduser().rglob("*")
        return sorted(path for path in found if path.suffix.lower() in ENDINGS)


def _square(path: Path, size: int) -> Pictures:
    """The central square of an image, resized: uint8 [3, size, size]."""
    try:
        image = Image.open(path).convert("RGB")
    except OSError as problem:
        raise TemperaError(
            f"{path} cannot be read as an image ({problem}): repair it or remove it from the "
            "reference directory."
        ) from None
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    if edge != size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1).copy()
