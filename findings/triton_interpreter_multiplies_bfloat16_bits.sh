#!/usr/bin/env bash
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were whole numbers.
#
# triton 3.8.0 with TRITON_INTERPRET=1, torch 2.14.1, on a CPU: `tl.dot` of the identity and a matrix
# of numbers below 1. float32 and float16 give the matrix back. bfloat16 gives 2.6e8. There is no
# exception and no warning; Triton's manual names bfloat16 among what the interpreter does not
# support.
#
# Who meets it: whoever tests a kernel for bfloat16 on a machine without a GPU. A test against a
# tolerance fails for a right kernel; one that compares two kernels passes for wrong ones.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 triton==3.8.0 numpy==2.4.6
cat >"$place/product.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def product(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    entry = index[:, None] * SIZE + index[None, :]
    tl.store(out_ptr + entry, tl.dot(tl.load(x_ptr + entry), tl.load(y_ptr + entry)))


print("triton", triton.__version__)
errors = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    identity = torch.eye(16, dtype=dtype)
    matrix = (torch.arange(256.0).view(16, 16) / 256).to(dtype)
    out = torch.zeros(16, 16)
    product[(1,)](identity, matrix, out, SIZE=16)
    errors[dtype] = float((out - matrix.float()).abs().max())
    print(f"{dtype}: the product differs from the matrix by up to {errors[dtype]:.3g}")
if errors[torch.float32] or errors[torch.float16] or errors[torch.bfloat16] < 1:
    raise SystemExit("changed: bfloat16 is multiplied")
PYTHON
TRITON_INTERPRET=1 "$place/venv/bin/python" "$place/product.py"
