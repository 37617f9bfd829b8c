#!/usr/bin/env bash
# GLM-Image draws other images for num_return_sequences=2 than for a prompt given twice.
#
# transformers 5.23.0: GlmImageForConditionalGeneration.generate expands ids and masks for
# num_return_sequences, and not the grids that positions are made of. With top_k=1 every copy must be
# the same image; it is not that of the prompt alone.
#
# Seen: the prompt twice in a batch differs in 0 of 28 codes, num_return_sequences=2 in 8 and 5.
# Who meets it: whoever asks for several images of a prompt in one call.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.23.0
"$place/venv/bin/python" - <<'PYTHON'
import warnings

import torch
import transformers
from transformers import GlmImageConfig, GlmImageForConditionalGeneration

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(3)
rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
text = dict(
    hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=200, vision_vocab_size=32, pad_token_id=190, eos_token_id=25,
    rope_parameters={**rope, "mrope_section": [1, 1, 2]},
)
config = GlmImageConfig(
    text_config=text,
    vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, image_size=64),
    vq_config=dict(embed_dim=16, num_embeddings=24, latent_channels=32),
    image_token_id=195, image_start_token_id=24, image_end_token_id=25,
)
model = GlmImageForConditionalGeneration(config).eval()
with torch.no_grad():  # so that codes differ
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2.5)
ids = torch.tensor([[50, 51, 52, 53, 24]])
grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
print("transformers", transformers.__version__, "torch", torch.__version__)


def draw(rows, **options):
    """The most probable codes of a prompt that is given some times, [images, 28]."""
    return model.generate(
        input_ids=ids.expand(rows, -1), attention_mask=torch.ones(rows, 5, dtype=torch.int64),
        image_grid_thw=grids.repeat(rows, 1), images_per_sample=torch.full((rows,), 2),
        do_sample=True, top_k=1, max_new_tokens=28, min_new_tokens=28,
        suppress_tokens=list(range(24, 32)), **options,
    )[:, 5:]


alone = draw(1)
twice = (draw(2) != alone).sum(1).tolist()
copies = (draw(1, num_return_sequences=2) != alone).sum(1).tolist()
print("the prompt twice in a batch: codes that differ", twice, "of 28")
print("num_return_sequences=2:      codes that differ", copies, "of 28")
if any(twice) or not any(copies):
    raise SystemExit("changed: copies of the most probable image are equal")
PYTHON
