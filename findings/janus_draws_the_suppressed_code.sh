#!/usr/bin/env bash
# Janus draws only the code that was to be suppressed.
#
# transformers 5.23.0: in JanusForConditionalGeneration's image mode, suppress_tokens forbids a code
# in the conditional and in the unconditional row. Guidance comes behind it and makes NaN of -inf and
# -inf, and argmax takes NaN for the largest: the whole greedy image consists of the forbidden code.
#
# Seen: greedy codes 15 10 10 ...; with code 1 suppressed 1 1 1 ...
# Who meets it: whoever keeps codes out of images by suppress_tokens, bad_words_ids or a logits
# processor that gives -inf.
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

free = model.generate(**call)[0].tolist()
forbidden = next(code for code in range(16) if code not in free)
told = model.generate(**call, suppress_tokens=[forbidden])[0].tolist()
print("greedy codes:", free)
print("greedy codes with", forbidden, "suppressed:", told)
if set(told) != {forbidden}:
    raise SystemExit("changed: the suppressed code is no longer all that is drawn")
PYTHON
