#!/usr/bin/env bash
# Int4WeightOnlyConfig() of torchao 0.18.0, as its documentation writes it, needs the package mslk,
# which pip does not install with torchao, and no other of its packing formats runs on a CPU or on
# the meta device. Int8WeightOnlyConfig() runs on both, so code that was tried with eight bits stops
# with four.
#
# Seen: int8: cpu runs, meta runs; int4: plain, preshuffled: ImportError ("Requires mslk"),
# plain_int32: NotImplementedError, tile_packed_to_4d: RuntimeError (it asks for an NVIDIA driver) or
# AssertionError (bfloat16 alone).
# Who meets it: whoever quantises a model to four bits on a machine without a GPU, or wants its size
# before it is there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.14.1 torchao==0.18.0 numpy
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import importlib.util
import sys

import torch
import torchao
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.int4.int4_packing_format import Int4PackingFormat

print(f"torchao {torchao.__version__}, torch {torch.__version__}, mslk:", bool(importlib.util.find_spec("mslk")))


def outcome(config, device):
    layer = nn.Linear(256, 256, bias=False, device=device, dtype=torch.bfloat16)
    try:
        quantize_(layer, config)
        layer(torch.ones(2, 256, device=device, dtype=torch.bfloat16))
    except Exception as problem:
        return type(problem).__name__
    return "runs"


ran = {}
for device in ("cpu", "meta"):
    ran["int8", device] = outcome(Int8WeightOnlyConfig(), device)
    ran["int4", device] = outcome(Int4WeightOnlyConfig(), device)
    for form in Int4PackingFormat:
        ran[f"int4 {form.value}", device] = outcome(
            Int4WeightOnlyConfig(int4_packing_format=form), device
        )
for (kind, device), result in ran.items():
    print(f"{kind} on {device}: {result}")
eight = all(result == "runs" for (kind, _), result in ran.items() if kind == "int8")
four = any(result == "runs" for (kind, _), result in ran.items() if kind != "int8")
sys.exit(not (eight and not four))
PY
