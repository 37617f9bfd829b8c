"""A frozen linear layer for products with few rows.

A round multiplies few rows (a token or a small tree, twice as many with guidance) by large
matrices, so reading the weights dominates the time. On a CPU oneDNN can read them in blocks of its
kernel's order. What this saves depends on the processor and on the number of rows: on an AMD EPYC
packed products are twice as fast from two rows on; on a Xeon without AMX they are slower up to
about eight rows, and twice as fast above. So both are timed for the first weight of each shape that
is packed, once for a kind of processor: the cache keeps the decision, because the two differ by
rounding, and a run that is resumed ends as one that is not. Where the plain product is faster at
few rows, the plain weight is kept beside the packed one, which doubles its memory. On the EPYC
packed products of one to three rows take up to 1.5 times as long as those of four: there rows of
zeros are added.

The public interface (`torch.utils.mkldnn`) does not pack and is slower than `F.linear`, so this
uses the operators that TorchInductor uses, and `F.linear` where there are none.

Shapes: I inputs, O outputs.
"""

import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from tempera.runtime.files import remembered
from tempera.runtime.processor import computes_bfloat16
from tempera.runtime.quantised import is_quantised

Products: TypeAlias = tuple[Callable[[Tensor, Tensor], Tensor], Sequence[Tensor]]
"""What multiplies rows by a weight, and weights."""

ROWS = 16
"""Rows that weights are packed for. Blocks chosen for 2 to 64 rows are equally fast at 1 to 240
rows; blocks chosen for one row are not.
"""

SMALL = 2**18
"""Float32 weights with fewer entries are not packed: a call of oneDNN takes about ten microseconds
longer than PyTorch's own product. This choice involves no timing.
"""

TIMED_ROWS = 1, 2, 4, 8, 16, 32
"""Numbers of rows that both products are timed at."""

FILLED = 4
"""Rows that packed products of fewer are filled up to with zeros, where that is faster."""

GAIN = 1.1
"""How many times as fast plain or filled products must be to be used: a smaller gain is not worth a
second copy of the weights, and may be chance.
"""

TIMED_ENTRIES = 2**24
"""Entries that are timed, of a larger weight or of several: 64 MB, more than most caches hold,
because a pass reads its weights from memory.
"""

LAYERS = 32
"""Most weights that are timed: those of so many layers."""


def packs(weight: Tensor) -> bool:
    """Whether packing suits a weight: it is large enough, and oneDNN multiplies its dtype."""
    if is_quantised(weight):  # torchao multiplies it
        return False
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bfloat16(weight.device)
    return weight.dtype == torch.float32 and weight.numel() >= SMALL


