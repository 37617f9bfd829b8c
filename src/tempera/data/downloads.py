"""Download images from the web: many at a time, within limits, with a kind for every failure, by
the rules of img2dataset; and again where the failure may pass.
"""

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from PIL import Image, ImageOps
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tempera.runtime.image_decoding import decode_picture

FORBIDDEN = {"noai", "noimageai", "noindex", "noimageindex"}
"""X-Robots-Tag directives by which a server forbids training on an image, as in img2dataset."""
USER_AGENT = "Mozilla/5.0 (compatible; tempera; research on image generation)"


PASSING = {408, 425, 429}
"""Refusals of a request (HTTP 4xx) that say to ask again later; so do all errors of a server."""
PAUSE = 1.0
"""Seconds before the first repetition; every further one waits twice as long."""


@dataclass
class Limits:
    """Limits of a download.

    Attributes:
        concurrency: number of downloads at a time.
        timeout: seconds for one image: for an answer, and until the last byte.
        retries: how often an image is asked for again whose server did not answer, or only that it
            cannot now.
        max_bytes: largest file.
        min_side: shortest side of a usable image, in pixels.
        size: larger images are shrunk until their shorter side has this many pixels.
        robots: leave out images whose server forbids training on them.
    """

    concurrency: PositiveInt
    timeout: PositiveFloat
    retries: NonNegativeInt
    max_bytes: PositiveInt
    min_side: int
    size: PositiveInt
    robots: bool


@dataclass(frozen=True)
class Failure:
    """Why there is no image. final: a later request would get the same answer."""

    kind: str
    final: bool


Outcome = bytes | Failure
"""An image, as a JPEG of a usable size, or the failure."""


def download(addresses: Sequence[str], limits: Limits) -> list[Outcome]:
    """Download images, in the order of the addresses. What failed for now is asked for again, after
    a pause.
    """
    most = httpx.Limits(max_connections=limits.concurrency, max_keepalive_connections=20)
    client = httpx.Client(
        headers={"User-Agent": USER_AGENT},
        follow_redirects=True,
        timeout=limits.timeout,
        limits=most,
    )
    outcomes = dict[str, Outcome]()
    missing = list(dict.fromkeys(addresses))
    with client, ThreadPoolExecutor(limits.concurrency) as pool:
        for repetition in range(limits.retries + 1):
            if repetition:
                time.sleep(PAUSE * 2 ** (repetition - 1))
            found = pool.map(lambda address: _image(client, address, limits), missing)
            outcomes.update(zip(missing, found, strict=True))
            missing = [address for address in missing if is_open(outcomes[address])]
            if not missing:
                break
    return [outcomes[address] for address in addresses]


def is_open(outcome: Outcome) -> bool:
    """Whether another request may get another answer."""
    return isinstance(outcome, Failure) and not outcome.final


def _image(client: httpx.Client, address: str, limits: Limits) -> Outcome:
    deadline = time.monotonic() + limits.timeout
    body = bytearray()
    try:
        with client.stream("GET", address) as response:
            status = response.status_code
            if status >= 400:
                return Failure(f"HTTP {status}", status < 500 and status not in PASSING)
            if limits.robots and _forbidden(response.headers):
                return Failure("training forbidden (X-Robots-Tag)", final=True)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > limits.max_bytes:
                    return Failure("too large", final=True)
                if time.monotonic() > deadline:
                    return Failure("TimeoutError", final=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as problem:
        return Failure(type(problem).__name__, final=True)
    except (httpx.HTTPError, OSError, ValueError) as problem:
        final = isinstance(problem, ValueError)  # such as an address whose host is no name
        return Failure(type(problem).__name__, final)
    return usable(bytes(body), limits)


def _forbidden(headers: httpx.Headers) -> bool:
    """Whether the headers forbid training. Directives for a named crawler (`name: directive`) do
    not apply to this one.
    """
    tags = [value for value in headers.get_list("x-robots-tag") if ":" not in value]
    return bool(FORBIDDEN & {part.strip().lower() for tag in tags for part in tag.split(",")})


def usable(body: bytes, limits: Limits) -> Outcome:
    """A downloaded file as a JPEG whose shorter side has at most `limits.size` pixels."""
    try:
        image = decode_picture(body)
    except OSError:
        return Failure("no image", final=True)
    if min(image.size) < limits.min_side:
        return Failure("too small", final=True)
    if min(image.size) > limits.size:
        image = ImageOps.cover(image, (limits.size, limits.size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()
