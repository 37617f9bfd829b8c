#!/usr/bin/env bash
# Janus puts its guidance into the caller's list of logits processors.
#
# transformers 5.23.0: JanusForConditionalGeneration.generate(generation_mode="image") appends a
# ClassifierFreeGuidanceLogitsProcessor to the LogitsProcessorList that it was given. A second call
# with the same list has two of them and ends in an error about the batch size.
#
# Seen: a list that was empty has one entry after a call; "Logits should have twice the batch size of
# the input ids ..." in the second call.
# Who meets it: whoever makes a list of processors once and draws several images with it.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.23.0
"$place/venv/bin/python" - <<'PYTHON'
import warnings

import torch
import transformers
from transformers import JanusConfig, JanusForConditionalGeneration, LlamaConfig
from transformers import LogitsProcessorList

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
text = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=30, pad_token_id=1, bos_token_id=5,
)
vision = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16,
    num_image_tokens=16, projection_dim=32, intermediate_size=32,
)
vq = dict(
    embed_dim=8, num_embeddings=16, latent_channels=8, base_channels=32, channel_multiplier=[1, 1],
    num_res_blocks=1, num_patches=4, projection_dim=32, image_token_embed_dim=32,
)
config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=11)
model = JanusForConditionalGeneration(config).eval()
with torch.no_grad():  # so that codes differ
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3.0)
settings = model.generation_config
settings.bos_token_id, settings.pad_token_id = 5, 1
settings.generation_kwargs = {"boi_token_id": 9}
ids = torch.tensor([[5, 6, 7, 8, 9]])
call = dict(
    input_ids=ids, attention_mask=torch.ones_like(ids), generation_mode="image",
    guidance_scale=5.0, do_sample=False,
)
print("transformers", transformers.__version__, "torch", torch.__version__)

mine = LogitsProcessorList()
model.generate(**call, logits_processor=mine)
print("an empty list after a call:", [type(one).__name__ for one in mine])
if len(mine) != 1:
    raise SystemExit("changed: the caller's list stays as it was")
try:
    model.generate(**call, logits_processor=mine)
except ValueError as problem:
    print("a second call with it:", problem)
else:
    raise SystemExit("changed: a second call with the list works")
PYTHON
