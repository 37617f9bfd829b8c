"""Models of transformers with tiny random weights and their processors, for tempera.accelerate."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_targets import tiny_glm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import tempera
from tempera.runtime import huggingface as hf
from tempera.targets import emu3 as published_emu3
from tempera.targets import glm_image as published_glm
from tempera.targets.token_format import ModelSpec

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
IDS = torch.tensor([[1, 1, 5, 6, 9], [5, 7, 8, 6, 9]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def scaled(model: Any) -> Any:
    """Weights large enough for greedy tokens to differ."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2.5)
    return model.eval()


@dataclass
class Held:
    """A model, the format of its images, the arguments of a call of its `generate`, what
    `generate_ids` takes for the same images, the ids that greedy decoding must give, and what makes
    its processor.
    """

    model: Any
    layout: ModelSpec
    inputs: dict[str, Any]
    greedy: Callable[[], Tensor]
    processor: Callable[[], Any]
    ids: dict[str, Any] = field(default_factory=lambda: {"input_ids": IDS, "attention_mask": MASK})
    guidance: float = 1.0

    def accelerated(self, method: str = "scd", processor: Any = None, **options: Any) -> Any:
        """The model, accelerated, with the guidance of `inputs`."""
        given = {"guidance": self.guidance, "layout": self.layout, **options}
        if method in ("scd", "sjd", "jacobi"):
            given = {"window": 4, **given}
        return tempera.accelerate(self.model, processor, method, **given)


def emu3() -> Held:
    torch.manual_seed(0)
    names = {f"<|visual token {code:06d}|>": 24 + code for code in range(12)}
    special = {"<|extra_200|>": 20, "<|extra_201|>": 21, "<|image end|>": 22, "<|image token|>": 9}
    special |= {"<image>": 19, "<|image start|>": 8}
    vq: dict[str, Any] = {
        "codebook_size": 12,
        "base_channels": 32,
        "hidden_size": 32,
        "num_res_blocks": 1,
    }
    vq["channel_multiplier"] = [1, 1]
    text = {**TEXT, "vocab_size": 40, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    config = hf.Emu3Config(text_config=text, vq_config=vq, vocabulary_map=names | special)
    model = scaled(hf.Emu3ForConditionalGeneration(config))
    lines, columns = 3, 4
    inputs = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "negative_prompt_ids": torch.tensor([[5, 9]] * 2),
        "negative_prompt_attention_mask": torch.ones(2, 2, dtype=torch.int64),
        "guidance_scale": 3.0,
    }

    def allowed(_: int, ids: Tensor) -> list[int]:
        place = len(ids) - 1 - int((ids == 9).nonzero().max())  # behind <|image token|>
        if place >= lines * (columns + 1):
            return [(21, 22, 3, 1)[min(3, place - lines * (columns + 1))]]
        return [20] if place % (columns + 1) == columns else list(names.values())

    inputs["prefix_allowed_tokens_fn"] = allowed
    head = (8, f"{lines}*{columns}", 9)
    layout = ModelSpec(
        lines,
        columns,
        codes=12,
        first_code=24,
        prompt=(2, "{text}" + published_emu3.POSITIVE, *head),
        null=(2, published_emu3.NEGATIVE, *head),
        context=128,
        line_end=20,
    )
    ids = {"input_ids": IDS, "attention_mask": MASK, "negative_ids": torch.tensor([[5, 9]] * 2)}
    return Held(
        model,
        layout,
        inputs,
        lambda: model.generate(**inputs, max_new_tokens=18)[:, 5:-3],
        emu3_processor,
        ids,
        guidance=3.0,
    )


