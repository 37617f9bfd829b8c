#!/usr/bin/env bash
# Janus draws an image without looking at the picture in its prompt.
#
# transformers 5.23.0: JanusForConditionalGeneration's generate takes pixel_values in image mode, too,
# hands them to the language model, which drops what it does not know, and embeds the placeholders
# of the picture as text. No error or warning says so. In text mode the picture is read.
#
# Seen: the same greedy codes for a black picture, for noise and without pixel_values; the logits of
# a text differ.
# Who meets it: whoever lets a Janus edit or vary a picture.
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
ids = torch.tensor([[5, 6, 9] + [11] * 16 + [8, 7, 9]])
mask = torch.ones_like(ids)
call = dict(
    input_ids=ids, attention_mask=mask, generation_mode="image", guidance_scale=5.0,
    do_sample=False,
)
print("transformers", transformers.__version__, "torch", torch.__version__)

black, noise = torch.zeros(1, 3, 64, 64), torch.randn(1, 3, 64, 64)
images = [model.generate(**call, pixel_values=pixels)[0].tolist() for pixels in (black, noise)]
images.append(model.generate(**call)[0].tolist())
for name, image in zip(("black", "noise", "no picture"), images):
    print("codes,", name + ":", image)
with torch.no_grad():
    texts = [model(ids, pixel_values=pixels, attention_mask=mask).logits for pixels in (black, noise)]
difference = (texts[0] - texts[1]).abs().max().item()
print("largest difference of the logits of a text:", round(difference, 3))
if not (images[0] == images[1] == images[2] and len(set(images[0])) > 2 and difference > 0.01):
    raise SystemExit("changed: the picture is read, or refused, in image mode")
PYTHON
