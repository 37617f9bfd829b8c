"""tempera.accelerate: models of transformers in memory, with tiny random weights, against their own
`generate`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markdown_pages import blocks
from paths import ROOT
from scipy.stats import chi2_contingency, chisquare
from tiny_targets import tiny_glm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import tempera
from tempera import Sampling, TemperaError
from tempera.runtime import huggingface as hf
from tempera.targets.cache import KVCache
from tempera.targets.token_format import END_OF_TEXT, ModelSpec

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
    """A model, the arguments of a call of its `generate`, options of `accelerate`, and the ids that
    greedy decoding must give.
    """

    model: Any
    inputs: dict[str, Any]
    options: dict[str, Any]
    greedy: Callable[[], Tensor]


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
        "image_sizes": torch.tensor([[lines, columns]] * 2),
        "negative_prompt_ids": torch.tensor([[5, 9]] * 2),
        "negative_prompt_attention_mask": torch.ones(2, 2, dtype=torch.int64),
        "guidance_scale": 3.0,
    }

    def allowed(_: int, ids: Tensor) -> list[int]:
        place = len(ids) - IDS.shape[1]
        if place >= lines * (columns + 1):
            return [(21, 22, 3, 1)[min(3, place - lines * (columns + 1))]]
        return [20] if place % (columns + 1) == columns else list(names.values())

    inputs["prefix_allowed_tokens_fn"] = allowed
    given = {name: value for name, value in inputs.items() if name != "image_sizes"}
    return Held(model, inputs, {}, lambda: model.generate(**given, max_new_tokens=18))


def janus() -> Held:
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
    config = hf.JanusConfig(
        text_config=hf.LlamaConfig(**text), vision_config=vision, vq_config=vq, image_token_id=11
    )
    model = scaled(hf.JanusForConditionalGeneration(config))
    settings = model.generation_config
    settings.bos_token_id, settings.pad_token_id, settings.guidance_scale = 5, 1, 5.0
    settings.generation_kwargs = {"boi_token_id": 9}
    inputs = {"input_ids": IDS, "attention_mask": MASK, "generation_mode": "image"}
    return Held(model, inputs, {}, lambda: model.generate(**inputs))


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
            rows.append(torch.cat([ids, torch.tensor(image)]))
        return torch.stack(rows)

    inputs = {"input_ids": IDS, "attention_mask": MASK, "guidance_scale": 3.0}
    return Held(model, inputs, {"layout": layout}, greedy)


def glm_image() -> Held:
    model = tiny_glm()
    inputs = {
        "input_ids": torch.tensor([[190, 190, 40, 41, 24], [50, 51, 52, 53, 24]]),
        "attention_mask": MASK,
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]] * 2),
        "images_per_sample": torch.tensor([2, 2]),
        "max_new_tokens": 28,
        "suppress_tokens": list(range(24, 32)),
    }
    return Held(model, inputs, {}, lambda: model.generate(**inputs, min_new_tokens=28))


FAMILIES = {"emu3": emu3, "janus": janus, "chameleon": chameleon, "glm_image": glm_image}


@pytest.fixture(params=list(FAMILIES))
def held(request: pytest.FixtureRequest) -> Held:
    return FAMILIES[request.param]()


@pytest.mark.parametrize("method", ["scd", "sjd_pac"])
def test_greedy_images_are_those_of_generate(held: Held, method: str) -> None:
    window = {"window": 6} if method == "scd" else {"window": 8, "branches": 2, "levels": 2}
    fast = tempera.accelerate(held.model, None, method, **window, **held.options)
    expected = held.greedy()
    assert len(expected[:, -9:].unique()) > 1
    assert torch.equal(fast.generate_ids(**held.inputs), expected)


def test_no_weight_is_copied_and_the_model_is_as_before(held: Held) -> None:
    model = held.model
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    attention, attributes = model.config._attn_implementation, set(vars(model))
    fast = tempera.accelerate(model, None, "sjd", window=4, **held.options)
    fast.generate_ids(**held.inputs)
    assert fast._target is not None
    network, head = fast._target.network, fast._target.head.linear
    pointers = set(before.values())
    assert {weight.data_ptr() for weight in network.parameters()} <= pointers
    storages = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    assert head.weight.untyped_storage().data_ptr() in storages
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert model.config._attn_implementation == attention
    assert set(vars(model)) == attributes
    assert not any(isinstance(part, KVCache) for part in vars(model).values())


def test_generate_is_replaced_inside_the_block_alone(held: Held) -> None:
    fast = tempera.accelerate(held.model, None, "scd", window=4, **held.options)
    expected = held.greedy()
    own = held.model.generate
    with fast.installed():
        assert torch.equal(held.model.generate(**held.inputs), expected)
    with pytest.raises(KeyError), fast.installed():
        raise KeyError
    assert held.model.generate == own


def test_what_is_drawn_follows_pytorchs_seed_or_ones_own() -> None:
    held = janus()
    inputs = {**held.inputs, "do_sample": True}
    fast = tempera.accelerate(held.model, None, "scd", window=4)
    torch.manual_seed(0)
    first, second = fast.generate_ids(**inputs), fast.generate_ids(**inputs)
    torch.manual_seed(0)
    assert torch.equal(fast.generate_ids(**inputs), first)
    assert not torch.equal(first, second)
    a, b = (fast.generate_ids(**inputs, seed=5) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("family", "temperature"), [("emu3", 0.3), ("janus", 0.1), ("glm_image", 0.5)]
)
def test_sampled_images_have_the_law_of_generate(family: str, temperature: float) -> None:
    """The first two tokens of many images, drawn by transformers and by an accelerated model."""
    held, rows = FAMILIES[family](), 1000
    model, inputs = held.model, dict(held.inputs)
    for name in ("input_ids", "attention_mask", "image_sizes", "negative_prompt_ids"):
        if name in inputs:
            inputs[name] = inputs[name][1:].expand(rows, -1)
    if family == "emu3":
        inputs["negative_prompt_attention_mask"] = torch.ones(rows, 2, dtype=torch.int64)
    if family == "glm_image":
        inputs["image_grid_thw"] = inputs["image_grid_thw"][:2].repeat(rows, 1)
        inputs["images_per_sample"] = inputs["images_per_sample"][:1].expand(rows)
    inputs |= {"do_sample": True, "top_k": 5, "temperature": temperature, "min_p": 0.3}
    given = {name: value for name, value in inputs.items() if name != "image_sizes"}
    short = {} if family == "janus" else {"max_new_tokens": 2, "eos_token_id": None}
    torch.manual_seed(7)
    theirs = model.generate(**{**given, **short})
    fast = tempera.accelerate(model, None, "scd", window=4)
    ours = fast.generate_ids(**inputs, seed=11)
    first = 0 if family == "janus" else IDS.shape[1]
    pairs = [tokens[:, first] * 200 + tokens[:, first + 1] for tokens in (theirs, ours)]
    assert agreement(*pairs) > 1e-3


def test_sampled_images_of_a_chameleon_have_the_law_of_its_logits() -> None:
    """The first two tokens against every pair that its logits can draw."""
    held, rows = chameleon(), 1000
    inputs = {
        "input_ids": IDS[1:].expand(rows, -1),
        "attention_mask": MASK[1:].expand(rows, -1),
        "guidance_scale": 3.0,
        "do_sample": True,
        "top_k": 3,
        "temperature": 0.6,
    }

    @torch.no_grad()
    def law(*tokens: int) -> Tensor:
        """Of the code after some codes, [10]."""
        logits = []
        for prompt in (IDS[1], torch.tensor([0, 9])):
            ids = torch.cat([prompt, 12 + torch.tensor(tokens, dtype=torch.int64)])
            state = held.model.model(ids[None]).last_hidden_state[0, -1]
            logits.append(held.model.lm_head(state)[12:22])
        guided = (logits[1] + 3 * (logits[0] - logits[1])) / 0.6
        return guided.where(guided >= guided.topk(3).values[-1], -torch.inf).softmax(-1)

    exact = torch.cat([p * law(code) for code, p in enumerate(law())])
    fast = tempera.accelerate(held.model, None, "scd", window=4, **held.options)
    ids = fast.generate_ids(**inputs, seed=11)[:, 5:7] - 12
    counts = torch.bincount(ids[:, 0] * 10 + ids[:, 1], minlength=100)
    assert (counts[exact == 0] == 0).all()
    possible = exact > 0
    expected = rows * exact[possible].double()
    assert chisquare(counts[possible], expected / expected.sum() * rows).pvalue > 1e-3


def agreement(first: Tensor, second: Tensor) -> float:
    """p-value of two samples of the same categories."""
    kinds, number = torch.cat([first, second]).unique(return_inverse=True)
    half = len(first)
    table = torch.stack([torch.bincount(n, minlength=len(kinds)) for n in number.split(half)])
    return float(chi2_contingency(table[:, table.sum(0) >= 10]).pvalue)


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
    numbers |= {"<sop>": 50, "<eop>": 51, "1": 52, "16": 53, "<user>": 54}
    special = {"bos_token": "<boi>", "image_token": "<image>", "grid_bos_token": "<sop>"}
    template = "{% for turn in messages %}<user> {{ turn.content[0].text }}{% endfor %}"
    tokenizer = words(numbers, grid_eos_token="<eop>", **special)
    return hf.GlmImageProcessor(hf.GlmImageImageProcessor(), tokenizer, chat_template=template)


PROCESSED: dict[str, tuple[Callable[[], Any], dict[str, Any], list[int]]] = {
    # its processor, options of it, and the ids of "a cat"; those of a suffix or a role are 0
    "emu3": (
        emu3_processor,
        {"image_area": 768, "ratio": "4:3"},
        [2, 4, 5, *[0] * 8, 8, 7, 10, 11, 9],
    ),
    "janus": (janus_processor, {}, [5, 0, 8, 0, 4, 6, 0, 10, 0, 9]),
    "chameleon": (chameleon_processor, {}, [4, 5, 9]),
    "glm_image": (
        glm_processor,
        {"height": 32, "width": 32},
        [0, 0, 0, 40, 41, 50, 52, 52, 51, 50, 53, 53, 51, 24],
    ),
}


@pytest.mark.parametrize("family", PROCESSED)
def test_texts_go_through_the_processor(family: str) -> None:
    """The ids of a text, and greedy images that are those of the ids."""
    held, (processor, options, expected) = FAMILIES[family](), PROCESSED[family]
    window = 64 if family == "glm_image" else 8
    fast = tempera.accelerate(held.model, processor(), "scd", window=window, **held.options)
    prompts = ["a cat", "a red cat"]
    arguments = fast.family.arguments(prompts, dict(options))
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    assert ids[0][mask[0] == 1].tolist() == expected
    assert mask[0, 0] == 0 and len(ids[1]) == 1 + len(expected)
    result = fast.generate(prompts, images=False, **options)
    sequences = fast.generate_ids(**arguments)
    spec = fast.family.request(arguments).spec
    new = sequences if family == "janus" else sequences[:, ids.shape[1] :]
    assert torch.equal(spec.token_ids[result.tokens], new[:, : spec.length])
    if family == "emu3":
        negative = arguments["negative_prompt_ids"]
        assert negative[0, :1].tolist() == [2] and negative[0, -5:].tolist() == expected[-5:]


def test_pictures_and_the_trace() -> None:
    held = emu3()
    fast = tempera.accelerate(held.model, emu3_processor(), "scd", window=4)
    size = {"image_area": 768, "ratio": "4:3"}
    seen: list[int] = []
    result = fast.generate(["a cat", "red"], 3, batch_size=2, progress=seen.append, **size)
    assert result.tokens.shape == (2, 15)
    assert sum(seen) == 30
    assert [image.size for image in result.images] == [(8, 6)] * 2
    assert result.accepted_length >= 1
    assert not fast.generate("a", images=False, **size).images
    ids = fast.family.request(fast.family.arguments(["a cat", "red"], dict(size))).spec.token_ids
    codes = torch.cat([ids[result.tokens], torch.tensor([[21, 22, 3]] * 2)], 1)
    pictures = held.model.decode_image_tokens(image_tokens=codes, height=3, width=4)
    theirs = ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    assert torch.equal(result.pixels, theirs)


def test_a_decoder_may_read_the_prompts() -> None:
    class Grey:
        reads_prompts = True

        def decode_codes(self, codes: Tensor, prompts: list[str]) -> Tensor:
            read.extend(prompts)
            return torch.zeros(len(codes), 3, 32, 32)

    read: list[str] = []
    fast = tempera.accelerate(glm_image().model, glm_processor(), window=64, decoder=Grey())  # type: ignore[arg-type]
    result = fast.generate(["a cat", "red"], batch_size=2, height=32, width=32)
    assert read == ["a cat", "red"] and result.images[1].getpixel((0, 0)) == (128, 128, 128)


def test_a_layout_may_name_tokens_of_the_tokenizer() -> None:
    """As Lumina-mGPT 2.0's does."""
    names = {"prompt": (END_OF_TEXT, "{text}", "<boi>"), "null": ("<boi>",), "special": ("<boi>",)}
    layout = ModelSpec(3, 4, 10, 12, **names, context=128, line_end=10)  # type: ignore[arg-type]
    processor = chameleon_processor()
    processor.tokenizer.add_special_tokens({"eos_token": "red"})
    with pytest.raises(TemperaError, match="has no token <boi>"):
        tempera.accelerate(chameleon().model, processor, layout=layout)
    with pytest.raises(TemperaError, match="give its processor"):
        tempera.accelerate(chameleon().model, layout=layout)
    processor.tokenizer.add_special_tokens({"bos_token": "<boi>"})
    boi = processor.tokenizer.get_vocab()["<boi>"]
    family = tempera.accelerate(chameleon().model, processor, layout=layout).family
    arguments = family.arguments(["a cat"], {})
    assert arguments["input_ids"].tolist() == [[6, 4, 5, boi]]
    assert family.request(arguments).condition[0, 1].tolist() == [-1, -1, -1, boi]


