"""Memory, disk space and time that a job needs, printed and checked before it starts."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tempera.errors import DiskTooSmall, MemoryTooSmall, MemoryUnknown
from tempera.runtime.units import amount, duration

SHARE = 0.9
"""Share of the free memory that a chosen batch may fill; the allocator needs some of the rest."""


@dataclass(frozen=True)
class Cost:
    """What a job needs.

    Attributes:
        work: what the job does, in numbers.
        weights: bytes of the networks on the device.
        cache: bytes of the target's KV cache.
        peak: largest number of bytes in tensors, weights and cache included.
        written: largest number of bytes that it writes to its directory.
        download: bytes of its networks that the hub's cache lacks; None if the hub cannot be
            reached.
        stored: bytes that it writes elsewhere, by directory.
        metrics: bytes of metrics' networks and reference images that are to be downloaded.
    """

    work: str
    weights: int
    cache: int
    peak: int
    written: int
    download: int | None
    stored: Mapping[Path, int] = field(default_factory=dict)
    metrics: int = 0

    def __str__(self) -> str:
        parts = [f"weights {amount(self.weights)}"]
        parts += [f"KV cache {amount(self.cache)}"] if self.cache else []
        parts += [f"the rest {amount(self.peak - self.weights - self.cache)}"]
        download = "unknown, as the hub cannot be reached"
        if self.download is not None:
            download = amount(self.download) if self.download else "nothing"
        download += f", and {amount(self.metrics)} for metrics" if self.metrics else ""
        stored = "".join(
            f", and about {amount(size)} in {place}" for place, size in self.stored.items()
        )
        return "\n".join(
            [
                f"to do: {self.work}",
                f"memory: about {amount(self.peak)} ({', '.join(parts)})",
                f"disk: at most {amount(self.written)}{stored}; to download: {download}",
            ]
        )

    def check(self, device: torch.device, directory: Path) -> None:
        """Refuse a device or a disk that is too small.

        Args:
            device: of the networks.
            directory: what the job writes to.

        Raises:
            MemoryTooSmall, DiskTooSmall: says how much is available and how much is needed.
        """
        free = free_memory(device)
        if free is not None and self.peak > free:
            raise MemoryTooSmall(str(device), amount(self.peak), amount(free))
        from huggingface_hub import constants

        cache = {Path(constants.HF_HUB_CACHE): (self.download or 0) + self.metrics}
        check_disks({directory: self.written, **cache, **self.stored})


@dataclass(frozen=True)
class Time:
    """How long a job takes, extrapolated from a part of it.

    Attributes:
        parts: seconds of its parts, by name.
        sample: what was timed.
        excluded: what is not included.
        processes: number of processes that share the work.
    """

    parts: Mapping[str, float]
    sample: str
    excluded: str
    processes: int = 1

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {duration(part)}" for name, part in self.parts.items() if part)
        shared = f" with {self.processes} processes" if self.processes > 1 else ""
        return (
            f"about {duration(self.total)}{shared} ({parts}), from {self.sample}; not included: "
            f"{self.excluded}"
        )


def largest_batch(peak: Callable[[int], int], most: int, device: torch.device, sharing: int) -> int:
    """The largest batch whose peak fits `SHARE` of a device's free memory.

    Peaks grow linearly with the batch, so two of them give a first guess, which is then checked and
    made smaller if it does not fit.

    Args:
        peak: bytes that a batch takes at its peak.
        most: largest batch of use.
        device: of the networks.
        sharing: processes of this machine that share the memory of a CPU.

    Raises:
        MemoryUnknown: the free memory of such a device is not known.
        MemoryTooSmall: not even a batch of 1 fits.
    """
    free = free_memory(device)
    if free is None:
        raise MemoryUnknown(str(device))
    usable = int(SHARE * free / (sharing if device.type == "cpu" else 1))
    one = peak(1)
    if one > usable:
        raise MemoryTooSmall(str(device), amount(one), amount(free))
    few = min(4, most)
    each = max(1, (peak(few) - one) // max(1, few - 1))
    size = max(1, min(most, 1 + (usable - one) // each))
    while size > 1 and peak(size) > usable:
        size = size * 9 // 10
    return size


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a CUDA device; for a CPU, all of the machine's memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or os.name != "posix":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_disks(needed: Mapping[Path, int]) -> None:
    """Refuse a disk that is too small for all that will be written to it.

    Args:
        needed: bytes by directory.

    Raises:
        DiskTooSmall: names the directory that takes most.
    """
    for place in sorted(needed, key=lambda place: needed[place], reverse=True):
        disk = _existing(place).stat().st_dev
        together = sum(
            size for other, size in needed.items() if _existing(other).stat().st_dev == disk
        )
        if together > (free := free_disk(place)):
            raise DiskTooSmall(str(place), amount(together), amount(free))


def free_disk(directory: Path) -> int:
    """Free bytes on the disk that holds a directory, or will hold it."""
    return shutil.disk_usage(_existing(directory)).free


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return place
