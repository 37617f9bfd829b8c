"""Pictures embedded in a page: small, and each distinct picture only once."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tempera.runtime.image_files import Picture


@dataclass(frozen=True)
class _WebP:
    """A WebP encoding: longest edge in pixels (None: unchanged) and quality (None: lossless)."""

    edge: int | None
    quality: int | None

    def __call__(self, picture: Picture) -> bytes:
        image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
        if self.edge is not None and max(image.size) > self.edge:
            image.thumbnail((self.edge, self.edge), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(
            file, "WEBP", lossless=self.quality is None, quality=self.quality or 80, method=4
        )
        return file.getvalue()


LOSSLESS_PIXELS = 128 * 128
"""Pictures with more pixels are never stored losslessly."""
ENCODINGS = (
    _WebP(None, None),
    _WebP(None, 90),
    *(_WebP(edge, 80) for edge in (512, 384, 256, 192, 128, 96)),
    *(_WebP(64, quality) for quality in (70, 40, 10)),
    _WebP(32, 10),
)
"""From the best quality to the smallest file."""
SAMPLE = 8
"""Number of pictures on which an encoding is tried before it is applied to all."""


def data_addresses(pictures: Sequence[Picture], budget: int) -> list[str]:
    """Each picture as a `data:` URL. The first of `ENCODINGS` that keeps all of them within
    `budget` characters is used, or the last if none does. Equal pictures have equal URLs and count
    once.
    """
    keys = [(picture.shape, picture.tobytes()) for picture in pictures]
    distinct = dict(zip(keys, pictures, strict=True))
    large = any(picture[0].size > LOSSLESS_PIXELS for picture in pictures)
    known: dict[tuple[tuple[int, ...], bytes], str] = {}
    for encode in ENCODINGS[1:] if large else ENCODINGS:
        last = encode is ENCODINGS[-1]
        if not last and not _seems_to_fit(encode, list(distinct.values()), budget):
            continue
        known = {key: _address(encode(picture)) for key, picture in distinct.items()}
        if sum(map(len, known.values())) <= budget:
            break
    return [known[key] for key in keys]


def _seems_to_fit(
    encode: Callable[[Picture], bytes], pictures: Sequence[Picture], budget: int
) -> bool:
    """Whether all pictures would fit the budget, judged by a few of them."""
    few = pictures[:: max(1, len(pictures) // SAMPLE)]
    return sum(len(_address(encode(one))) for one in few) * len(pictures) <= budget * len(few)


def _address(content: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(content).decode("ascii")
