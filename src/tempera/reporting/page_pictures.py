"""Pictures inside a page: small, and each file once, however many runs share it."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tempera.runtime.image_files import Picture


@dataclass(frozen=True)
class _WebP:
    """A way to encode: longest edge in pixels (None: as it is), and quality (None: lossless)."""

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
"""Larger pictures are never tried without loss."""
WAYS = (
    _WebP(None, None),
    _WebP(None, 90),
    *(_WebP(edge, 80) for edge in (512, 384, 256, 192, 128, 96)),
    *(_WebP(64, quality) for quality in (70, 40, 10)),
    _WebP(32, 10),
)
"""From the best to the smallest."""
SAMPLE = 8
"""Pictures by which a way is judged before all are encoded."""


def data_addresses(pictures: Sequence[Picture], budget: int) -> list[str]:
    """Each picture as a `data:` address, all together of at most `budget` characters as far as the
    smallest way to encode them allows; equal pictures have equal addresses and count once.
    """
    keys = [(picture.shape, picture.tobytes()) for picture in pictures]
    distinct = dict(zip(keys, pictures, strict=True))
    large = any(picture[0].size > LOSSLESS_PIXELS for picture in pictures)
    known: dict[tuple[tuple[int, ...], bytes], str] = {}
    for way in WAYS[1:] if large else WAYS:
        if not _promises(way, list(distinct.values()), budget) and way is not WAYS[-1]:
            continue
        known = {key: _address(way(picture)) for key, picture in distinct.items()}
        if sum(map(len, known.values())) <= budget:
            break
    return [known[key] for key in keys]


def _promises(way: Callable[[Picture], bytes], pictures: Sequence[Picture], budget: int) -> bool:
    """Whether a few of the pictures are small enough for all of them to be."""
    few = pictures[:: max(1, len(pictures) // SAMPLE)]
    return sum(len(_address(way(one))) for one in few) * len(pictures) <= budget * len(few)


def _address(content: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(content).decode("ascii")