class PackedLinear(nn.Module):
    """x·Wᵀ + b without gradients, with W packed where that is faster.

    Args:
        weight: W, [O, I]; one that is quantised (`runtime.quantised`) stays as it is.
        bias: b, [O], or None.
        least_rows: fewest rows of x, for `faster_plain_rows`; None leaves W as it is, for a product
            that gradients flow through.

    Attributes:
        plain: W, or None if only the packed weight is kept.
        packed: W in oneDNN's blocks, or None if it is not packed.
        plain_rows: most rows of x that the plain weight multiplies.
        least_packed: rows of zeros are added up to so many, for the packed weight.
    """

    bias: Tensor | None
    plain: Tensor | None
    packed: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, least_rows: int | None = None
    ) -> None:
        super().__init__()
        weight = weight.detach()
        packed = None
        self.plain_rows, self.least_packed = 0, 0
        if least_rows is not None and packs(weight):
            packed = _packed(weight)
            self.plain_rows, self.least_packed = faster_rows(
                *weight.shape, weight.dtype, least_rows, torch.get_num_threads()
            )
        stores_plain = packed is None or self.plain_rows > 0
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.register_buffer("plain", weight if stores_plain else None, persistent=False)
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:
        """W, [O, I]: plain, or in oneDNN's blocks if only these are kept."""
        weight: Any = self.packed if self.plain is None else self.plain
        return cast(Tensor, weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        plain, packed = self.plain, self.packed
        rows = x.numel() // x.shape[-1]
        if packed is None or (plain is not None and rows <= self.plain_rows):
            return nn.functional.linear(x, self.weight, self.bias)
        if rows < self.least_packed:
            return _multiply_filled(x, packed, self.bias)
        return _multiply_packed(x, packed, self.bias)

    def to_dtype(self, dtype: torch.dtype, least_rows: int) -> "PackedLinear":
        """A packed copy whose weights have another dtype."""
        weight = self.weight.to_dense() if self.plain is None else self.plain.clone()
        bias = None if self.bias is None else self.bias.to(dtype)
        return PackedLinear(weight.to(dtype), bias, least_rows)


@lru_cache
def faster_rows(
    outputs: int, inputs: int, dtype: torch.dtype, least_rows: int, threads: int
) -> tuple[int, int]:
    """Which products with weights [O, I] are fast, of `least_rows` rows on. Timed once for the same
    arguments: later processes read what the first one has decided, where there is a cache.

    Returns:
        most of `TIMED_ROWS` up to which the plain product is `GAIN` times as fast as the packed
        one, 0 if it never is; and rows to which packed ones are filled up, 0 if that is not `GAIN`
        times as fast.
    """
    kind = f"{outputs}x{inputs} {str(dtype).removeprefix('torch.')} from {least_rows}"
    name = f"{kind}, {threads} threads, {processor()}, torch {torch.__version__}"

    def timed() -> dict[str, int]:
        plain_rows, least_packed = _timed_rows(outputs, inputs, dtype, least_rows)
        return {"plain_rows": plain_rows, "least_packed": least_packed}

    found = remembered("faster_products", name, timed)
    return found["plain_rows"], found["least_packed"]


def processor() -> str:
    """The processor's name, or where the system does not tell it, the kind of machine."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _timed_rows(outputs: int, inputs: int, dtype: torch.dtype, least_rows: int) -> tuple[int, int]:
    """See `faster_rows`."""
    timed = min(outputs, max(1, TIMED_ENTRIES // inputs))
    count = min(LAYERS, max(1, TIMED_ENTRIES // (timed * inputs)))
    weights = [torch.ones(timed, inputs, dtype=dtype) for _ in range(count)]
    blocks = [_packed(weight) for weight in weights]
    plain = nn.functional.linear, weights
    packed = _multiply_packed, blocks
    filled = _multiply_filled, blocks

    def is_faster(rows: int, one: Products, other: Products) -> bool:
        one_time, other_time = _times(torch.ones(rows, inputs, dtype=dtype), one, other)
        return GAIN * one_time <= other_time

    fills = least_rows < FILLED and is_faster(least_rows, filled, packed)
    least_packed = FILLED if fills else 0
    faster = 0
    for rows in TIMED_ROWS:
        if rows >= least_rows:
            if not is_faster(rows, plain, filled if rows < least_packed else packed):
                break
            faster = rows
    return faster, least_packed


def _times(x: Tensor, *kinds: Products) -> list[float]:
    """The least seconds of each kind of products, in five turns after a first."""
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(6):
        for found, (multiply, weights) in zip(times, kinds, strict=True):
            start = perf_counter()
            for weight in weights:
                multiply(x, weight)
            found.append(perf_counter() - start)
    return [min(found[1:]) for found in times]


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return packed


def _multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        out: Tensor = _compiled_product(x, packed, bias)
        return out
    return _product(x, packed, bias)


def _multiply_filled(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of fewer rows than `FILLED`, with rows of zeros behind them."""
    rows = x.reshape(-1, x.shape[-1])
    filled = nn.functional.pad(rows, (0, 0, 0, FILLED - len(rows)))
    out = _multiply_packed(filled, packed, bias)
    return out[: len(rows)].view(*x.shape[:-1], out.shape[-1])


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@torch.library.custom_op("tempera::packed_product", mutates_args=())
def _compiled_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The same product. TorchInductor takes its own operator for weights that are constants of a
    graph alone, and ours are inputs.
    """
    return _product(x, packed, bias)


@_compiled_product.register_fake
def _like_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def pack(module: nn.Module, least_rows: int) -> None:
    """Replace the linear layers inside a module, see `PackedLinear`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias, least_rows))
        else:
            pack(child, least_rows)
