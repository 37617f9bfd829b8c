"""Real images that generated pictures are compared with."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from rich.progress import track

from tempera.data.benchmarks import COCO2014
from tempera.data.entries import shown
from tempera.data.folder import pictures_in
from tempera.errors import TemperaError
from tempera.metrics.bootstrap import Array
from tempera.metrics.evaluators import Pictures
from tempera.metrics.weights import identity
from tempera.runtime.distributed import started_as_main
from tempera.runtime.files import cache_directory, reason, regular_file
from tempera.runtime.hub import Repository
from tempera.runtime.image_decoding import decode_picture

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
        location: a directory, whose pictures count at any depth
            (`tempera.data.folder.pictures_in`), a `.npz` file as ADM publishes for ImageNet, `coco`
            for MS-COCO 2017's 5,000 validation images from the hub, `coco2014` for the 40,504 of
            2014, or None for no reference.
    """

    location: str | None = None

    @property
    def identity(self) -> str:
        """Names the images as they are now, however their place is written."""
        return identity(self._repository, self._files())

    def check(self) -> None:
        """Raise TemperaError unless there are enough images, each of which can be read, or the hub
        offers them. Images whose features are cached have been read as they are now.
        """
        if self._repository is not None:
            self._repository.to_download([_PARTS])
            return
        if self.location is None:
            raise _refused(
                "there are no real images to compare with: give metrics.reference=DIR, or "
                "metrics.reference=coco for MS-COCO's"
            )
        files = self._files()
        self._check_count(files)
        self._tell(len(files))
        has_features = any(cache_directory().glob(f"{feature_cache(self.identity)}-*"))
        if not self._is_array and not has_features:
            _check_readable(files)

    def _check_count(self, files: Sequence[Path]) -> None:
        """Raise TemperaError for too few images."""
        assert self.location is not None
        count = len(_array(files[0])) if self._is_array else len(files)
        if count >= LEAST:
            return
        exists = Path(self.location).expanduser().exists()
        problem = f"holds {count or 'no'} images" if exists else "does not exist"
        raise _refused(
            f"metrics.reference={self.location} {problem}: give a directory of {LEAST} or more "
            "real images, a .npz file of ADM's, coco or coco2014."
        )

    def _tell(self, count: int) -> None:
        """Print how many pictures of a directory count, if it holds anything else."""
        assert self.location is not None
        left_out = {} if self._is_array else pictures_in(Path(self.location).expanduser())[1]
        if left_out and started_as_main():
            print(f"metrics.reference: {count:,} pictures; left out: {shown(left_out)}.")

    def to_download(self) -> int:
        """Bytes that `fetch` will download."""
        repository = self._repository
        return repository.to_download([_PARTS]) if repository else 0

    def fetch(self) -> None:
        """Download the files that are not on this machine yet."""
        if self._repository is not None:
            self._repository.snapshot([_PARTS])

    def pictures(self, edge: int) -> Iterator[Pictures]:
        """The images in batches, uint8 [B, 3, h, w].

        Args:
            edge: edge length of the generated pictures, in pixels.
        """
        images = self._images()
        while group := list(islice(images, 50)):
            yield np.stack([_square(image, edge) for image in group])

    def moments(self) -> tuple[Array, Array] | None:
        """Mean [D] and covariance [D, D] of Inception's features of all real images, as ADM keeps
        them beside 10,000 of the images; None if they are not known.

        Raises:
            TemperaError: a file has other shapes of them.
        """
        if not self._is_array:
            return None
        with np.load(regular_file(self._files()[0])) as file:
            if not {"mu", "sigma"} <= {*file.files}:
                return None
            mu, sigma = file["mu"].astype(np.float64), file["sigma"].astype(np.float64)
        if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
            raise _refused(
                f"{self.location} has mu {list(mu.shape)} and sigma {list(sigma.shape)}, which "
                "are not a mean and a covariance: download the file again, or remove both from "
                "it."
            )
        return mu, sigma

    def _images(self) -> Iterator[Image.Image]:
        if self._repository is not None:
            for part in sorted(self._repository.snapshot([_PARTS]).glob(_PARTS)):
                for rows in pq.ParquetFile(part).iter_batches(50, columns=["image"]):
                    for row in rows.to_pylist():
                        yield _read(row["image"]["bytes"], row["image"]["path"])
        elif self._is_array:
            yield from map(Image.fromarray, _array(self._files()[0]))
        else:
            yield from (_read(path, str(path)) for path in self._files())

    @property
    def _repository(self) -> Repository | None:
        """Where the images are on the hub, if they are there."""
        if self.location == "coco":
            return COCO
        return COCO2014 if self.location == "coco2014" else None

    @property
    def _is_array(self) -> bool:
        return self.location is not None and self.location.lower().endswith(".npz")

    def _files(self) -> list[Path]:
        if self.location is None or self._repository:
            return []
        path = Path(self.location).expanduser()
        if self._is_array:
            return [path]
        return pictures_in(path)[0]


def feature_cache(identity: str) -> str:
    """What names of cached features of real pictures begin with, by the identity of these."""
    return f"reference-{identity}"


def _check_readable(files: Sequence[Path]) -> None:
    """Raise TemperaError for the first file that is no image."""

    def check(path: Path) -> None:
        _read(path, str(path)).close()

    with ThreadPoolExecutor() as pool:
        checked = pool.map(check, files)
        for _ in track(checked, "checking the reference", len(files), transient=True):
            pass  # the pool raises here what a check has raised


def _array(path: Path) -> Pictures:
    """The pictures in a file of ADM's, uint8 [n, h, w, 3].

    Raises:
        TemperaError: it holds none.
    """
    try:
        array: Pictures = np.load(regular_file(path))["arr_0"]  # compares its checksum
        problem = f"arr_0 is {array.dtype} {list(array.shape)}, not uint8 [n, h, w, 3]"
        if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3 and array.size:
            return array
    except Exception as fault:  # zipfile, zlib and numpy raise anything on damaged bytes
        problem = reason(fault)
    raise _refused(
        f"{path} contains no pictures ({problem}): give a reference batch of ADM's, such as "
        "VIRTUAL_imagenet256_labeled.npz."
    )


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
    left = (image.width - edge) // 2
    top = (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    if edge != size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1).copy()
