#!/usr/bin/env bash
# peft's LoRA on a tied embedding and head gives other logits once it is merged.
#
# peft 0.21.2 with transformers 5.23.0: with target_modules=["embed_tokens", "lm_head"] on a model
# with tied embeddings, merging adds both adapters to the one weight, so that each side has also that
# of the other. ensure_weight_tying=True shares one adapter, which is then added twice. No exception.
#
# Seen: logits of up to 2 change by 204 without it, logits of up to 203 by 203 with it.
# Who meets it: whoever merges an adapter before drawing (a model with fewer than 2B parameters often
# ties its embedding); unmerged adapters are right.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.23.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
print("peft", peft.__version__, "transformers", transformers.__version__)
ids = torch.tensor([[1, 5, 7, 9]])


def change(**options):
    """The largest logit, and the largest change of one by merging."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=40, tie_word_embeddings=True,
    )
    modules = ["embed_tokens", "lm_head"]
    lora = LoraConfig(r=4, target_modules=modules, init_lora_weights=False, **options)
    adapted = get_peft_model(LlamaForCausalLM(config), lora).eval()
    with torch.no_grad():
        before = adapted(ids).logits
        after = adapted.merge_and_unload()(ids).logits
    return float(before.abs().max()), float((after - before).abs().max())


for options in ({}, {"ensure_weight_tying": True}):
    size, changed = change(**options)
    print(options, f"logits of up to {size:.1f} change by {changed:.1f} when adapters are merged")
    if changed < 0.1 * size:
        raise SystemExit("changed: merging keeps the logits")
PYTHON
