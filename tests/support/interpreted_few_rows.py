"""Compares the kernel of `few_rows_kernel` with PyTorch in float64, by Triton's interpreter on a
CPU, and ends with an assertion if they differ.
"""

import itertools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch import Tensor
from triton.runtime import interpreter

from tempera.targets import few_rows_kernel
from tempera.targets.products import by_torch

SIZES = (2, 1280, 64), (12, 520, 33), (3, 7, 5), (16, 300, 1), (1, 1, 70)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of numbers around 1, relative and absolute: what is rounded to the dtype is the result, and
under a norm x times its weight.
"""
dot = interpreter.InterpreterBuilder.create_dot


def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Of bfloat16, whose bits the interpreter keeps as integers, which it would multiply."""
    if a.dtype.scalar == interpreter.tl.bfloat16:
        wide = interpreter.tl.float32
        a, b = (self.create_fp_ext(x, wide) for x in (a, b))
    return dot(self, a, b, *rest)


def case(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, block: int, parts: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """The kernel's result and that of PyTorch in float64."""
    normed, biased, added, gated = parts
    made = torch.Generator().manual_seed(rows * 1000 + inputs + outputs)

    def random(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + scale * torch.randn(shape, generator=made)).to(dtype)

    width = outputs * (2 if gated else 1)
    x, weight = random(rows, inputs, scale=3), random(width, inputs, scale=inputs**-0.5 / 3)
    norm = random(inputs, scale=0.1, mean=3.0) if normed else None
    bias = random(width) if biased else None
    residual = random(rows, outputs) if added else None
    kernel = few_rows_kernel.few_rows_product
    given = x, weight, bias, norm, 0.5, residual
    found = few_rows_kernel.launch(kernel, *given, gated, block)
    doubles = [one.double() if isinstance(one, Tensor) else one for one in given]
    return found.double(), by_torch(*doubles, gated)  # type: ignore[arg-type]


def main() -> None:
    """Compare all cases: sizes by dtype, parts by dtype, and numbers of outputs of a block."""
    interpreter.InterpreterBuilder.create_dot = wide_dot
    parts = list(itertools.product([False, True], repeat=4))
    dtypes = list(TOLERANCE)
    cases = [(*size, dtype, 16, (True,) * 4) for size in SIZES for dtype in dtypes]
    cases += [(rows, 256, 40, torch.bfloat16, 16, (True,) * 4) for rows in range(1, 17)]
    cases += [(5, 300, 21, dtype, 8, part) for part in parts for dtype in dtypes]
    cases += [(5, 512, 64, dtype, 32, part) for part in parts[::5] for dtype in dtypes]
    for one in cases:
        found, expected = case(*one)
        tolerance = TOLERANCE[one[3]]
        assert torch.allclose(found, expected, tolerance, tolerance), (
            one,
            (found - expected).abs().max(),
        )
    print(f"passed: {len(cases)} cases")


if __name__ == "__main__":
    main()