def janus(decoder: str = "LlamaConfig", **options: Any) -> Held:
    """Around a decoder of this configuration, with further options."""
    torch.manual_seed(1)
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 16,
        "num_image_tokens": 9,
        "projection_dim": 32,
        "intermediate_size": 32,
    }
    vq = {
        "embed_dim": 8,
        "num_embeddings": 14,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "num_patches": 3,
        "projection_dim": 32,
        "image_token_embed_dim": 32,
    }
    text = {**TEXT, "vocab_size": 30, "pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 3}
    made = getattr(hf, decoder)(**text, **options)
    config = hf.JanusConfig(text_config=made, vision_config=vision, vq_config=vq, image_token_id=11)
    model = scaled(hf.JanusForConditionalGeneration(config))
    with torch.no_grad():
        model.model.generation_embeddings.weight.mul_(30)
        model.model.generation_aligner.fc1.weight.mul_(4)
    settings = model.generation_config
    settings.bos_token_id, settings.pad_token_id, settings.guidance_scale = 5, 1, 5.0
    settings.generation_kwargs = {"boi_token_id": 9}
    inputs = {"input_ids": IDS, "attention_mask": MASK, "generation_mode": "image"}
    text_of = "<|User|>: {text}\n\n<|Assistant|>:<boi>"
    layout = ModelSpec(3, 3, 14, 0, (5, text_of), (), 128, null_filling="<pad>")
    kept = (IDS == 5) | (IDS == 9)
    ids = {"input_ids": IDS, "attention_mask": MASK, "negative_ids": IDS.where(kept, 1)}
    ids["negative_mask"] = MASK
    greedy = lambda: model.generate(**inputs)  # noqa: E731
    return Held(model, layout, inputs, greedy, janus_processor, ids, guidance=5.0)


def chameleon() -> Held:
    torch.manual_seed(2)
    names = {f"IMGIMG{chr(65 + code)}Z": 12 + code for code in range(10)}
    vq = {
        "embed_dim": 4,
        "num_embeddings": 10,
        "latent_channels": 4,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "resolution": 32,
    }
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = hf.ChameleonConfig(
        **TEXT, **special, vocab_size=30, vq_config=vq, vocabulary_map=names | {"<image>": 11}
    )
    model = scaled(hf.ChameleonForConditionalGeneration(config))
    layout = ModelSpec(3, 4, 10, 12, ("{text}", 9), (0, 9), 128, line_end=10)

    def greedy() -> Tensor:
        rows = []
        for ids, mask in zip(IDS, MASK, strict=True):
            row = ids[mask == 1]
            pair, image = [row, torch.tensor([0, 9])], list[int]()
            for place in range(15):
                tokens = torch.tensor(image, dtype=torch.int64)
                with torch.no_grad():
                    states = [
                        model.model(torch.cat([prompt, tokens])[None]).last_hidden_state[0, -1]
                        for prompt in pair
                    ]
                    logits = [model.lm_head(state)[12:22] for state in states]
                best = 12 + int((logits[1] + 3 * (logits[0] - logits[1])).argmax())
                image.append(10 if place % 5 == 4 else best)
            rows.append(torch.tensor(image))
        return torch.stack(rows)

    ids = {"input_ids": IDS, "attention_mask": MASK, "negative_ids": torch.tensor([[0, 9]] * 2)}
    return Held(model, layout, {}, greedy, chameleon_processor, ids, guidance=3.0)


def glm_image() -> Held:
    model = tiny_glm()
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[190, 190, 40, 41, 24], [50, 51, 52, 53, 24]]),
        "attention_mask": MASK,
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]] * 2),
        "images_per_sample": torch.tensor([2, 2]),
        "max_new_tokens": 28,
        "suppress_tokens": list(range(24, 32)),
    }
    layout = replace(
        published_glm.glm_image(128, 192, codes=24),
        prompt=("{text}<sop>4 6<eop><sop>2 2<eop>", 24),
        preview=(2, 2),
    )
    ids = {"input_ids": inputs["input_ids"], "attention_mask": MASK}

    def greedy() -> Tensor:
        images: Tensor = model.generate(**inputs, min_new_tokens=28)[:, 5:]
        return images

    return Held(model, layout, inputs, greedy, glm_processor, ids)


def glm_edits() -> Held:
    """A GLM-Image whose prompts have a picture each, of two sizes."""
    model = tiny_glm()
    with torch.no_grad():
        for weight in model.model.language_model.layers.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1)
    processor = glm_processor()
    texts = [glm_turn(processor, text) for text in ("a red cat", "a")]
    asked = processor(
        text=texts,
        images=[[noise(64, 96)], [noise(128, 64)]],
        target_h=128,
        target_w=192,
        return_tensors="pt",
        padding=True,
    )
    layout = replace(published_glm.held_layout(128, 192, image_prompts=True), codes=24)
    layout = replace(layout, prompt=(layout.prompt[0], 24))
    inputs = {**asked, "max_new_tokens": 24, "suppress_tokens": list(range(24, 32))}

    def greedy() -> Tensor:
        images: Tensor = model.generate(**inputs, min_new_tokens=24)[:, asked.input_ids.shape[1] :]
        return images

    return Held(model, layout, inputs, greedy, glm_processor, dict(asked))