def test_several_images_and_a_seed_for_each() -> None:
    fast = tempera.accelerate(
        janus().model, janus_processor(), "sjd", window=4, sampling=Sampling(guidance=2.0)
    )
    rounds: list[Any] = []
    both = fast.generate("a cat", [4, 9], num_images=2, callback=lambda *now: rounds.append(now))
    alone = fast.generate("a cat", 9)
    assert torch.equal(both.tokens[1:], alone.tokens)
    assert len(both.images) == 2 and rounds
    with pytest.raises(TemperaError, match="batch_size=0 is not possible"):
        fast.generate("a cat", batch_size=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_beams": 2}, "num_beams=2 is not possible"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 is not possible"),
        ({"streamer": object()}, "`streamer` is not possible"),
        ({"max_new_tokens": 3}, "max_new_tokens=3 ends before the image, which has 28 tokens"),
        ({"suppress_tokens": [3]}, "names codes of the image"),
        ({"pixel_values": torch.zeros(1)}, "images as prompts"),
        ({"attention_mask": MASK.flip(1)}, "padded on the right"),
        ({"guidance_scale": 2.0}, "not guided"),
        ({"image_grid_thw": torch.ones(3, 3)}, "two grids"),
    ],
)
def test_impossible_calls(change: dict[str, Any], sentence: str) -> None:
    held = glm_image()
    fast = tempera.accelerate(held.model, None, "scd", window=4)
    with pytest.raises(TemperaError, match=sentence):
        fast.generate_ids(**{**held.inputs, **change})


