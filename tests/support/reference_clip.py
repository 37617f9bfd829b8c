"""A second writing of CLIP, from the tensors of a checkpoint in open_clip's layout; and a tiny
random checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from tempera.runtime.torchvision import import_open_clip

State = Mapping[str, Tensor]
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
PATCH, EDGE, HEADS = 8, 16, 2
VISION = {"image_size": EDGE, "patch_size": PATCH, "layers": 2, "width": 16, "head_width": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "layers": 2, "width": 8, "heads": HEADS}
TINY = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def register(directory: Path, name: str = "tiny-vit") -> str:
    """Make the tiny architecture known to open_clip; returns its name."""
    open_clip = import_open_clip()
    path = directory / f"{name}.json"
    path.write_text(json.dumps(TINY))
    open_clip.add_model_config(path)
    return name


def random_state(name: str) -> dict[str, Tensor]:
    """Random weights of the architecture, in open_clip's layout."""
    torch.manual_seed(3)
    network = import_open_clip().create_model(name, load_weights=False)
    return {
        key: torch.randn_like(one) * 0.3 + one if one.dim() else one
        for key, one in network.state_dict().items()
    }


def write_open_clip(directory: Path, name: str, state: State) -> None:
    """The model as open_clip saves it: its configuration and its weights."""
    config = {"model_cfg": import_open_clip().get_model_config(name), "preprocess_cfg": {}}
    (directory / "open_clip_config.json").write_text(json.dumps(config))
    save_file(dict(state), directory / "open_clip_model.safetensors")


def normed(x: Tensor, state: State, name: str) -> Tensor:
    return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def block(
    x: Tensor, state: State, name: str, mask: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Pre-norm attention and feed-forward; x [B, T, D]."""
    inner = normed(x, state, f"{name}.ln_1")
    parts = linear(inner, state[f"{name}.attn.in_proj_weight"], state[f"{name}.attn.in_proj_bias"])
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts.chunk(3, -1)
    )
    weights = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + mask).softmax(-1)
    mixed = (weights @ value).transpose(1, 2).flatten(2)
    out = f"{name}.attn.out_proj"
    x = x + linear(mixed, state[f"{out}.weight"], state[f"{out}.bias"])
    inner = normed(x, state, f"{name}.ln_2")
    wide = activation(
        linear(inner, state[f"{name}.mlp.c_fc.weight"], state[f"{name}.mlp.c_fc.bias"])
    )
    return x + linear(wide, state[f"{name}.mlp.c_proj.weight"], state[f"{name}.mlp.c_proj.bias"])


def embed_images(
    images: Tensor, state: State, activation: Callable[[Tensor], Tensor] = gelu
) -> Tensor:
    """Normalised input [B, 3, EDGE, EDGE] → embeddings."""
    patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    flat = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = linear(flat, state["visual.conv1.weight"].flatten(1))
    first = state["visual.class_embedding"].expand(len(x), 1, -1)
    x = torch.cat([first, x], 1) + state["visual.positional_embedding"]
    x = normed(x, state, "visual.ln_pre")
    for layer in range(2):
        name = f"visual.transformer.resblocks.{layer}"
        x = block(x, state, name, torch.zeros(()), activation)
    return normed(x[:, 0], state, "visual.ln_post") @ state["visual.proj"]


def embed_texts(ids: Tensor, state: State, activation: Callable[[Tensor], Tensor] = gelu) -> Tensor:
    """Ids [B, T], ended by the largest one → embeddings."""
    x = state["token_embedding.weight"][ids] + state["positional_embedding"][: ids.shape[1]]
    mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)
    for layer in range(2):
        x = block(x, state, f"transformer.resblocks.{layer}", mask, activation)
    ends = normed(x, state, "ln_final")[torch.arange(len(ids)), ids.argmax(1)]
    return ends @ state["text_projection"]


def normalised(pictures: Tensor) -> Tensor:
    """Pictures uint8 of the network's own size → its input."""
    return (pictures.float() / 255 - MEAN) / DEVIATION


def tokens(texts: list[str]) -> Tensor:
    return import_open_clip().SimpleTokenizer(context_length=77)(texts)


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    return torch.cosine_similarity(images, texts, dim=-1)
