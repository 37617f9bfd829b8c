"""Tiny models in the official key layouts, written to files, and the command-line options that load
them through conf/model/*.yaml.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from paths import CONF
from safetensors.torch import save_file
from torch import Tensor

from tempera.continuous.mar import MAR
from tempera.image_tokenizers.kl import KLModel

DIM, INNER, LAYERS, HEADS = 16, 24, 2, 2
VQ = {
    "codebook_dim": 4,
    "channels": 8,
    "encoder_multipliers": [1, 1, 1, 1, 2],
    "decoder_multipliers": [1, 1, 1, 1, 2],
    "res_blocks": 1,
    "z_channels": 4,
    "norm_groups": 4,
}


def composed(*overrides: str, config: str = "eval") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config, list(overrides))


def script(name: str) -> Any:
    """The entry function of a script in train_draft/."""
    spec = importlib.util.spec_from_file_location(
        f"train_draft_{name}", CONF.parent / "train_draft" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


class Maker:
    """Random tensors, large enough for outputs to depend on everything."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        scale = 1.3 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3
        return torch.randn(*shape, generator=self.generator) * scale + (
            1.0 if len(shape) == 1 else 0.0
        )


def llamagen_state(
    vocab: int, caption: int | None = None, prefix: int = 6, classes: int = 10
) -> dict[str, Tensor]:
    """LlamaGen's official keys."""
    make = Maker()
    state = {
        "tok_embeddings.weight": make(vocab, DIM),
        "norm.weight": make(DIM),
        "output.weight": make(vocab, DIM),
    }
    if caption is None:
        state["cls_embedding.embedding_table.weight"] = make(classes + 1, DIM)
    else:
        state |= {
            "cls_embedding.uncond_embedding": make(prefix, caption),
            "cls_embedding.cap_proj.fc1.weight": make(DIM, caption),
            "cls_embedding.cap_proj.fc2.weight": make(DIM, DIM),
        }
    for i in range(LAYERS):
        state |= {
            f"layers.{i}.attention.wqkv.weight": make(3 * DIM, DIM),
            f"layers.{i}.attention.wo.weight": make(DIM, DIM),
            f"layers.{i}.feed_forward.w1.weight": make(INNER, DIM),
            f"layers.{i}.feed_forward.w3.weight": make(INNER, DIM),
            f"layers.{i}.feed_forward.w2.weight": make(DIM, INNER),
            f"layers.{i}.attention_norm.weight": make(DIM),
            f"layers.{i}.ffn_norm.weight": make(DIM),
        }
    return state