def test_impossible_models_methods_and_options() -> None:
    model = janus().model

    def refused(sentence: str, *given: Any, **options: Any) -> None:
        with pytest.raises(TemperaError, match=sentence):
            tempera.accelerate(*given, **options)

    refused("Linear is not supported", torch.nn.Linear(2, 2))
    refused("needs files beside the model", model, method="eagle")
    refused("needs files beside the model", model, method="gsd")
    refused("`guidance` is not an option here", model, guidance=3.0)
    refused("windw", model, windw=3)
    refused("layout= is for Chameleon", model, layout="anole")
    refused("give layout='anole'", chameleon().model)
    refused("training mode", model.train())
    text = model.eval().model.language_model.config
    text._attn_implementation = "flash_attention_2"
    refused("attention is flash_attention_2", model)
    text._attn_implementation = "sdpa"
    with pytest.raises(TemperaError, match="needs? the model's processor"):
        tempera.accelerate(model).generate("a cat")
    with pytest.raises(TemperaError, match="no image decoder"):
        tempera.accelerate(glm_image().model).generate("a cat")


def test_text_is_still_the_models_own() -> None:
    held = janus()
    fast = tempera.accelerate(held.model, None, "scd", window=4)
    asked = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4}
    expected = held.model.generate(**asked)
    with fast.installed():
        assert torch.equal(held.model.generate(**asked), expected)


