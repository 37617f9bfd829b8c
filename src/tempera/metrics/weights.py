"""Weights of published metrics: a local file, a file on the hub, or one at a URL. Availability is
checked before anything is generated; the weights are downloaded once.
"""

import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.hub import Repository
from tempera.runtime.network_directory import NetworkType
from tempera.runtime.pretrained import fill, on_meta

Told = TypeVar("Told")

SECONDS = 20
"""Time limit for a server's answer whether it has a file."""


@dataclass(eq=False)
class NoMetricWeights(TemperaError):
    """A metric's weights are unavailable. file: which; problem: why; advice: what to do."""

    file: "WeightsFile"
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file.names[0]}, which a metric reads, {self.problem}: {self.advice}."


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
        if self._is_url:
            return self._kept if self._kept.is_file() else None
        for name in self.names:
            if (place / name).is_file():
                return place / name
            if repository is not None and (found := repository.cached(name)) is not None:
                return found
        return None

    def check(self) -> None:
        """Raise TemperaError unless the file is on this machine or its server offers it. Downloads
        nothing.
        """
        if self.local is not None:
            return
        if self._is_url:
            self._asked()
        else:
            self._first(lambda repository, name: repository.size(name))

    def size(self) -> int:
        """Bytes of the file, on this machine or as its server says; downloads nothing.

        Raises:
            TemperaError: it is unavailable.
        """
        if self.local is not None:
            return self.local.stat().st_size
        if self._is_url:
            return int(self._asked().get("Content-Length", 0))
        return self._first(lambda repository, name: repository.size(name))

    def path(self) -> Path:
        """The file on this machine, downloaded first if necessary.

        Raises:
            TemperaError: it is unavailable.
        """
        found = self.local
        if found is None and self._is_url:
            found = self._downloaded()
        return found or self._first(lambda repository, name: repository.file(name))

    def _asked(self) -> Message:
        """The headers with which the URL's server offers the file.

        Raises:
            NoMetricWeights: it does not.
        """
        if constants.HF_HUB_OFFLINE:  # its user wants no requests of any kind
            raise self._unreachable(OSError("HF_HUB_OFFLINE=1"))
        request = urllib.request.Request(self.place, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                headers: Message = answer.headers
        except (OSError, ValueError) as problem:
            raise self._unreachable(problem) from None
        return headers

    def _downloaded(self) -> Path:
        self.check()
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        digest = re.search(r"-([0-9a-f]{8,})\.\w+$", self.names[0])
        try:
            torch.hub.download_url_to_file(
                self.place, str(self._kept), hash_prefix=digest[1] if digest else None
            )
        except (OSError, RuntimeError) as problem:
            raise self._unreachable(problem) from None
        return self._kept

    def _first(self, ask: Callable[[Repository, str], Told]) -> Told:
        """The answer of `ask` for the first of the names that the repository has."""
        if self._repository is None:
            raise NoMetricWeights(
                self, f"is not at {self.place}", "give the file, its directory or a hub id"
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
    def _kept(self) -> Path:
        """Where torch.hub, torch-fidelity and torchvision store the file of a URL."""
        return Path(torch.hub.get_dir()) / "checkpoints" / self.names[0]

    def _unreachable(self, problem: Exception) -> NoMetricWeights:
        return NoMetricWeights(
            self,
            f"cannot be downloaded from {self.place} ({problem})",
            f"fetch it on a machine with network and put it at {self._kept}",
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
    return network.float()


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
