"""Download images from the web: many at a time, within limits, with a kind for every failure."""

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from PIL import Image, ImageOps
from pydantic import PositiveFloat, PositiveInt

from tempera.runtime.image_decoding import decode_picture

FORBIDDEN = {"noai", "noimageai", "noindex", "noimageindex"}
"""X-Robots-Tag directives by which a server forbids training on an image, as in img2dataset."""
USER_AGENT = "Mozilla/5.0 (compatible; tempera; research on image generation)"


@dataclass
class Limits:
    """Limits of a download.

    Attributes:
        concurrency: number of downloads at a time.
        timeout: seconds for one image: for an answer, and until the last byte.
        max_bytes: largest file.
        min_side: shortest side of a usable image, in pixels.
        size: larger images are shrunk until their shorter side has this many pixels.
        robots: leave out images whose server forbids training on them.
    """

    concurrency: PositiveInt
    timeout: PositiveFloat
    max_bytes: PositiveInt
    min_side: int
    size: PositiveInt
    robots: bool


def download(addresses: Sequence[str], limits: Limits) -> list[bytes | str]:
    """Download images and turn them into JPEGs of a usable size, in the order of the addresses; a
    string says why there is none.
    """
    most = httpx.Limits(max_connections=limits.concurrency, max_keepalive_connections=20)
    client = httpx.Client(
        headers={"User-Agent": USER_AGENT},
        follow_redirects=True,
        timeout=limits.timeout,
        limits=most,
    )
    with client, ThreadPoolExecutor(limits.concurrency) as pool:
        return list(pool.map(lambda address: _image(client, address, limits), addresses))


def _image(client: httpx.Client, address: str, limits: Limits) -> bytes | str:
    """An image, or the kind of failure."""
    deadline = time.monotonic() + limits.timeout
    body = bytearray()
    try:
        with client.stream("GET", address) as response:
            if response.status_code >= 400:
                return f"HTTP {response.status_code}"
            if limits.robots and _forbidden(response.headers):
                return "training forbidden (X-Robots-Tag)"
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > limits.max_bytes:
                    return "too large"
                if time.monotonic() > deadline:
                    return "TimeoutError"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as problem:
        return type(problem).__name__
    return usable(bytes(body), limits)


def _forbidden(headers: httpx.Headers) -> bool:
    """Whether the headers forbid training. Directives for a named crawler (`name: directive`) do
    not apply to this one.
    """
    tags = [value for value in headers.get_list("x-robots-tag") if ":" not in value]
    return bool(FORBIDDEN & {part.strip().lower() for tag in tags for part in tag.split(",")})


def usable(body: bytes, limits: Limits) -> bytes | str:
    """A downloaded file as a JPEG whose shorter side has at most `limits.size` pixels."""
    try:
        image = decode_picture(body)
    except OSError:
        return "no image"
    if min(image.size) < limits.min_side:
        return "too small"
    if min(image.size) > limits.size:
        image = ImageOps.cover(image, (limits.size, limits.size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()
