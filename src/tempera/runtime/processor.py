"""The device and the dtype of a run, what processors compute fast, and how much memory was used."""

import functools
import os
import platform
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import nn

from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import started_with_others
from tempera.runtime.pretrained import are_sizes_enough
from tempera.runtime.quantised import QUANTISED, WeightsDtype, check_quantises, quantise

N = TypeVar("N", bound=nn.Module)
DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]

DRIVER = Path("/proc/driver/nvidia/version")
"""Where the driver of an NVIDIA GPU shows that there is one."""
CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes each processor."""


def tell_device() -> None:
    """Print which GPU `device=auto` is, or why it is a CPU on a machine with a GPU."""
    if torch.cuda.is_available():
        print(f"device=auto is cuda: {torch.cuda.get_device_name()}")
    elif DRIVER.exists():
        built = torch.version.cuda or torch.version.hip
        why = f"cannot use it: is its driver too old for CUDA {built}? See nvidia-smi"
        if not built:
            why = "is built without CUDA"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            why = "does not see it: CUDA_VISIBLE_DEVICES hides it"
        print(f"device=auto is cpu: there is a GPU, but PyTorch {torch.__version__} {why}")


def parse_device(name: str, dry: bool = False) -> torch.device:
    """`auto` (CUDA if available), or a device by PyTorch's name.

    Args:
        name: the option.
        dry: nothing will be put there: a GPU may be elsewhere.

    Raises:
        TemperaError: this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
        if device.type == "meta":
            if are_sizes_enough():
                return device
            raise RuntimeError(name)
        if dry and device.type == "cuda" and not torch.cuda.is_available():
            return device
        if device.type != "cuda":
            torch.empty(0, device=device)
        elif (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(name)  # counted: a tensor would take memory on the first device
    except (RuntimeError, AssertionError, ImportError):
        raise TemperaError(
            f"`device={shortened(str(name))}` is not on this machine; use auto, cpu, cuda or cuda:N"
        ) from None
    if device.index is not None and device.type == "cuda" and started_with_others():
        raise TemperaError(
            f"`device={name}` would put all processes of this run on one GPU; give device=cuda, "
            "and each takes a different one"
        )
    return device


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` (bfloat16 on a GPU that computes it, else float32), float32, bfloat16 or float16."""
    if name == "auto":
        fast = device.type == "cuda" and computes_bfloat16(device)
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def draft_dtype(target: torch.dtype, computes_bfloat16: bool) -> torch.dtype:
    """What `drafter.dtype=auto` is: bfloat16 where a device computes it fast, unless the target has
    two bytes too. The law of a draft is what it computes, so exactness does not depend on it.

    Args:
        target: dtype of the target's weights.
        computes_bfloat16: see the function of this name.
    """
    return torch.bfloat16 if computes_bfloat16 and target == torch.float32 else target


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16 matrices. x86 processors without
    AVX512-BF16 or AMX, and GPUs before Ampere (T4, V100), emulate them, which is slower than
    float32.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True  # also of a GPU that a dry run is for, elsewhere
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    x86 = platform.machine().lower() in ("x86_64", "amd64")  # where oneDNN's answer is AVX-512
    return not x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a device computes with weights of a dtype. Few processors multiply float16
    numbers fast, so on a CPU weights rounded to float16 are computed with in float32.
    """
    widened = dtype == torch.float16 and device.type == "cpu"
    return torch.float32 if widened else dtype


@dataclass(frozen=True)
class Placement:
    """Where networks compute, and the dtype of their weights; and that of their layers' where they
    are quantised.
    """

    device: torch.device
    dtype: torch.dtype
    quantised: WeightsDtype | None = None

    @classmethod
    def named(
        cls,
        device: str,
        dtype: DtypeName,
        dry_run: bool = False,
        weights_dtype: WeightsDtype | None = None,
    ) -> "Placement":
        """That of the options `device`, `dtype` and `weights_dtype`; see `parse_device`,
        `parse_dtype` and `runtime.quantised`.

        Raises:
            TemperaError: this machine or this installation does not have what they name.
        """
        parsed = parse_device(device, dry_run)
        if weights_dtype is not None:
            check_quantises("weights_dtype", weights_dtype, parsed)
        return cls(parsed, parse_dtype(dtype, parsed), weights_dtype)

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype in which the device computes; see `arithmetic`."""
        return arithmetic(self.dtype, self.device)

    @property
    def draft_dtype_name(self) -> str:
        """What the option `drafter.dtype=auto` is there; see `draft_dtype`."""
        dtype = draft_dtype(self.dtype, computes_bfloat16(self.device))
        return str(dtype).removeprefix("torch.")

    @property
    def dtype_name(self) -> str:
        """The dtype as the option `dtype` names it."""
        return str(self.dtype).removeprefix("torch.")

    def frozen(self, network: N, layers: Iterable[nn.Module] = ()) -> N:
        """Put a network there, its weights rounded to the dtype, without gradients. Those of
        `layers` are quantised, if they are to be, before they reach the device.
        """
        if self.quantised is not None:
            for layer in layers:
                layer.to(self.dtype).to(self.arithmetic)
                quantise(network, layer, self.quantised, self.device)
        rounded = network.to(self.device, self.dtype).to(self.arithmetic)
        return rounded.eval().requires_grad_(False)


def draft_placement(
    dtype: torch.dtype | None, target: torch.dtype, device: torch.device
) -> Placement:
    """Where a draft computes.

    Args:
        dtype: of its weights, in which it computes (see `arithmetic`); by default the target's.
            int8, int4: of those of its layers; the rest has the target's dtype.
        target: dtype of the target's weights.
        device: the target's.
    """
    if dtype in QUANTISED:
        return Placement(device, target, QUANTISED[dtype])
    return Placement(device, dtype or target)


def tell_slow_bfloat16(option: str, instead: str, device: torch.device) -> None:
    """Print that an option makes a device compute what it is slow at; nothing on others.

    Args:
        option: that asks for bfloat16, as `name=value`.
        instead: what to give for float32.
        device: of the networks.
    """
    if not computes_bfloat16(device):
        kind = "GPU" if device.type == "cuda" else "processor"
        print(f"{option} is slower than {instead} on this {kind}, which emulates bfloat16")


def name_of(device: torch.device) -> str:
    """A GPU's name; otherwise the kind of device, the processor and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} {_processor()}, {threads} thread{'s' if threads > 1 else ''}"


@functools.cache
def _processor() -> str:
    """The processor's name as Linux tells it, else its architecture."""
    with suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine()


def forget_peak_memory(device: torch.device) -> None:
    """Count the peak from here on; that of a CPU's process cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident  # bytes on macOS, else KiB
