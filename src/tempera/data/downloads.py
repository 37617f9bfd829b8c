"""Download images from the web: many at a time, within limits, with a kind for every failure."""

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import PIL.Image

from tempera.errors import TemperaError

FORBIDDEN = {"noai", "noimageai", "noindex", "noimageindex"}
"""X-Robots-Tag directives by which a server forbids training on an image, as in img2dataset."""

USER_AGENT = "Mozilla/5.0 (compatible; tempera; research on image generation)"
REDIRECTS = 5
LARGEST = 50_000_000
"""Most pixels of an image; larger ones are not decoded."""


@dataclass(frozen=True)
class Limits:
    """Limits of a download.

    Attributes:
        concurrency: number of downloads at a time.
        timeout: seconds for one image, from the first request to the last byte.
        retries: further attempts after a time-out, a broken connection or a busy server.
        max_bytes: largest file.
        min_side: shortest side of a usable image, in pixels.
        size: larger images are shrunk until their shorter side has this many pixels.
        robots: leave out images whose server forbids training on them.
    """

    concurrency: int = 64
    timeout: float = 10.0
    retries: int = 1
    max_bytes: int = 20_000_000
    min_side: int = 64
    size: int = 768
    robots: bool = True

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("retries", 0), ("max_bytes", 1), ("size", 1)):
            if getattr(self, name) < least:
                raise TemperaError(
                    f"{name}={getattr(self, name)} is too small: give {least} or more."
                )
        if not self.timeout > 0:
            raise TemperaError(f"timeout={self.timeout} is not possible: give seconds above 0.")


@dataclass(frozen=True)
class Failure:
    """Why a download failed; `again` if another attempt may help."""

    kind: str
    again: bool = False


Outcome = bytes | Failure
"""A JPEG, or the failure."""


def download(addresses: Sequence[str], limits: Limits) -> list[Outcome]:
    """Download images and turn them into JPEGs of a usable size, in the order of the addresses."""
    with ThreadPoolExecutor(1) as thread:  # in a notebook this thread already runs an event loop
        return thread.submit(lambda: asyncio.run(_download(addresses, limits))).result()


def kinds(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How often each kind of failure occurred, most frequent first."""
    failures = Counter(outcome.kind for outcome in outcomes if isinstance(outcome, Failure))
    return dict(failures.most_common())


async def _download(addresses: Sequence[str], limits: Limits) -> list[Outcome]:
    gate = asyncio.Semaphore(limits.concurrency)
    connections = httpx.Limits(max_connections=limits.concurrency, max_keepalive_connections=20)
    async with httpx.AsyncClient(
        headers={"User-Agent": USER_AGENT},
        follow_redirects=True,
        max_redirects=REDIRECTS,
        timeout=limits.timeout,
        limits=connections,
        trust_env=True,
    ) as client:

        async def one(address: str) -> Outcome:
            async with gate:
                outcome = await _fetched(client, address, limits)
                for _ in range(limits.retries):
                    if not (isinstance(outcome, Failure) and outcome.again):
                        break
                    outcome = await _fetched(client, address, limits)
                if isinstance(outcome, Failure):
                    return outcome
                return await asyncio.to_thread(usable, outcome, limits)

        return list(await asyncio.gather(*map(one, addresses)))


async def _fetched(client: httpx.AsyncClient, address: str, limits: Limits) -> Outcome:
    """One attempt to download a file."""
    try:
        async with asyncio.timeout(limits.timeout):
            async with client.stream("GET", address) as response:
                if refusal := _refused(response, limits):
                    return refusal
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > limits.max_bytes:
                        return Failure("too large")
                return bytes(body)
    except (TimeoutError, httpx.TimeoutException):
        return Failure("timed out", again=True)
    except httpx.TooManyRedirects:
        return Failure("too many redirects")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, ValueError):
        return Failure("no address")
    except httpx.ConnectError:
        return Failure("unreachable", again=True)
    except (httpx.HTTPError, OSError):
        return Failure("broken off", again=True)


def _refused(response: httpx.Response, limits: Limits) -> Failure | None:
    """The failure that the response's status and headers show, if any."""
    if response.status_code >= 400:
        again = response.status_code in (408, 425, 429) or response.status_code >= 500
        return Failure(f"HTTP {response.status_code}", again)
    if limits.robots and not _allowed(response.headers):
        return Failure("training forbidden (X-Robots-Tag)")
    size = response.headers.get("content-length", "")
    return Failure("too large") if size.isdigit() and int(size) > limits.max_bytes else None


def _allowed(headers: httpx.Headers) -> bool:
    """Whether the headers permit training. Directives for a named crawler (`name: directive`) do
    not apply to this one.
    """
    directives = [
        directive.strip().lower()
        for value in headers.get_list("x-robots-tag")
        for directive in (value if ":" not in value else "").split(",")
    ]
    return not FORBIDDEN & set(directives)


def usable(body: bytes, limits: Limits) -> Outcome:
    """A downloaded file as a JPEG whose shorter side has at most `limits.size` pixels."""
    try:
        with PIL.Image.open(io.BytesIO(body)) as opened:
            if opened.width * opened.height > LARGEST:
                return Failure("too large")
            if min(opened.size) < limits.min_side:
                return Failure("too small")
            opened.draft("RGB", (limits.size, limits.size))  # a JPEG is decoded near this size
            image: Any = opened.convert("RGB")
    except PIL.Image.DecompressionBombError:
        return Failure("too large")
    except Exception:  # PIL's decoders may raise anything on damaged files
        return Failure("no image")
    scale = limits.size / min(image.size)
    if scale < 1:
        image = image.resize(
            (max(1, round(image.width * scale)), max(1, round(image.height * scale))),
            PIL.Image.Resampling.LANCZOS,
        )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()
