"""Memory and disk that a job will take, told and checked before it starts."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tempera.errors import DiskTooSmall, MemoryTooSmall
from tempera.runtime.units import amount


@dataclass(frozen=True)
class Cost:
    """What a job takes.

    Attributes:
        work: what it does, in numbers.
        weights: bytes of the networks on the device.
        cache: bytes of the target's KV cache.
        peak: bytes of all tensors at most, weights and cache included.
        written: bytes that it writes to its directory, at most.
        download: bytes that the hub's cache lacks of its networks; None if the hub cannot be asked.
    """

    work: str
    weights: int
    cache: int
    peak: int
    written: int
    download: int | None

    def __str__(self) -> str:
        parts = [f"weights {amount(self.weights)}"]
        parts += [f"KV cache {amount(self.cache)}"] if self.cache else []
        parts += [f"the rest {amount(self.peak - self.weights - self.cache)}"]
        download = "unknown, as the hub cannot be reached"
        if self.download is not None:
            download = amount(self.download) if self.download else "nothing"
        return "\n".join(
            [
                f"to do: {self.work}",
                f"memory: about {amount(self.peak)} ({', '.join(parts)})",
                f"disk: at most {amount(self.written)}; to download: {download}",
            ]
        )

    def check(self, device: torch.device, directory: Path) -> None:
        """Refuse a device or a disk that is too small.

        Args:
            device: of the networks.
            directory: what the job writes to.

        Raises:
            MemoryTooSmall, DiskTooSmall: says how much is there and how much is needed.
        """
        if self.peak > (free := free_memory(device)):
            raise MemoryTooSmall(str(device), amount(self.peak), amount(free))
        from huggingface_hub import constants

        places = ((directory, self.written), (Path(constants.HF_HUB_CACHE), self.download or 0))
        for place, needed in places:
            if needed > (free := free_disk(place)):
                raise DiskTooSmall(str(place), amount(needed), amount(free))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device; on a CPU all of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_disk(directory: Path) -> int:
    """Bytes that are free where a directory is, or will be."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
