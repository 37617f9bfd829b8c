"""Real images that generated pictures are compared with."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from tempera.errors import TemperaError
from tempera.metrics.evaluators import Pictures, at_least_1
from tempera.runtime.hub import CannotReach, Repository

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
LEAST = 16
"""A reference needs at least this many images."""
COCO = Repository(
    "lmms-lab/COCO-Caption2017", "dataset", "ba347b1dc8dcc9c2c07f0d51c073403ae2ab5d42"
)
"""MS-COCO 2017's validation images, 815 MB of Parquet."""
_PARTS = "data/val*.parquet"
_ARRAY = "arr_0"
"""ADM's .npz files keep the pictures under this name, uint8 [n, h, w, 3]."""


@dataclass(frozen=True)
class Reference:
    """Real images, cropped to their central square and resized to the size of the generated
    pictures.

    Args:
        place: a directory with png, jpg and webp files at any depth, a `.npz` file as ADM publishes
            for ImageNet, `coco` for MS-COCO 2017's 5,000 validation images from the hub, or None
            for no reference.
        size: edge length in pixels; that of the generated pictures by default.
    """

    place: str | None = None
    size: int | None = None

    @property
    def given(self) -> bool:
        """Whether there is a reference."""
        return self.place is not None

    @property
    def identity(self) -> str:
        """A hash of the options and of the files' names and sizes."""
        text = [repr(self), *(f"{file.name}:{file.stat().st_size}" for file in self._files())]
        if self._of_hub:
            text.append(str(COCO))
        return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise TemperaError unless there are enough images, or the hub offers them."""
        if self.size is not None:
            at_least_1(size=self.size)
        if self._of_hub:
            COCO.to_download([_PARTS])
        elif self._is_array:
            self._array()
        elif len(self._files()) < LEAST:
            raise TemperaError(
                f"{self.place} holds {len(self._files())} images: give a directory of {LEAST} or "
                "more real images (png, jpg or webp), a .npz file of ADM's, or coco."
            )

    def to_download(self) -> int:
        """Bytes that `fetch` will download; 0 if the hub cannot be reached."""
        with suppress(CannotReach):
            return COCO.to_download([_PARTS]) if self._of_hub else 0
        return 0

    def fetch(self) -> None:
        """Download the files that are not on this machine yet."""
        if self._of_hub:
            COCO.snapshot([_PARTS])

    def pictures(self, edge: int) -> Iterator[Pictures]:
        """The images in batches, uint8 [B, 3, h, w].

        Args:
            edge: edge length of the generated pictures, in pixels.
        """
        images = self._images()
        while group := list(islice(images, 50)):
            yield np.stack([_square(image, self.size or edge) for image in group])

    def _images(self) -> Iterator[Image.Image]:
        if self._of_hub:
            for part in sorted(COCO.snapshot([_PARTS]).glob(_PARTS)):
                for rows in pq.ParquetFile(part).iter_batches(50, columns=["image"]):
                    for row in rows.to_pylist():
                        yield _read(io.BytesIO(row["image"]["bytes"]), row["image"]["path"])
        elif self._is_array:
            yield from map(Image.fromarray, self._array())
        else:
            yield from (_read(path, str(path)) for path in self._files())

    @property
    def _of_hub(self) -> bool:
        return self.place == "coco"

    @property
    def _is_array(self) -> bool:
        return self.place is not None and self.place.endswith(".npz")

    def _array(self) -> Pictures:
        try:
            found: Pictures = np.load(str(self.place))[_ARRAY]
        except (OSError, ValueError, KeyError) as problem:
            raise TemperaError(
                f"{self.place} holds no pictures {_ARRAY} ({problem}): give a reference batch of "
                "ADM's, such as VIRTUAL_imagenet256_labeled.npz."
            ) from None
        return found

    def _files(self) -> list[Path]:
        if self.place is None or self._of_hub:
            return []
        place = Path(self.place).expanduser()
        found = [place] if place.is_file() else place.rglob("*")
        return sorted(path for path in found if path.suffix.lower() in (*ENDINGS, ".npz"))


def _read(file: Path | io.BytesIO, name: str) -> Image.Image:
    try:
        return Image.open(file).convert("RGB")
    except OSError as problem:
        raise TemperaError(
            f"{name} cannot be read as an image ({problem}): repair it or remove it from the "
            "reference."
        ) from None


def _square(image: Image.Image, size: int) -> Pictures:
    """The central square of an image, resized: uint8 [3, size, size]."""
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    if edge != size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1).copy()