def huggingface_state(vocab: int, kv: int = HEADS, norms: bool = False) -> dict[str, Tensor]:
    """The keys of Emu3, and with `norms` those of Lumina-mGPT, whose norms of queries and keys are
    [model_parallel, head_dim].
    """
    make, size = Maker(), DIM // HEADS
    state = {
        "model.embed_tokens.weight": make(vocab, DIM),
        "model.norm.weight": make(DIM),
        "lm_head.weight": make(vocab, DIM),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        state |= {
            prefix + "self_attn.q_proj.weight": make(DIM, DIM),
            prefix + "self_attn.k_proj.weight": make(kv * size, DIM),
            prefix + "self_attn.v_proj.weight": make(kv * size, DIM),
            prefix + "self_attn.o_proj.weight": make(DIM, DIM),
            prefix + "mlp.gate_proj.weight": make(INNER, DIM),
            prefix + "mlp.up_proj.weight": make(INNER, DIM),
            prefix + "mlp.down_proj.weight": make(DIM, INNER),
            prefix + "input_layernorm.weight": make(DIM),
            prefix + "post_attention_layernorm.weight": make(DIM),
        }
        if norms:
            names = [
                f"{prefix}self_attn.{part}_norm.{kind}"
                for part in "qk"
                for kind in ("weight", "bias")
            ]
            state |= {name: make(size)[None] for name in names}
    return state


def meta_state(vocab: int) -> dict[str, Tensor]:
    """Chameleon's keys as Meta (and Anole) publish them."""
    make, size = Maker(), DIM // HEADS
    state = {
        "tok_embeddings.weight": make(vocab, DIM),
        "norm.weight": make(DIM),
        "output.weight": make(vocab, DIM),
    }
    for i in range(LAYERS):
        state |= {f"layers.{i}.attention.w{part}.weight": make(DIM, DIM) for part in "qkvo"}
        names = [
            f"layers.{i}.attention.{part}_normalization.{kind}"
            for part in "qk"
            for kind in ("weight", "bias")
        ]
        state |= {name: make(size) for name in names}
        state |= {
            f"layers.{i}.feed_forward.w1.weight": make(INNER, DIM),
            f"layers.{i}.feed_forward.w3.weight": make(INNER, DIM),
            f"layers.{i}.feed_forward.w2.weight": make(DIM, INNER),
            f"layers.{i}.attention_norm.weight": make(DIM),
            f"layers.{i}.ffn_norm.weight": make(DIM),
        }
    return state


def save_shards(state: dict[str, Tensor], directory: Path) -> None:
    """Two parts and their index, as Hugging Face writes them."""
    names, parts = (
        sorted(state),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    )
    halves = [names[::2], names[1::2]]
    for part, half in zip(parts, halves, strict=True):
        save_file({name: state[name].contiguous() for name in half}, directory / part)
    weight_map = {name: part for part, half in zip(parts, halves, strict=True) for name in half}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def flow(values: dict[str, Any]) -> str:
    """A mapping in Hydra's override grammar."""
    parts = {
        key: flow(value)
        if isinstance(value, dict)
        else value
        if isinstance(value, str)
        else json.dumps(value)
        for key, value in values.items()
    }
    return "{" + ",".join(f"{key}:{value}" for key, value in parts.items()) + "}"


def vq_option(codes: int, **changes: Any) -> str:
    return "+model.tokenizer.config=" + flow(
        {
            "_target_": "tempera.image_tokenizers.vq.VQConfig",
            "codebook_size": codes,
            **VQ,
            **changes,
        }
    )


def write_llamagen_text(directory: Path) -> list[str]:
    """Text-conditional LlamaGen of 24 codes on 4×4, with random text features."""
    torch.save(
        {"model": llamagen_state(24, caption=8), "steps": 3}, directory / "t2i_XL_stage1_256.pt"
    )
    config = {
        "_target_": "tempera.targets.llamagen.LlamaGenConfig",
        "vocab_size": 24,
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "grid": [4, 4],
        "prefix_length": 6,
        "caption_dim": 8,
    }
    sizes = [
        "~model.network.config",
        f"+model.network.config={flow(config)}",
        vq_option(24),
        "model.tokenizer_weights=random",
    ]
    text = [
        "model.text_weights=random",
        "model.text_encoder.length=6",
        "+model.text_encoder.width=8",
    ]
    return ["model=llamagen_xl_stage1", f"model.weights={directory}", *sizes, *text]


def write_llamagen_classes(directory: Path) -> list[str]:
    """Class-conditional LlamaGen of 24 codes on 4×4; its file has FSDP's names at the top level."""
    torch.save(llamagen_state(24) | {"freqs_cis": torch.zeros(3)}, directory / "c2i_B_384.pt")
    config = {
        "_target_": "tempera.targets.llamagen.LlamaGenConfig",
        "vocab_size": 24,
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "grid": [4, 4],
        "prefix_length": 1,
        "num_classes": 10,
    }
    sizes = [
        "~model.network.config",
        f"+model.network.config={flow(config)}",
        vq_option(24),
        "model.tokenizer_weights=random",
    ]
    return [
        "model=llamagen_b_c2i",
        f"model.weights={directory / 'c2i_B_384.pt'}",
        *sizes,
        "model.text_encoder.classes=10",
    ]


SIZES = [
    f"++model.network.sizes.hidden_size={DIM}",
    f"++model.network.sizes.intermediate_size={INNER}",
    f"++model.network.sizes.num_hidden_layers={LAYERS}",
    f"++model.network.sizes.num_attention_heads={HEADS}",
]
CHAMELEON_VQ = {"normalised": False, "level_attention": False}


def write_lumina(directory: Path) -> list[str]:
    """Lumina-mGPT at 64×64 pixels: 4×4 codes and ends of lines; in parts, with an image tokenizer's
    weights among them.
    """
    save_shards(
        huggingface_state(8832, norms=True)
        | {"model.vqmodel.encoder.conv_in.weight": torch.zeros(2)},
        directory,
    )
    options = [
        f"model.weights={directory}",
        "model.prompt_weights=random",
        "model.tokenizer_weights=random",
        "image_size=64",
    ]
    return [
        "model=lumina",
        *options,
        *SIZES,
        "++model.network.sizes.vocab_size=8832",
        vq_option(8192, **CHAMELEON_VQ),
    ]


def write_anole(directory: Path) -> list[str]:
    """Anole in Meta's layout, on 4×4 codes."""
    (directory / "models/7b").mkdir(parents=True)
    torch.save(meta_state(8832), directory / "models/7b/consolidated.pth")
    spec = [
        "model.spec._target_=tempera.targets.token_format.ModelSpec",
        "+model.spec.lines=4",
        "+model.spec.columns=4",
        "+model.spec.codes=8192",
        "+model.spec.first_code=4",
        "+model.spec.prompt=[0,'{text}',8710,8197]",
        "+model.spec.null=[0,8197]",
        "+model.spec.context=4096",
    ]
    options = [
        f"model.weights={directory}",
        "model.prompt_weights=random",
        "model.tokenizer_weights=random",
    ]
    return [
        "model=anole",
        *options,
        *spec,
        *SIZES,
        "++model.network.sizes.vocab_size=8832",
        vq_option(8192, **CHAMELEON_VQ),
    ]


def write_emu3(directory: Path) -> list[str]:
    """Emu3 at 32×32 pixels: 4×4 codes and ends of lines; grouped keys and values."""
    save_file(huggingface_state(184622, kv=1), directory / "model.safetensors")
    options = [
        f"model.weights={directory}",
        "model.prompt_weights=random",
        "model.tokenizer_weights=random",
        "image_size=32",
    ]
    sizes = {
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "hidden_size": 32,
    }
    return [
        "model=emu3",
        *options,
        *SIZES,
        "++model.network.sizes.num_key_value_heads=1",
        f"+model.tokenizer.sizes={flow(sizes)}",
    ]


def tiny_janus() -> Any:
    """A random `JanusForConditionalGeneration` of 24 codes on 4×4, and its configuration."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    text = {
        "model_type": "llama", "vocab_size": 100017, "hidden_size": DIM, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 64, "patch_size": 16, "projection_dim": DIM, "depth": 1,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": 24, "latent_channels": 4, "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1, 1], "num_res_blocks": 1, "num_patches": 4,
        "projection_dim": DIM, "image_token_embed_dim": DIM,
    }  # fmt: skip
    torch.manual_seed(0)
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq)
    model = JanusForConditionalGeneration(config).eval()
    make = Maker()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.startswith("model.vision"):
                tensor.copy_(make(*tensor.shape))
        codebook = model.model.vqmodel.quantize.embedding.weight
        codebook.copy_(torch.nn.functional.normalize(codebook, dim=-1))
    return model


def write_janus(directory: Path) -> list[str]:
    """Janus-Pro as Hugging Face saves it, with its config.json; every byte of a prompt is a
    token.
    """
    tiny_janus().save_pretrained(directory)
    levels = [1, 1, 1, 1, 1]
    sizes = {"codebook_dim": 8, "channels": 32, "z_channels": 4, "norm_groups": 32}
    return [
        "model=janus_pro_1b",
        f"model.weights={directory}",
        "model.prompt_weights=random",
        "+model.spec.image_size=64",
        "+model.spec.codes=24",
        vq_option(24, encoder_multipliers=levels, decoder_multipliers=levels, **sizes),
    ]


MAR_SIZES = {
    "_target_": "tempera.continuous.mar.MARConfig",
    "grid": [3, 4], "channels": 4, "width": 16, "depth": 1, "heads": 2, "buffer": 2,
    "head_width": 16, "head_depth": 1,
}  # fmt: skip
KL_SIZES = {
    "_target_": "tempera.image_tokenizers.kl.KLConfig",
    "networks": {
        "_target_": "tempera.image_tokenizers.vq.VQConfig",
        "channels": 8, "encoder_multipliers": [1, 1, 2], "decoder_multipliers": [1, 1, 2],
        "res_blocks": 1, "z_channels": 4, "norm_groups": 4,
    },
}  # fmt: skip


def ldm_name(name: str, levels: int) -> str:
    """Our name of a tensor of the KL autoencoder in latent diffusion's layout."""
    parts = name.split(".")
    if parts[1] == "mid":
        parts[2] = ("block_1", "attn_1", "block_2")[int(parts[2])]
    if parts[1] == "conv_blocks":
        level = int(parts[2]) if parts[0] == "encoder" else levels - 1 - int(parts[2])
        parts[1:4] = [
            "down" if parts[0] == "encoder" else "up",
            str(level),
            "block" if parts[3] == "res" else parts[3],
        ]
    return ".".join(parts)


def write_mar(directory: Path, size: str = "large") -> list[str]:
    """A MAR of 1,000 classes on 3×4 tokens, with MAR-B, which drafts for the larger ones, and KL-16
    of 12×16 pixels.
    """
    networks = {f"mar-{name}": MAR_SIZES for name in {size, "base"}} | {"kl16": KL_SIZES}
    makers = {"kl16": KLModel}
    for place, (name, sizes) in enumerate(sorted(networks.items())):
        network = makers.get(name, MAR)(instantiate(OmegaConf.create(sizes)))
        generator = torch.Generator().manual_seed(place)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        state = network.state_dict()
        if name == "kl16":
            state = {ldm_name(key, 3): tensor for key, tensor in state.items()}
        save_file(state, directory / f"{name}.safetensors")
    options = [f"model=mar_{size}", f"model.weights={directory}"]
    parts = {"network": MAR_SIZES, "tokenizer": KL_SIZES}
    parts |= {} if size == "base" else {"draft": MAR_SIZES}
    return [*options, *(f"+model.{part}.config={flow(sizes)}" for part, sizes in parts.items())]


@dataclass(frozen=True)
class Family:
    """How to write a tiny model, and two prompts of different lengths for it."""

    write: Callable[[Path], list[str]]
    prompts: tuple[str, str] = ("a cat", "two dogs on a red sofa")


FAMILIES = {
    "llamagen_text": Family(write_llamagen_text),
    "llamagen_classes": Family(write_llamagen_classes, ("3", "7")),
    "lumina": Family(write_lumina),
    "anole": Family(write_anole),
    "emu3": Family(write_emu3),
    "janus": Family(write_janus),
}