def test_another_rule_and_sampling() -> None:
    held = janus()
    rule = tempera.Relaxed(tempera.schedules.uniform(3.0, 4))
    sampling = Sampling(guidance=2.0, top_k=5)
    fast = tempera.accelerate(held.model, None, "sjd", rule=rule, sampling=sampling, window=4)
    assert fast.generate_ids(**held.inputs).shape == (2, 9)
    assert "Relaxed" in repr(fast)


@pytest.mark.docs
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny models in place of the published ones, of their processors and of a pipeline."""
    monkeypatch.chdir(tmp_path)
    accelerate = tempera.accelerate

    def in_small_windows(*given: Any, **options: Any) -> Any:
        return accelerate(*given, **options | {"window": 4})

    monkeypatch.setattr(tempera, "accelerate", in_small_windows)
    first, second, third = blocks(ROOT / "docs" / "accelerate.md", "python")

    def run(code: str, **names: Any) -> dict[str, Any]:
        exec(compile(code, "docs/accelerate.md", "exec"), names)
        return names

    def one_row(held: Held) -> Callable[..., Any]:
        kept = {name: held.inputs[name][:1] for name in ("input_ids", "attention_mask")}
        return lambda **asked: hf.BatchFeature(
            {**kept, "generation_mode": asked["generation_mode"]}
        )

    made = janus()
    published = hf.JanusForConditionalGeneration, hf.JanusProcessor
    for kind, value in zip(published, (made.model, one_row(made)), strict=True):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, value=value, **__: value)
    run(first)
    assert (tmp_path / "bicycle.png").is_file()

    class Pipe(SimpleNamespace):
        def __call__(self, _: str, **size: int) -> Any:
            return SimpleNamespace(images=self.vision_language_encoder.generate(**glm.inputs))

    glm = glm_image()
    found = run(second, tempera=tempera, pipe=Pipe(vision_language_encoder=glm.model))
    assert torch.equal(found["images"], glm.greedy())

    anole = chameleon()
    layout = replace(anole.options["layout"], prompt=(0, "{text}", 9))
    monkeypatch.setattr("tempera.targets.chameleon.anole", lambda: layout)
    tokenizer = SimpleNamespace(encode=lambda text, **_: [5, 7, 8])
    processor = SimpleNamespace(tokenizer=tokenizer)
    found = run(third, tempera=tempera, model=anole.model, processor=processor)
    assert found["tokens"].shape == (1, 15)
