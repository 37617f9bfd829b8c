"""Weights of published metrics: a local file, a file on the hub, or an official one at a URL.
Availability is checked before anything is generated; the weights are downloaded once.
"""

import hashlib
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tempera.errors import TemperaError
from tempera.runtime.files import is_unwritable, reason, unwritable
from tempera.runtime.hub import Repository, unreachable
from tempera.runtime.tensor_files import check_values, read_tensors
from tempera.runtime.waiting import waiting

SECONDS = 20
"""How long a server may be silent."""


@dataclass(frozen=True)
class WeightsFile:
    """A file that a metric reads.

    Attributes:
        location: the file itself, its directory, a hub id (`owner/name` or `owner/name@revision`),
            or a URL whose file name ends in the digest of the content, as those of torch.hub do.
        name: its name in the directory or repository.
    """

    location: str
    name: str

    @property
    def local(self) -> Path | None:
        """The file on this machine; None if it must be downloaded."""
        path = Path(self.location).expanduser()
        hub = Repository.named(self.location)
        file: Path | None = path / self.name if path.is_dir() else path
        if self._digest:
            file = Path(torch.hub.get_dir(), "checkpoints", path.name)
        elif hub and not path.exists():
            file = hub.cached(self.name)
        return file if file is not None and file.is_file() else None

    def size(self) -> int:
        """Bytes of the file, on this machine or as its server says; downloads nothing.

        Raises:
            TemperaError: it is unavailable.
        """
        local = self.local
        if local is not None:
            return local.stat().st_size
        return self._ask(download=False)

    def path(self) -> Path:
        """The file on this machine, downloaded first if necessary.

        Raises:
            TemperaError: it is unavailable, or not the file that its name's digest says.
        """
        if self.local is None:
            self._ask(download=True)
        assert self.local is not None
        return self.local

    def _ask(self, download: bool) -> int:
        """The file's size by its server, which it may also be downloaded from."""
        if self._digest:
            return self._ask_url(self._digest, download)
        hub = Repository.named(self.location)
        if hub is None:
            raise TemperaError(
                f"{self.name}, which a metric reads, is not at {self.location}: give the file, its "
                "directory or a hub id."
            )
        if download:
            return hub.file(self.name).stat().st_size
        return hub.size(self.name)

    def _ask_url(self, digest: str, download: bool) -> int:
        import httpx

        cached = Path(torch.hub.get_dir(), "checkpoints", self.location.rpartition("/")[2])
        try:
            if (why := unreachable(self.location)) is not None:
                raise httpx.ConnectError(why)
            if download:
                cached.parent.mkdir(parents=True, exist_ok=True)
                with waiting(f"{self.location} to be downloaded"), _silent_at_most(SECONDS):
                    torch.hub.download_url_to_file(self.location, str(cached), digest)
                return cached.stat().st_size
            answer = httpx.head(self.location, follow_redirects=True, timeout=SECONDS)
            return int(answer.raise_for_status().headers.get("content-length", 0))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as problem:
            if is_unwritable(problem):
                raise unwritable(cached, problem) from None
            raise TemperaError(
                f"{self.location}, which a metric reads, cannot be downloaded "
                f"({reason(problem)}): download it on a machine with a network, and put it at "
                f"{cached}."
            ) from None

    @property
    def _digest(self) -> str | None:
        """The digest in a URL's file name, which torch.hub checks after the download; None for
        other places.
        """
        address = re.fullmatch(r"https?://.*-([0-9a-f]{8,})\.\w+", self.location)
        return address[1] if address else None


@contextmanager
def _silent_at_most(seconds: float) -> Iterator[None]:
    """Inside the `with` block new sockets have a time limit, which torch.hub sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def check_weights(path: Path) -> None:
    """Raise TemperaError if a file holds more than tensors, which the library that loads it might
    run, or tensors that mean nothing.
    """
    state = read_tensors(path)
    numbers = {name: tensor for name, tensor in state.items() if tensor.dtype != torch.int64}
    check_values(numbers, path)


def identity(options: object, files: Iterable[Path]) -> str:
    """A hash of options and of the files' names, sizes and times: what was computed with a file is
    not taken for what its successor at the same place would give.
    """
    text = [repr(options)]
    for file in files:
        stat = file.stat()
        text.append(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]


def not_of(source: Path | str, what: str, reason: str) -> TemperaError:
    """The error for a file that holds something else."""
    return TemperaError(
        f"{source} does not hold the weights of {what} ({reason.rstrip('.')}): give the file that "
        "its authors publish."
    )
