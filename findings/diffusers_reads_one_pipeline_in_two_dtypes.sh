#!/usr/bin/env bash
# diffusers reads one pipeline in two dtypes.
#
# diffusers 0.42.1 with transformers 5.23.0: without dtype (once torch_dtype), parts that are diffusers' are read
# in float32, and parts that are transformers' in the dtype of their files. A GlmImagePipeline saved
# in bfloat16 comes back with a text encoder in bfloat16 and a transformer in float32.
#
# Seen: transformer float32, text_encoder bfloat16, vae float32.
# Who meets it: whoever loads a pipeline as its page shows and leaves dtype out: twice the
# memory for the larger parts, and errors or silent casts where the dtypes meet.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.23.0 diffusers==0.42.1 accelerate==1.15.0
"$place/venv/bin/python" - <<'PYTHON'
import tempfile
import warnings

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel,
)
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

warnings.simplefilter("ignore")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=384)
transformer = GlmImageTransformer2DModel(
    patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
    num_attention_heads=2, text_embed_dim=16, time_embed_dim=16, condition_dim=8,
    prior_vq_quantizer_codebook_size=24,
)
vae = AutoencoderKL(
    block_out_channels=[32] * 4, down_block_types=["DownEncoderBlock2D"] * 4,
    up_block_types=["UpDecoderBlock2D"] * 4, layers_per_block=1, latent_channels=4,
    latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
)
pipeline = GlmImagePipeline(
    tokenizer=ByT5Tokenizer(), processor=None, text_encoder=T5EncoderModel(T5Config(**sizes)).eval(),
    vision_language_encoder=None, vae=vae, transformer=transformer,
    scheduler=FlowMatchEulerDiscreteScheduler(),
)
pipeline.set_progress_bar_config(disable=True)
print("diffusers", diffusers.__version__, "transformers", transformers.__version__)
with tempfile.TemporaryDirectory() as place:
    pipeline.to(torch.bfloat16).save_pretrained(place)
    read = GlmImagePipeline.from_pretrained(place, vision_language_encoder=None, processor=None)
parts = ("transformer", "text_encoder", "vae")
kinds = {part: next(getattr(read, part).parameters()).dtype for part in parts}
for part, dtype in kinds.items():
    print(part, dtype)
if len(set(kinds.values())) == 1:
    raise SystemExit("changed: all parts have one dtype")
PYTHON