def glm_turn(processor: Any, text: str, pictures: int = 1) -> str:
    """A prompt with pictures in the chat template."""
    parts = [{"type": "image"}] * pictures + [{"type": "text", "text": text}]
    turn: str = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    return turn


def noise(height: int, width: int) -> Image.Image:
    """A picture."""
    numbers = np.random.default_rng(height * width)
    return Image.fromarray(numbers.integers(0, 255, (height, width, 3), dtype=np.uint8))


def emu3_edits() -> Held:
    """An Emu3 whose prompts have a picture each."""
    held = emu3()
    head = torch.tensor([[1, 1, 5], [5, 7, 8]])
    ids = torch.cat([head, torch.full((2, 20), 19), torch.tensor([[6, 9]] * 2)], 1)
    mask = torch.cat([MASK[:, :3], torch.ones(2, 22, dtype=torch.int64)], 1)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    asked = {"pixel_values": pixels, "image_sizes": torch.tensor([[8, 8]] * 2)}
    held.inputs |= {"input_ids": ids, "attention_mask": mask, **asked}
    ids_of = {**held.ids, "input_ids": ids, "attention_mask": mask, **asked}
    model, inputs = held.model, held.inputs
    greedy = lambda: model.generate(**inputs, max_new_tokens=18)[:, 25:-3]  # noqa: E731
    return replace(held, ids=ids_of, greedy=greedy)


FAMILIES = {"emu3": emu3, "janus": janus, "chameleon": chameleon, "glm_image": glm_image}


def words(numbers: dict[str, int], begin: str = "", **special: str) -> Any:
    """A tokenizer of a few words: their ids, what it begins every text with, and special tokens by
    their attributes; everything else is 0.
    """
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, **numbers}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if begin:
        pieces = [(begin, numbers[begin])]
        tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=pieces)
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": special.pop("bos_token")}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", extra_special_tokens=special, **names
    )


def emu3_processor() -> Any:
    numbers = {"<pad>": 1, "<bos>": 2, "a": 4, "cat": 5, "red": 6, "3": 7, "<|image start|>": 8}
    numbers |= {"<|image token|>": 9, "*": 10, "4": 11, "<image>": 19, "<|extra_201|>": 21}
    special = {"bos_token": "<bos>", "image_token": "<image>", "boi_token": "<|image start|>"}
    special |= {"eoi_token": "<|image end|>", "image_wrapper_token": "<|image token|>"}
    tokenizer = words({**numbers, "<|image end|>": 22}, eof_token="<|extra_201|>", **special)
    return hf.Emu3Processor(hf.Emu3ImageProcessor(), tokenizer)


def janus_processor() -> Any:
    numbers = {"<pad>": 1, "a": 4, "<s>": 5, "cat": 6, "red": 7, "User": 8, "<boi>": 9}
    special = {"bos_token": "<s>", "image_token": "<image>", "boi_token": "<boi>"}
    numbers |= {"Assistant": 10, "<image>": 11, "<eoi>": 12}
    tokenizer = words(numbers, "<s>", eoi_token="<eoi>", **special)
    return hf.JanusProcessor(hf.JanusImageProcessor(), tokenizer)


def chameleon_processor() -> Any:
    numbers = {"<pad>": 1, "a": 4, "cat": 5, "red": 6, "<image>": 11}
    return hf.ChameleonProcessor(hf.ChameleonImageProcessor(), words(numbers, bos_token="<pad>"))


def glm_processor() -> Any:
    numbers = {"<pad>": 190, "a": 40, "cat": 41, "red": 42, "<boi>": 24, "<image>": 195}
    numbers |= {"<sop>": 50, "<eop>": 51, "1": 52, "16": 53, "<user>": 54, "<eoi>": 25, "4": 55}
    numbers |= {"6": 56}
    special = {"bos_token": "<boi>", "image_token": "<image>", "grid_bos_token": "<sop>"}
    special |= {"grid_eos_token": "<eop>", "eoi_token": "<eoi>"}
    template = (
        "{% for turn in messages %}<user> {% for part in turn.content %}"
        "{% if part.type == 'image' %}<boi><image><eoi>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    images = hf.GlmImageImageProcessor(
        patch_size=16, merge_size=1, temporal_patch_size=1, size=size
    )
    return hf.GlmImageProcessor(images, words(numbers, **special), chat_template=template)
