"""Weights of published metrics: a local file, a file on the hub, or one at a URL. Availability is
checked before anything is generated; the weights are downloaded once.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from huggingface_hub import constants
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import cache_directory, is_unwritable, reason, unwritable
from tempera.runtime.hub import Repository
from tempera.runtime.network_directory import NetworkType
from tempera.runtime.pretrained import on_meta
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
        place, repository = Path(self.place).expanduser(), self._repository
        if place.is_file():
            return place
        here = [self._kept] if self._is_url else [place / name for name in self.names]
        if repository is not None:
            here += [found for name in self.names if (found := repository.cached(name))]
        return next((path for path in here if path.is_file()), None)

    def size(self) -> int:
        """Bytes of the file, on this machine or as its server says; downloads nothing.

        Raises:
            TemperaError: it is unavailable.
        """
        if self.local is not None:
            return self.local.stat().st_size
        if not self._is_url:
            return self._first(lambda repository, name: repository.size(name))
        try:
            if constants.HF_HUB_OFFLINE:  # its user wants no requests of any kind
                raise httpx.ConnectError("HF_HUB_OFFLINE=1")
            answer = httpx.head(self.place, follow_redirects=True, timeout=SECONDS)
            return int(answer.raise_for_status().headers.get("content-length", 0))
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise self._unreachable(problem) from None

    def path(self) -> Path:
        """The file on this machine, downloaded first if necessary.

        Raises:
            TemperaError: it is unavailable, or not the file that its name's digest says.
        """
        if self.local is not None:
            return self.local
        if not self._is_url:
            return self._first(lambda repository, name: repository.file(name))
        self.size()
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(self.place, str(self._kept), self._digest)
        except (OSError, RuntimeError) as problem:
            if is_unwritable(problem):
                raise unwritable(self._kept, problem) from None
            raise self._unreachable(problem) from None
        return self._kept

    def _first(self, ask: Callable[[Repository, str], Told]) -> Told:
        """The answer of `ask` for the first of the names that the repository has."""
        if self._repository is None:
            raise TemperaError(
                f"{self.names[0]}, which a metric reads, is not at {self.place}: give the file, "
                "its directory or a hub id."
            )
        problems = []
        for name in self.names:
            try:
                return ask(self._repository, name)
            except TemperaError as problem:
                problems.append(problem)
        raise problems[0]

    @property
    def _is_url(self) -> bool:
        return self.place.startswith(("https://", "http://"))

    @property
    def _repository(self) -> Repository | None:
        name, _, revision = self.place.partition("@")
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or Path(self.place).exists():
            return None
        return Repository(name, revision=revision or None)

    @property
    def _name(self) -> str:
        """The file's name in its URL."""
        return self.place.partition("?")[0].rpartition("/")[2]

    @property
    def _digest(self) -> str | None:
        """The digest in the file's name, which torch.hub checks after the download."""
        found = re.search(r"-([0-9a-f]{8,})\.\w+$", self._name)
        return found[1] if found else None

    @property
    def _kept(self) -> Path:
        """Where the file of a URL is stored: with those of torch.hub if its name states its
        content, else apart from files of all other URLs.
        """
        if self._digest:
            return Path(torch.hub.get_dir(), "checkpoints", self._name)
        url = hashlib.sha256(self.place.encode()).hexdigest()[:16]
        return cache_directory() / "weights" / f"{url}-{self._name}"

    def _unreachable(self, problem: Exception) -> TemperaError:
        return TemperaError(
            f"{self._name}, which a metric reads, cannot be downloaded from {self.place} "
            f"({reason(problem)}): fetch it on a machine with network and put it at {self._kept}."
        )


def filled(
    make: Callable[[], NetworkType], state: Mapping[str, Tensor], source: Path, what: str
) -> NetworkType:
    """A frozen float32 network on the CPU with the tensors of `state`.

    Args:
        make: builds the network; called on the meta device.
        state: tensors in the network's layout.
        source: the file that they come from, for errors.
        what: what the weights should be, for errors.

    Raises:
        TemperaError: they are the weights of another network.
    """
    network = on_meta(make)
    try:
        fill(network, state, str(source))
    except TemperaError as problem:
        raise not_of(source, what, str(problem)) from None
    _restore_tables(network)
    return network.float().eval().requires_grad_(False)


def not_of(source: Path, what: str, reason: str) -> TemperaError:
    """The error for a file that holds something else."""
    return TemperaError(
        f"{source} does not hold the weights of {what} ({reason.rstrip('.')}): give the file that "
        "its authors publish."
    )


def _restore_tables(network: nn.Module) -> None:
    """Compute the buffers that no file holds: positions, and the causal masks of open_clip's text
    encoders.
    """
    tables: dict[str, Callable[[Any], Tensor]] = {
        "position_ids": lambda table: torch.arange(table.shape[-1]).expand(table.shape),
        "attn_mask": lambda table: torch.full(table.shape, float("-inf")).triu(1),
    }
    for module in network.modules():
        for name, table in list(module.named_buffers(recurse=False)):
            if table.is_meta:
                setattr(module, name, tables[name](table))
