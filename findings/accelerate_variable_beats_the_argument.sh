#!/usr/bin/env bash
# ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins over the argument of Accelerator, whose documentation
# says that the variable counts where the argument is not passed. With mixed_precision the argument
# wins, and so does a GradientAccumulationPlugin. The loss is divided by the variable's number.
# Seen: Accelerator(gradient_accumulation_steps=1) has 4; the gradient of 8 x is 2; with
# mixed_precision="no" beside ACCELERATE_MIXED_PRECISION=bf16 it is "no".
# Met by: scripts with such an option of their own, started where a launcher or an earlier job left
# the variable behind: gradients are smaller than the recorded options say.
# Versions: accelerate 1.15.0, torch 2.14.1.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv venv
venv/bin/pip install -q accelerate==1.15.0 torch==2.14.1
cat > show.py <<'APP'
import os
os.environ |= {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}
import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin

print("accelerate", accelerate.__version__, "torch", torch.__version__)
one = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1, mixed_precision="no")
x = torch.ones(1, requires_grad=True)
one.backward((8 * x).sum())
print("argument 1:", one.gradient_accumulation_steps, "gradient", x.grad.item(), one.mixed_precision)
plugin = GradientAccumulationPlugin(num_steps=1)
two = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin, mixed_precision="no")
print("plugin of 1:", two.gradient_accumulation_steps)
APP
seen=$(CUDA_VISIBLE_DEVICES= venv/bin/python show.py)
echo "$seen"
if ! grep -q "argument 1: 4 gradient 2.0 no" <<< "$seen" || ! grep -q "plugin of 1: 1" <<< "$seen"; then
  echo "changed"
  exit 1
fi
echo "as described"
