#!/usr/bin/env bash
# A picture of GlmImagePipeline depends on the text that another prompt of the batch puts in quotes.
#
# diffusers 0.42.1: the embeddings of quoted texts are padded with zeros to the longest of the batch,
# and no mask keeps the transformer from attending to the padding. The same codes and noise give
# another picture beside a prompt with a longer sign.
#
# Seen: "a cat" beside "a dog" is the picture of "a cat" alone (4e-6), beside a prompt with a sign it
# differs by 0.08 (of 1).
# Who meets it: whoever makes pictures of several prompts in one call, or compares batch sizes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.23.0 diffusers==0.42.1 accelerate==1.15.0
"$place/venv/bin/python" - <<'PYTHON'
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
codes = torch.randint(24, (1, 16))


def first(*prompts):
    """The first picture of a batch; every picture has the same codes and the same noise."""
    return pipeline(
        prompt=list(prompts), height=64, width=64, prior_token_ids=codes.repeat(len(prompts), 1),
        num_inference_steps=4, generator=[torch.Generator().manual_seed(7) for _ in prompts],
        output_type="np",
    ).images[0]


alone = first("a cat")
same = abs(first("a cat", "a dog") - alone).max()
other = abs(first("a cat", 'a sign that says "WELCOME TO THE MARKET"') - alone).max()
print(f"'a cat' beside 'a dog':              pixels differ by up to {same:.1e}")
print(f"'a cat' beside a prompt with a sign: pixels differ by up to {other:.1e}")
if other < 1e-4 or other < 100 * same:
    raise SystemExit("changed: a picture no longer depends on its neighbour's quoted text")
PYTHON
