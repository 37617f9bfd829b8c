"""Real images that generated pictures are compared with."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from rich.progress import track

from tempera.errors import TemperaError
from tempera.metrics.evaluators import Pictures
from tempera.metrics.weights import identity
from tempera.runtime.files import reason
from tempera.runtime.hub import CannotReach, Repository
from tempera.runtime.image_files import decode_picture

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
LEAST = 16
"""A reference needs at least this many images."""
COCO = Repository(
    "lmms-lab/COCO-Caption2017", "dataset", "ba347b1dc8dcc9c2c07f0d51c073403ae2ab5d42"
)
"""MS-COCO 2017's validation images, 815 MB of Parquet."""
_PARTS = "data/val*.parquet"


@dataclass(frozen=True)
class Reference:
    """Real images, cropped to their central square and resized to the size of the generated
    pictures.

    Args:
        place: a directory with png, jpg and webp files at any depth, `coco` for MS-COCO 2017's
            5,000 validation images from the hub, or None for no reference.
    """

    place: str | None = None

    @property
    def identity(self) -> str:
        """Names the options and the files as they are now."""
        return identity((self, COCO if self._of_hub else None), self._files())

    def check(self) -> None:
        """Raise TemperaError unless there are enough images, each of which can be read, or the hub
        offers them.
        """
        if self._of_hub:
            COCO.to_download([_PARTS])
            return
        if self.place is None:
            raise _refused(
                "there are no real images to compare with: give metrics.reference=DIR, or "
                "metrics.reference=coco for MS-COCO's"
            )
        files = self._files()
        if len(files) < LEAST:
            there = Path(self.place).expanduser().is_dir()
            found = f"holds {len(files) or 'no'} images" if there else "is not a directory"
            raise _refused(
                f"metrics.reference={self.place} {found}: give a directory of {LEAST} or more real "
                "images (png, jpg or webp), or coco."
            )
        with ThreadPoolExecutor() as pool:
            checked = pool.map(lambda path: _read(path, str(path)).close(), files)
            list(track(checked, "checking the reference", len(files), transient=True))

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
            yield np.stack([_square(image, edge) for image in group])

    def _images(self) -> Iterator[Image.Image]:
        if self._of_hub:
            for part in sorted(COCO.snapshot([_PARTS]).glob(_PARTS)):
                for rows in pq.ParquetFile(part).iter_batches(50, columns=["image"]):
                    for row in rows.to_pylist():
                        yield _read(row["image"]["bytes"], row["image"]["path"])
        else:
            yield from (_read(path, str(path)) for path in self._files())

    @property
    def _of_hub(self) -> bool:
        return self.place == "coco"

    def _files(self) -> list[Path]:
        if self.place is None or self._of_hub:
            return []
        found = Path(self.place).expanduser().rglob("[!.]*")
        return sorted(path for path in found if path.suffix.lower() in ENDINGS)


def _read(image: Path | bytes, name: str) -> Image.Image:
    try:
        return decode_picture(image)
    except OSError as problem:
        raise _refused(
            f"{name} cannot be read as an image ({reason(problem)}): repair it or remove it from "
            "the reference."
        ) from None


def _refused(sentence: str) -> TemperaError:
    return TemperaError(sentence, option="metrics.reference")


def _square(image: Image.Image, size: int) -> Pictures:
    """The central square of an image, resized: uint8 [3, size, size]."""
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    if edge != size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1).copy()
