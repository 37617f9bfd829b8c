"""Tiny models in the official key layouts, written to files, and the command-line options that load
them through conf/model/*.yaml.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from tempera.config.compose import composed as composed_options
from tempera.continuous.mar import MAR
from tempera.image_tokenizers.kl import KLModel
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime import huggingface
from tempera.runtime.tensor_files import renamed
from tempera.targets.emu3 import Emu3Tokenizer

DIM, INNER, LAYERS, HEADS = 16, 24, 2, 2
SIZES = {
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
VQ = {"channels": 8, "res_blocks": 1, "z_channels": 4, "norm_groups": 4}


def composed(*overrides: str, config: str = "eval") -> DictConfig:
    return composed_options(config, overrides)


def maker(seed: int = 0) -> Callable[..., Tensor]:
    """Makes random tensors, large enough for outputs to depend on everything."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator)
        return drawn * 1.3 / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * drawn

    return make


@dataclass(frozen=True)
class Names:
    """Official names: of the embedding, the last norm and the head; the prefix of a layer; and of
    its parts by role.
    """

    top: tuple[str, str, str]
    layer: str
    roles: dict[str, str]

    def layers(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each layer by role, those that there are."""
        prefixes = [self.layer.format(i) for i in range(LAYERS)]
        return [
            {role: state[one + name] for role, name in self.roles.items() if one + name in state}
            for one in prefixes
        ]


NORMS = {f"{part}_{role}": f"{part}_{{}}.{kind}" for part in "qk"
         for role, kind in (("norm", "weight"), ("bias", "bias"))}  # fmt: skip
HUGGING_FACE = Names(
    ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "model.layers.{}.",
    {
        **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
        **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
        "attention_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        **{role: "self_attn." + name.format("norm") for role, name in NORMS.items()},
    },
)
META = Names(
    ("tok_embeddings.weight", "norm.weight", "output.weight"),
    "layers.{}.",
    {
        **{part: f"attention.w{part}.weight" for part in "qkvo"},
        **{part: f"feed_forward.w{n}.weight" for part, n in (("gate", 1), ("up", 3), ("down", 2))},
        "attention_norm": "attention_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        **{role: "attention." + name.format("normalization") for role, name in NORMS.items()},
    },
)


def official_state(
    names: Names, vocab: int, kv: int = HEADS, norms: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    """A random model; `norms`: the shape of the norms of queries and keys, if it has some."""
    make, size = maker(), DIM // HEADS
    shapes = {"q": (DIM, DIM), "k": (kv * size, DIM), "v": (kv * size, DIM), "o": (DIM, DIM)}
    shapes |= {"gate": (INNER, DIM), "up": (INNER, DIM), "down": (DIM, INNER)}
    shapes |= dict.fromkeys(("attention_norm", "mlp_norm"), (DIM,))
    shapes |= dict.fromkeys(NORMS, norms) if norms else {}
    sizes = (vocab, DIM), (DIM,), (vocab, DIM)
    state = {name: make(*shape) for name, shape in zip(names.top, sizes, strict=True)}
    for i in range(LAYERS):
        prefix = names.layer.format(i)
        state |= {prefix + names.roles[role]: make(*shape) for role, shape in shapes.items()}
    return state


def llamagen_state(
    vocab: int, caption: int | None = None, prefix: int = 6, classes: int = 10
) -> dict[str, Tensor]:
    """LlamaGen's official keys."""
    make, state = maker(1), official_state(META, vocab)
    for i in range(LAYERS):
        parts = [state.pop(f"layers.{i}.attention.w{part}.weight") for part in "qkv"]
        state[f"layers.{i}.attention.wqkv.weight"] = torch.cat(parts)
    if caption is None:
        return state | {"cls_embedding.embedding_table.weight": make(classes + 1, DIM)}
    return state | {
        "cls_embedding.uncond_embedding": make(prefix, caption),
        "cls_embedding.cap_proj.fc1.weight": make(DIM, caption),
        "cls_embedding.cap_proj.fc2.weight": make(DIM, DIM),
    }


STATES = {
    "lumina": (HUGGING_FACE, 8832, HEADS, (1, DIM // HEADS)),
    "lumina2": (HUGGING_FACE, 171384, HEADS, (1, DIM // HEADS)),
    "anole": (META, 8832, HEADS, (DIM // HEADS,)),
    "emu3": (HUGGING_FACE, 184622, 1),
}
"""Arguments of `official_state`; the Luminas' norms are [model_parallel, head_dim]."""


def save_shards(state: dict[str, Tensor], directory: Path) -> None:
    """Two parts and their index, as Hugging Face writes them."""
    weight_map = dict[str, str]()
    for number in (0, 1):
        part = f"model-0000{1 + number}-of-00002.safetensors"
        half = {name: state[name].contiguous() for name in sorted(state)[number::2]}
        save_file(half, directory / part)
        weight_map |= dict.fromkeys(half, part)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def flow(values: dict[str, Any]) -> str:
    """A mapping in Hydra's override grammar."""
    parts = []
    for key, value in values.items():
        plain = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{key}:{flow(value) if isinstance(value, dict) else plain}")
    return "{" + ",".join(parts) + "}"


def vq_option(codes: int, levels: tuple[int, ...] = (1, 1, 1, 1, 2), **changes: Any) -> str:
    kind = {"_target_": "tempera.image_tokenizers.vq.VQConfig", "codebook_size": codes}
    multipliers = {f"{side}_multipliers": levels for side in ("encoder", "decoder")}
    sizes = {**kind, **VQ, **multipliers, "codebook_dim": 4, **changes}
    return "+model.tokenizer.config=" + flow(sizes)


def llamagen_options(**sizes: Any) -> list[str]:
    kind = {"_target_": "tempera.targets.llamagen.LlamaGenConfig", "vocab_size": 24, "grid": [4, 4]}
    config = {**kind, **SIZES, **sizes}
    network = ["~model.network.config", f"+model.network.config={flow(config)}"]
    return [*network, vq_option(24), "model.tokenizer_weights=random"]


def write_llamagen_text(directory: Path) -> list[str]:
    """Text-conditional LlamaGen of 24 codes on 4×4, with random text features."""
    state = {"model": llamagen_state(24, caption=8), "steps": 3}
    torch.save(state, directory / "t2i_XL_stage1_256.pt")
    text = ["model.text_weights=random", "model.text_encoder.length=6"]
    text += ["+model.text_encoder.width=8"]
    sizes = llamagen_options(prefix_length=6, caption_dim=8)
    return ["model=llamagen_xl_stage1", f"model.weights={directory}", *sizes, *text]


def write_llamagen_classes(directory: Path, classes: int = 10) -> list[str]:
    """Class-conditional LlamaGen of 24 codes on 4×4; its file has FSDP's names at the top level."""
    file = directory / "c2i_B_384.pt"
    torch.save(llamagen_state(24, classes=classes) | {"freqs_cis": torch.zeros(3)}, file)
    sizes = llamagen_options(prefix_length=1, num_classes=classes)
    text = f"model.text_encoder.classes={classes}"
    return ["model=llamagen_b_c2i", f"model.weights={file}", *sizes, text]


RANDOM = ["model.prompt_weights=random", "model.tokenizer_weights=random"]


def size_options(**more: int) -> list[str]:
    return [f"++model.network.sizes.{name}={size}" for name, size in {**SIZES, **more}.items()]


CHAMELEON = [
    *size_options(vocab_size=8832),
    vq_option(8192, normalised=False, level_attention=False),
]


def write_lumina(directory: Path) -> list[str]:
    """Lumina-mGPT at 64×64 pixels: 4×4 codes and ends of lines; in parts, with an image tokenizer's
    weights among them.
    """
    other = {"model.vqmodel.encoder.conv_in.weight": torch.zeros(2)}
    save_shards(official_state(*STATES["lumina"]) | other, directory)
    return [
        "model=lumina",
        f"model.weights={directory}",
        *RANDOM,
        "image_size=64",
        "model.image_sizes=[64]",
        *CHAMELEON,
    ]


def write_lumina2(directory: Path) -> list[str]:
    """Lumina-mGPT 2.0 at 32×32 pixels: 4×4 codes and ends of lines."""
    save_shards(official_state(*STATES["lumina2"]), directory)
    images = {"z_channels": 4, "normalised": "false", "spatial_norms": "true"}
    place = ["model=lumina2", f"model.weights={directory}", "image_size=32"]
    vq = vq_option(16384, (1, 1, 1, 2), **images)
    return [*place, *RANDOM, *size_options(vocab_size=171384), vq]


def write_simplear(directory: Path) -> list[str]:
    """SimpleAR at 64×64 pixels, 24 codes behind 300 text tokens, as transformers saves it."""
    torch.manual_seed(0)
    config = huggingface.Qwen2Config(
        **SIZES, vocab_size=324, num_key_value_heads=1, tie_word_embeddings=True
    )
    model, make = huggingface.Qwen2ForCausalLM(config), maker()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(make(*tensor.shape))
    model.save_pretrained(directory)
    sizes = ["+model.spec.text_tokens=300", "+model.spec.codes=24", "+model.tokenizer.codes=24"]
    return ["model=simplear_05b", f"model.weights={directory}", "image_size=64", *sizes, *RANDOM]


def write_anole(directory: Path) -> list[str]:
    """Anole in Meta's layout, on 4×4 codes."""
    (directory / "models/7b").mkdir(parents=True)
    torch.save(official_state(*STATES["anole"]), directory / "models/7b/consolidated.pth")
    sizes = {"lines": 4, "columns": 4, "codes": 8192, "first_code": 4, "context": 4096}
    sizes |= {"prompt": "[0,'{text}',8710,8197]", "null": "[0,8197]"}
    spec = ["model.spec._target_=tempera.targets.token_format.ModelSpec"]
    spec += [f"+model.spec.{name}={value}" for name, value in sizes.items()]
    return ["model=anole", f"model.weights={directory}", *RANDOM, *spec, *CHAMELEON]


def write_emu3(directory: Path) -> list[str]:
    """Emu3 at 32×32 pixels: 4×4 codes and ends of lines; grouped keys and values."""
    save_file(official_state(*STATES["emu3"]), directory / "model.safetensors")
    sizes = {"base_channels": 32, "channel_multiplier": [1] * 4, "num_res_blocks": 1}
    images = "+model.tokenizer.sizes=" + flow({**sizes, "hidden_size": 32})
    grouped = size_options(num_key_value_heads=1)
    place = ["model=emu3", f"model.weights={directory}", "image_size=32"]
    return [*place, *RANDOM, *grouped, images]


def tiny_janus() -> Any:
    """A random `JanusForConditionalGeneration` of 24 codes on 4×4, and its configuration."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    text = {
        **SIZES, "model_type": "llama", "vocab_size": 100017, "num_key_value_heads": HEADS,
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
    make = maker()
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
    spec = ["+model.spec.image_size=64", "+model.spec.codes=24"]
    images = vq_option(24, (1,) * 5, codebook_dim=8, channels=32, norm_groups=32)
    place = ["model=janus_pro_1b", f"model.weights={directory}", "model.prompt_weights=random"]
    return [*place, *spec, images]


def tiny_glm() -> Any:
    """A random `GlmImageForConditionalGeneration` of 24 codes; 8 of the 16 numbers of a head are
    turned.
    """
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text = {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "vocab_size": 200, "vision_vocab_size": 32, "pad_token_id": 190, "eos_token_id": 25,
        "rope_parameters": {**rope, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = huggingface.GlmImageConfig(
        text_config=text,
        vision_config={**vision, "image_size": 64},
        vq_config={"embed_dim": 16, "num_embeddings": 24, "latent_channels": 32},
        image_token_id=195,
        image_start_token_id=24,
        image_end_token_id=25,
    )
    model = huggingface.GlmImageForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.5 if weight.dim() > 1 else 1)
    return model


T5_SIZES = {"d_model": 8, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}


def write_words(directory: Path) -> None:
    """A tokenizer.json of few words, with the special tokens of Janus-Pro."""
    words = ["<unk>", "</s>", "a", "red", "ring", "and"]
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<begin_of_image>", "<｜▁pad▁｜>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_t5(directory: Path) -> Any:
    """A tiny Flan-T5 in the published format (decoder and head beside the encoder, a shared
    embedding) and its tokenizer.
    """
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(**T5_SIZES, feed_forward_proj="gated-gelu")).eval()
    other = {"decoder.final_layer_norm.weight": torch.ones(8), "lm_head.weight": torch.ones(40, 8)}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | other
    del state["encoder.embed_tokens.weight"]
    save_file(state, directory / "model.safetensors")
    write_words(directory)
    return model


def emu3_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names in Emu3-VisionTokenizer's own code: norms inside attention blocks, whose matrices
    are 1×1 convolutions.
    """
    matrices = {name for name in state if re.search(r"_proj\.weight$", name)}
    convolutions = {name: state[name][:, :, None, None] for name in matrices}
    names = {
        r"(down|up)_block\.\1\.": r"\1.",
        r"middle_block\.": "mid.",
        r"mid\.attn_norm\.": "mid.attn_1.norm.",
        r"\.attn_norms\.(\d+)\.": r".attn.\1.norm.",
        r"\.([qkv])_proj\.": r".\1.",
        r"\.out_proj\.": ".proj_out.",
    }
    return renamed(state | convolutions, names)


def write_images(tokenizer: Any, file: Path) -> None:
    """The weights of an image tokenizer in the published layout of its file."""
    network = tokenizer.vq if isinstance(tokenizer, LinedTokenizer) else tokenizer
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(network, Emu3Tokenizer):
        state = emu3_names(network.vq.state_dict())
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    else:
        levels, state = len(network.config.decoder_multipliers), network.state_dict()
        if file.suffix == ".ckpt":
            state = {ldm_name(name, levels): tensor for name, tensor in state.items()}
        torch.save({"state_dict": state}, file)


def published_draft(directory: Path, vocab: int, family: str) -> None:
    """A random draft in EAGLE-1's public layout."""
    norms = (HEADS, DIM // HEADS) if family == "chameleon" else None
    state = official_state(HUGGING_FACE, vocab, norms=norms)
    directory.mkdir(parents=True)
    kept = r"model\.(embed|layers\.0\.)" if norms else r"model\.(embed|layers\.0\.(?!input))"
    draft = {"fc.weight": maker(2)(DIM, 2 * DIM)}
    draft |= {name[6:]: tensor for name, tensor in state.items() if re.match(kept, name)}
    torch.save(draft, directory / "pytorch_model.bin")
    config = {"model_type": family, "num_attention_heads": HEADS, "bias": False}
    (directory / "config.json").write_text(json.dumps(config))


MAR_SIZES = {
    "_target_": "tempera.continuous.mar.MARConfig",
    "grid": [3, 4], "channels": 4, "width": 16, "depth": 1, "heads": 2, "buffer": 2,
    "head_width": 16, "head_depth": 1,
}  # fmt: skip
KL_SIZES = {
    "_target_": "tempera.image_tokenizers.kl.KLConfig",
    "networks": {
        "_target_": "tempera.image_tokenizers.vq.VQConfig", **VQ,
        "encoder_multipliers": [1, 1, 2], "decoder_multipliers": [1, 1, 2],
    },
}  # fmt: skip


def ldm_name(name: str, levels: int) -> str:
    """Our name of a tensor of the KL autoencoder in latent diffusion's layout."""
    parts = name.split(".")
    if parts[1] == "mid":
        parts[2] = ("block_1", "attn_1", "block_2")[int(parts[2])]
    if parts[1] == "conv_blocks":
        level = int(parts[2]) if parts[0] == "encoder" else levels - 1 - int(parts[2])
        side = "down" if parts[0] == "encoder" else "up"
        parts[1:4] = [side, str(level), "block" if parts[3] == "res" else parts[3]]
    return ".".join(parts)


def write_mar(directory: Path, size: str = "large") -> list[str]:
    """A MAR of 1,000 classes on 3×4 tokens, with MAR-B, which drafts for the larger ones, and KL-16
    of 12×16 pixels.
    """
    networks = {f"mar-{name}": MAR_SIZES for name in {size, "base"}} | {"kl16": KL_SIZES}
    for place, (name, sizes) in enumerate(sorted(networks.items())):
        torch.manual_seed(place)
        network = (KLModel if name == "kl16" else MAR)(instantiate(OmegaConf.create(sizes)))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
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
    "lumina2": Family(write_lumina2),
    "anole": Family(write_anole),
    "emu3": Family(write_emu3),
    "janus": Family(write_janus),
    "simplear": Family(write_simplear),
}
COUSINS = ("lumina2", "simplear")
"""They differ from another family in prompts, sizes and pictures alone."""
DISTINCT = [name for name in FAMILIES if name not in COUSINS]


METHODS = {
    "ar": [],
    "eagle": ["tree=chain", "depth=3"],
    "eagle tree": ["tree=mc_sim_7b_63"],
    "eagle traversal": ["tree=mc_sim_7b_63", "rule=traversal"],
    "eagle2": ["nodes=6", "branches=2", "depth=3"],
    "parallel": ["depth=3"],
    "parallel tree": ["tree=mc_sim_7b_63"],
    "dflash": ["depth=3"],
    "medusa": ["depth=3"],
    "coolsd": ["tree=chain", "depth=3"],
    "uniform_rsd": ["tree=chain", "depth=3"],
    "optimal_rsd": ["depth=3"],
    "vvs": ["depth=3"],
    "lantern": ["k=5", "tree=chain", "depth=3"],
    "lanternpp": ["k=5", "tree=mc_sim_7b_63"],
    "block": ["depth=3"],
    "independent": ["depth=3"],
    "jacobi": ["window=6"],
    "sjd": ["window=6"],
    "gsd": ["window=6", "k=5"],
    "entropy": ["window=6"],
    "scd": ["window=6"],
    "sjd_pac": ["window=12", "branches=2"],
}
"""Options of every method at a size for tests; the word after its name tells two apart."""


def method_options(name: str, draft: str = "random", parallel: str = "random") -> list[str]:
    """Options that choose a method, with the paths of its draft."""
    method, options = name.split()[0], METHODS[name]
    if method in ("ar", "independent") or "window" in options[0]:
        return [f"method={method}", *options]
    path = {"parallel": parallel, "dflash": "random", "medusa": "random"}.get(method, draft)
    return [f"method={method}", *options, f"drafter.path={path}"]
