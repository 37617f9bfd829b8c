#!/usr/bin/env bash
# A compiled function that calls FlexAttention loses what it writes into attributes after that.
#
# torch 2.14.1: an object's attribute is written, flex_attention is called, and the attribute is
# written again. The compiled function reads the first value from then on, and leaves it in the
# object. No exception, and no graph break. Values in a list or a dict are kept.
#
# Seen: 1 is read and left, where the same function without torch.compile reads and leaves 2.
# Who meets it: whoever compiles calls of FlexAttention over state that an object holds, such as
# where a KV cache is written: later passes then write where the first one did.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1
"$place/venv/bin/python" - <<'PYTHON'
import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

warnings.simplefilter("ignore")
print("torch", torch.__version__)


class Box:
    x = 0


def added(box, q):
    box.x = 1
    q = flex_attention(q, q, q)
    box.x = 2
    return q + box.x


def difference(function):
    """By how much a compiled function differs from itself, and the attribute that each leaves."""
    q = torch.randn(1, 1, 4, 16)
    plain, compiled = Box(), Box()
    graph = torch.compile(function, backend="eager", fullgraph=True)
    change = float((graph(compiled, q) - function(plain, q)).abs().max())
    return change, compiled.x, plain.x


change, found, true = difference(added)
print(f"compiled, the sum differs by {change:.2f}, and the attribute is {found}, not {true}")
if change < 0.5 or found == true:
    raise SystemExit("changed: attributes are kept")
PYTHON
