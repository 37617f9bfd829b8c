#!/usr/bin/env bash
# LLM.int8 and per-tensor int8 make a token depend on what else is in its pass.
#
# bitsandbytes 0.50.2: with the usual llm_int8_threshold=6, an input feature that is large for one
# token is computed in float16 for all tokens of the pass, else all are rounded to 8 bits. torchao
# 0.18.0: Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()) rounds all by the largest
# input. So one token at a time and many at once are two models, and speculative decoding, batches
# and the split of a prompt change greedy tokens. threshold=0 and PerRow, torchao's default, do not.
#
# Seen: token 0 changes by 0.7% (LLM.int8) and 13% (PerTensor) of its size if token 1 is 20 times as
# large, and by exactly 0 with threshold 0 and PerRow.
# Who meets it: whoever verifies drafts with a quantised target and calls the result lossless.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 bitsandbytes==0.50.2 torchao==0.18.0
"$place/venv/bin/python" - <<'PYTHON'
import warnings

import bitsandbytes
import torch
import torchao
from bitsandbytes.nn import Linear8bitLt
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig as Int8, PerRow, PerTensor, quantize_,
)

warnings.simplefilter("ignore")
print("bitsandbytes", bitsandbytes.__version__, "torchao", torchao.__version__)
torch.manual_seed(0)
plain = torch.nn.Linear(256, 64, bias=False)
pair = torch.randn(2, 256)


def change(layer):
    """How much token 0 changes, of its size, if token 1 is 20 times as large."""
    with torch.no_grad():
        quiet, other = layer(pair)[0], layer(pair * torch.tensor([[1.0], [20.0]]))[0]
    return float((quiet - other).norm() / quiet.norm())


def int8(threshold):
    """The layer with 8-bit weights, as transformers loads it."""
    layer = Linear8bitLt(256, 64, bias=False, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict(plain.state_dict())
    return layer.to("cpu").eval()


def dynamic(granularity):
    """The layer with inputs that are rounded when it is called."""
    holder = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    holder.load_state_dict({"0.weight": plain.weight})
    quantize_(holder, Int8(granularity=granularity))
    return holder


coupled = {"threshold=6": change(int8(6.0)), "PerTensor": change(dynamic(PerTensor()))}
alone = {"threshold=0": change(int8(0.0)), "PerRow": change(dynamic(PerRow()))}
for name, value in (coupled | alone).items():
    print(f"{name}: token 0 changes by {value:.5f} of its size")
if min(coupled.values()) < 1e-3 or max(alone.values()) > 0:
    raise SystemExit("changed: other layers couple the tokens of a pass")
PYTHON
