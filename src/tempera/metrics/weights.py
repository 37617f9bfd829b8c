"""Weights of published metrics: a local file, a file on the hub, or one at a URL. Availability is
checked before anything is generated; the weights are downloaded once.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import torch
from huggingface_hub import constants
from torch import Tensor

from tempera.errors import TemperaError
from tempera.runtime.files import cache_directory, is_unwritable, reason, unwritable
from tempera.runtime.hub import Repository
from tempera.runtime.network_directory import NetworkType
from tempera.runtime.tensor_files import fill

Told = TypeVar("Told")
SECONDS = 20
"""Time limit for a server's answer whether it has a file."""


@dataclass(frozen=True)
class WeightsFile:
    """A file that a metric reads.

    Attributes:
        place: the file itself, its directory, a hub id (`owner/name` or `owner/name@revision`), or
            a URL.
        names: the names that it may have in the directory or repository, the usual one first.
    """

    place: str
    names: tuple[str, ...]

    @property
    def local(self) -> Path | None:
        """The file on this machine; None if it must be downloaded."""
        place, hub = Path(self.place).expanduser(), Repository.named(self.place)
        cached = [hub.cached(name) for name in self.names] if hub and not place.exists() else []
        here = [place, *(place / name for name in self.names), *cached]
        here = [self._kept] if self._is_url else here
        return next((path for path in here if path is not None and path.is_file()), None)

    def size(self) -> int:
        """Bytes of the file, on this machine or as its server says; downloads nothing.

        Raises:
            TemperaError: it is unavailable.
        """
        if (local := self.local) is not None:
            return local.stat().st_size
        if not self._is_url:
            return self._on_hub(Repository.size)
        options = {"follow_redirects": True, "timeout": SECONDS}
        answer = self._asked(lambda: httpx.head(self.place, **options).raise_for_status())  # type: ignore[arg-type]
        return int(answer.headers.get("content-length", 0))

    def path(self) -> Path:
        """The file on this machine, downloaded first if necessary.

        Raises:
            TemperaError: it is unavailable, or not the file that its name's digest says.
        """
        if (local := self.local) is not None:
            return local
        if not self._is_url:
            return self._on_hub(Repository.file)
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        fetch = torch.hub.download_url_to_file
        self._asked(lambda: fetch(self.place, str(self._kept), self._digest))
        return self._kept

    def _on_hub(self, ask: Callable[[Repository, str], Told]) -> Told:
        """The answer of `ask` for the first of the names that the repository has."""
        hub, problems = Repository.named(self.place), list[TemperaError]()
        for name in self.names if hub else ():
            try:
                return ask(hub, name)  # type: ignore[arg-type]
            except TemperaError as problem:
                problems.append(problem)
        raise [*problems, TemperaError(
            f"{self.names[0]}, which a metric reads, is not at {self.place}: give the file, "
            "its directory or a hub id."
        )][0]  # fmt: skip

    def _asked(self, ask: Callable[[], Told]) -> Told:
        """The answer of a server."""
        try:
            if constants.HF_HUB_OFFLINE:  # its user wants no requests of any kind
                raise httpx.ConnectError("HF_HUB_OFFLINE=1")
            return ask()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as problem:
            if is_unwritable(problem):
                raise unwritable(self._kept, problem) from None
            raise TemperaError(
                f"{self.place}, which a metric reads, cannot be downloaded ({reason(problem)}): "
                f"fetch it on a machine with network and put it at {self._kept}."
            ) from None

    @property
    def _is_url(self) -> bool:
        return self.place.startswith(("https://", "http://"))

    @property
    def _digest(self) -> str | None:
        """The digest in the file's name, which torch.hub checks after the download."""
        found = re.search(r"-([0-9a-f]{8,})\.\w+$", self.place)
        return found[1] if found else None

    @property
    def _kept(self) -> Path:
        """Where the file of a URL is stored: with those of torch.hub if its name states its
        content, else apart from files of all other URLs.
        """
        name = self.place.partition("?")[0].rpartition("/")[2]
        if self._digest:
            return Path(torch.hub.get_dir(), "checkpoints", name)
        url = hashlib.sha256(self.place.encode()).hexdigest()[:16]
        return cache_directory() / "weights" / f"{url}-{name}"


def filled(
    network: NetworkType, state: Mapping[str, Tensor], source: Path, what: str
) -> NetworkType:
    """The network, frozen and in float32, with the tensors of `state` in its layout.

    Args:
        network: on the meta device or with any weights.
        state: tensors.
        source: the file that they come from, for errors.
        what: what the weights should be, for errors.

    Raises:
        TemperaError: they are the weights of another network.
    """
    try:
        fill(network, state, source)
    except TemperaError as problem:
        raise not_of(source, what, str(problem)) from None
    return network.float().eval().requires_grad_(False)


def not_of(source: Path, what: str, reason: str) -> TemperaError:
    """The error for a file that holds something else."""
    return TemperaError(
        f"{source} does not hold the weights of {what} ({reason.rstrip('.')}): give the file that "
        "its authors publish."
    )
