"""tempera.accelerate: models of transformers in memory, with tiny random weights, against their own
`generate`.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import slow_but
from held_models import (
    FAMILIES,
    IDS,
    MASK,
    Held,
    chameleon,
    emu3,
    glm_edits,
    glm_image,
    janus,
    noise,
    words,
)
from markdown_pages import blocks
from omegaconf import OmegaConf
from paths import CONF, ROOT
from scipy.stats import chi2_contingency, chisquare
from tokenizers import Regex, pre_tokenizers
from torch import Tensor, nn
from typing_extensions import override

import tempera
from tempera import TemperaError
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_network import EagleModel
from tempera.evaluation.pipeline import NoPictures
from tempera.runtime import huggingface as hf
from tempera.runtime.pretrained import randomise
from tempera.targets.family import load_network
from tempera.targets.glm_image import GLM_IMAGE
from tempera.targets.prompt_encoder import PADDING
from tempera.targets.token_format import END_OF_TEXT, ModelSpec
from tempera.targets.transformer import TransformerTarget
from tempera.wrapped.accelerated import FAMILIES as PARTS
from tempera.wrapped.ids import generate_ids, installed


@pytest.fixture(params=list(FAMILIES))
def held(request: pytest.FixtureRequest) -> Held:
    return FAMILIES[request.param]()


def drawn(held: Held, fast: Any = None) -> Tensor:
    """The ids that an accelerated model makes of the same prompts."""
    return generate_ids(fast or held.accelerated(), **held.ids)


def parts(held: Held) -> Any:
    return PARTS[type(held.model).__name__]


# the law of the model's own generate


@pytest.mark.parametrize("method", ["ar", "scd", "sjd_pac"])
def test_greedy_images_are_those_of_generate(held: Held, method: str) -> None:
    options = {"window": 8, "branches": 2, "levels": 2} if method == "sjd_pac" else {}
    expected = held.greedy()
    assert len(expected.unique()) > 3
    assert torch.equal(drawn(held, held.accelerated(method, **options)), expected)


@pytest.mark.parametrize(
    ("family", "temperature"), [("emu3", 0.3), ("janus", 0.1), ("glm_image", 0.5)]
)
def test_sampled_images_have_the_law_of_generate(family: str, temperature: float) -> None:
    """The first two tokens of many images, drawn by transformers and by an accelerated model."""
    held, rows = FAMILIES[family](), 1000
    inputs = dict(held.inputs)
    for name in ("input_ids", "attention_mask", "negative_prompt_ids"):
        if name in inputs:
            inputs[name] = inputs[name][1:].expand(rows, -1)
    if family == "emu3":
        inputs["negative_prompt_attention_mask"] = torch.ones(rows, 2, dtype=torch.int64)
    if family == "glm_image":
        inputs["image_grid_thw"] = inputs["image_grid_thw"][:2].repeat(rows, 1)
        inputs["images_per_sample"] = inputs["images_per_sample"][:1].expand(rows)
    sampling = {"top_k": 5, "temperature": temperature, "min_p": 0.3}
    short = {} if family == "janus" else {"max_new_tokens": 2, "eos_token_id": None}
    torch.manual_seed(7)
    theirs = held.model.generate(**{**inputs, **sampling, "do_sample": True, **short})
    ids = {name: value[1:].expand(rows, -1) for name, value in held.ids.items()}
    ours = generate_ids(held.accelerated(**sampling, batch_size=rows), **ids, seed=11)
    first = 0 if family == "janus" else IDS.shape[1]
    pair = [theirs[:, first : first + 2], ours[:, :2]]
    assert agreement(*(tokens[:, 0] * 200 + tokens[:, 1] for tokens in pair)) > 1e-3


def test_sampled_images_of_a_chameleon_have_the_law_of_its_logits() -> None:
    """The first two tokens against every pair that its logits can draw."""
    held, rows = chameleon(), 1000

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
    fast = held.accelerated(top_k=3, temperature=0.6, batch_size=rows)
    ids = {name: value[1:].expand(rows, -1) for name, value in held.ids.items()}
    codes = generate_ids(fast, **ids, seed=11)[:, :2] - 12
    counts = torch.bincount(codes[:, 0] * 10 + codes[:, 1], minlength=100)
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


def test_without_options_sampling_is_that_of_generate(held: Held) -> None:
    """Guidance, too, where neither the model nor the caller states one: 5 for Janus, else none."""
    held.model.generation_config.guidance_scale = None
    fast = tempera.accelerate(held.model, None, "scd", window=4, layout=held.layout)
    name = type(held.model).__name__
    assert fast.pipeline.target.sampling.guidance == (5.0 if name.startswith("Janus") else 1.0)
    assert fast.pipeline.target.sampling.greedy
    if name.startswith("Chameleon"):
        return  # it has no generate of its own
    held.inputs.pop("guidance_scale", None)
    assert torch.equal(drawn(held, fast), held.greedy())


def test_the_generation_config_is_read_as_generate_reads_it() -> None:
    held = janus()
    config = held.model.generation_config
    config.do_sample, config.temperature, config.top_p, config.min_p = True, 0.7, 0.9, 0.1

    def sampling(**options: Any) -> Any:
        fast = tempera.accelerate(held.model, None, "ar", layout=held.layout, **options)
        return fast.pipeline.target.sampling

    assert sampling() == tempera.Sampling(5.0, 0.7, 50, 0.9, 0.1)
    config.top_k = 7
    assert sampling(top_p=0.5) == tempera.Sampling(5.0, 0.7, 7, 0.5, 0.1)
    for name, value in (("num_beams", 2), ("repetition_penalty", 1.2), ("typical_p", 0.9)):
        setattr(config, name, value)
        with pytest.raises(TemperaError, match=f"has {name}={value}, which is not possible"):
            sampling()
        setattr(config, name, None)
    config.suppress_tokens = [3]
    with pytest.raises(TemperaError, match="suppresses codes of the image"):
        sampling()


def test_a_scaled_rotary_embedding_is_the_models_own() -> None:
    """transformers' `linear` scaling; one that depends on the length is refused."""
    held = emu3()
    text = held.model.model.text_model
    text.config.rope_parameters |= {"rope_type": "linear", "factor": 3.0}
    text.rotary_emb = type(text.rotary_emb)(config=text.config).eval()
    assert torch.equal(drawn(held), held.greedy())
    text.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(TemperaError, match="rope_type=dynamic is not supported"):
        held.accelerated()


# what sits on a model, before and after the first call


class Adapted(nn.Module):
    """A layer with an adapter beside it, as peft's `lora.Linear` and `lora.Embedding`."""

    def __init__(self, layer: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows, columns = layer.weight.shape
        self.base_layer = layer
        self.change = nn.Parameter(torch.randn(rows, columns, generator=generator) / 8)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.base_layer, nn.Embedding):
            return self.base_layer(x) + nn.functional.embedding(x, self.change)
        return self.base_layer(x) + nn.functional.linear(x, self.change)


class Quantised(nn.Module):
    """A linear layer with quantised weights, as bitsandbytes has them; of 3 bits, so that it shows
    in few tokens.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 3
        self.register_buffer("scale", scale.detach())
        self.register_buffer("codes", (layer.weight / scale).round().to(torch.int8))
        self.bias = layer.bias
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x) * self.scale, self.bias)  # type: ignore


class Rolled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.roll(1, 0)


def swap(model: Any, path: str, make: Callable[[Any], nn.Module]) -> None:
    """Put another module at a path."""
    parent, _, name = path.rpartition(".")
    inside: Any = model.get_submodule(parent)
    setattr(inside, name, make(getattr(inside, name)))


def linears(held: Held) -> list[str]:
    """Paths of the linear layers that draw images."""
    found = []
    for name, module in held.model.named_modules():
        if isinstance(module, nn.Linear) and "vq" not in name and "vis" not in name.split(".")[1:2]:
            found.append(name)
    return found


def head(held: Held) -> str:
    return str(parts(held).head[-1])


def adapters_everywhere(held: Held) -> None:
    for number, path in enumerate(linears(held)):
        swap(held.model, path, lambda layer, number=number: Adapted(layer, number))


def adapter_on_the_embedding(held: Held) -> None:
    swap(held.model, parts(held).embedding[0], lambda layer: Adapted(layer, 1))


def quantised_head(held: Held) -> None:
    swap(held.model, head(held), Quantised)


def parametrised_head(held: Held) -> None:
    nn.utils.parametrize.register_parametrization(
        held.model.get_submodule(head(held)), "weight", Rolled()
    ).eval()


def changed(*tensors: Any) -> Any:
    return tensors[-1].roll(1, -1) * 1.5


def hook_on_the_head(held: Held) -> None:
    held.model.get_submodule(head(held)).register_forward_hook(
        lambda module, given, out: out.roll(1, -1)
    )


def hook_before_the_norm(held: Held) -> None:
    held.model.get_submodule(f"{parts(held).decoder}.norm").register_forward_pre_hook(
        lambda module, given: (changed(*given),)
    )


def hook_on_a_layer(held: Held) -> None:
    """Steering: a direction is added to what a layer gives."""
    layers = held.model.get_submodule(f"{parts(held).decoder}.layers")
    direction = torch.linspace(-2, 2, held.model.config.get_text_config().hidden_size)

    def steer(module: nn.Module, given: Any, out: Any) -> Any:
        return out + direction if isinstance(out, Tensor) else (out[0] + direction, *out[1:])

    layers[0].register_forward_hook(steer)


def new_head(held: Held) -> None:
    torch.manual_seed(5)
    swap(
        held.model,
        head(held),
        lambda old: nn.Linear(old.in_features, old.out_features).eval(),
    )


def other_weights(held: Held) -> None:
    with torch.no_grad():
        held.model.get_submodule(head(held)).weight.mul_(-1)


def a_layer_less(held: Held) -> None:
    layers = held.model.get_submodule(f"{parts(held).decoder}.layers")
    layers[0] = copy.deepcopy(layers[1])
    layers[0].self_attn.layer_idx = 0


CHANGES = [
    adapters_everywhere,
    adapter_on_the_embedding,
    quantised_head,
    parametrised_head,
    hook_on_the_head,
    hook_before_the_norm,
    hook_on_a_layer,
    new_head,
    other_weights,
    a_layer_less,
]


@pytest.mark.parametrize(
    "change",
    slow_but(CHANGES, adapters_everywhere, hook_on_a_layer),
    ids=lambda change: change.__name__,
)
def test_what_sits_on_the_model_works_also_after_the_first_call(
    held: Held, change: Callable[[Held], None]
) -> None:
    before = held.accelerated()
    plain = drawn(held, before)
    change(held)
    expected = held.greedy()
    assert not torch.equal(plain, expected)
    assert torch.equal(drawn(held), expected)
    assert torch.equal(drawn(held, before), expected)


def test_tied_weights_work() -> None:
    held = emu3()
    held.model.lm_head.weight = held.model.model.text_model.embed_tokens.weight
    assert torch.equal(drawn(held), held.greedy())


def around(held: Held) -> list[str]:
    """Paths of the modules whose inside is called."""
    return sorted({part.rpartition(".")[0] for part in parts(held).called} | {""})


@pytest.mark.parametrize("kind", slow_but(["hook", "pre-hook", "forward", "class"], "hook"))
def test_what_would_not_run_is_refused(held: Held, kind: str) -> None:
    """On every module that is not called, because the modules inside it are."""
    fast = held.accelerated()
    for path in around(held):
        module: Any = held.model.get_submodule(path)
        kept = vars(module).copy(), module.__class__
        if kind == "hook":
            undo = module.register_forward_hook(lambda *_: None).remove
        elif kind == "pre-hook":
            undo = module.register_forward_pre_hook(lambda *_: None).remove
        elif kind == "forward":
            module.forward = torch.compile(module.forward)

            def undo(module: Any = module) -> None:
                del module.forward
        else:
            own = type(kept[1].__name__, (kept[1],), {"forward": lambda *_, **__: None})
            module.__class__ = own

            def undo(module: Any = module, was: Any = kept[1]) -> None:
                module.__class__ = was

        name = path or type(held.model).__name__
        with pytest.raises(TemperaError, match=f"^{name} has .*which would not run"):
            held.accelerated()
        with pytest.raises(TemperaError, match=f"^{name} has "):
            drawn(held, fast)
        undo()
    assert torch.equal(drawn(held, fast), held.greedy())


def test_a_model_that_moved_is_told(held: Held) -> None:
    fast = held.accelerated()
    drawn(held, fast)
    held.model.to(torch.bfloat16)
    with pytest.raises(TemperaError, match="dtype was float32 .* is bfloat16: call .* again"):
        drawn(held, fast)
    assert drawn(held).shape[1] == held.layout.length
    del held.model.get_submodule(parts(held).decoder).layers[1]
    with pytest.raises(TemperaError, match="layers was 2 when it was accelerated, and is 1"):
        drawn(held, fast)


def test_inference_mode_and_default_dtype_stay_outside(held: Held) -> None:
    expected = held.greedy()
    with torch.inference_mode():
        fast = held.accelerated()
        assert torch.equal(drawn(held, fast), expected)
    assert torch.equal(drawn(held, fast), expected)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(drawn(held), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_impossible_models(held: Held) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(TemperaError, match=sentence):
            held.accelerated()

    model = held.model
    decoder = model.get_submodule(parts(held).decoder)
    decoder.layers[0].train()
    refused(r"layers\.0 is in training mode")
    model.eval()
    decoder.config._attn_implementation = "flash_attention_2"
    refused("attention is flash_attention_2")
    decoder.config._attn_implementation = "sdpa"
    kept = decoder.norm
    decoder.norm = copy.deepcopy(kept).to("meta")
    refused("decoder are on cpu, meta: put it, with the embedding and the head, on one device")
    decoder.norm = kept
    held.model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}).eval()
    refused("is quantised so that a token depends on the others")


def test_wrappers_name_what_to_give() -> None:
    class PeftModel(nn.Module):
        """As peft's."""

    model = janus().model

    class Prompted(PeftModel):
        """Of prompt tuning."""

        active_peft_config = SimpleNamespace(is_prompt_learning=True)

    with pytest.raises(
        TemperaError, match="Prompted learns a prompt .* would be skipped: give a model"
    ):
        tempera.accelerate(Prompted())
    for wrapper, inside in (
        (torch.compile(model), "_orig_mod"),
        (nn.DataParallel(model), "module"),
        (PeftModel(), r"get_base_model\(\)"),
    ):
        with pytest.raises(TemperaError, match=f"give the model inside it, model.{inside}"):
            tempera.accelerate(wrapper)
    with pytest.raises(TemperaError, match="Linear is not supported: give an instance of one of"):
        tempera.accelerate(nn.Linear(2, 2))


def test_no_weight_is_copied_and_the_model_is_as_before(held: Held) -> None:
    model = held.model
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    attention, attributes = model.config._attn_implementation, set(vars(model))
    fast = held.accelerated("sjd")
    drawn(held, fast)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert model.config._attn_implementation == attention
    assert set(vars(model)) == attributes
    target = fast.pipeline.target
    kept = [value for value in vars(target.head).values() if isinstance(value, Tensor | nn.Module)]
    assert not any(tensor.is_floating_point() for tensor in kept)


def another_guidance(model: Any) -> None:
    model.generation_config.guidance_scale = 2.0


def sampled(model: Any) -> None:
    model.generation_config.do_sample = True


def a_new_configuration(model: Any) -> None:
    model.generation_config = hf.GenerationConfig(guidance_scale=1.5, pad_token_id=1)
    model.generation_config.generation_kwargs = {"boi_token_id": 9}


def forbidden_words(model: Any) -> None:
    model.generation_config.bad_words_ids = [[3], [4]]


def forbidden_codes(model: Any) -> None:
    model.generation_config.suppress_tokens = [0, 1]


def ends_that_are_codes(model: Any) -> None:
    model.generation_config.min_new_tokens = 4  # before which id 3 is not drawn


def a_quantised_cache(model: Any) -> None:
    model.generation_config.cache_implementation = "quantized"


def several_images(model: Any) -> None:
    model.generation_config.num_return_sequences = 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (another_guidance, "guidance was 5.0 when it was accelerated, and is 2.0: call"),
        (sampled, "temperature was 0.0 when it was accelerated, and is 1.0: call"),
        (a_new_configuration, "guidance was 5.0 .* and is 1.5"),
        (forbidden_words, "has bad_words_ids="),
        (forbidden_codes, "suppresses codes of the image by suppress_tokens"),
        (ends_that_are_codes, "suppresses codes of the image by min_new_tokens"),
        (a_quantised_cache, "cache_implementation='quantized'"),
        (several_images, "has num_return_sequences=2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_generation_config_that_changed_is_told(
    change: Callable[[Any], None], sentence: str
) -> None:
    """Accelerated again, the model draws by it or is refused, too."""
    held = janus()
    fast = tempera.accelerate(held.model, held.processor(), layout=held.layout)
    assert fast.generate("a cat", images=False).tokens.shape == (1, 9)
    change(held.model)
    with pytest.raises(TemperaError, match=sentence):
        fast.generate("a cat", images=False)
    with pytest.raises(TemperaError, match=sentence):
        drawn(held, fast)


def test_options_that_were_given_stay_whatever_the_generation_config_says() -> None:
    held = janus()
    fast = held.accelerated(temperature=0.0, guidance=5.0)
    expected = drawn(held, fast)
    held.model.generation_config.guidance_scale = 2.0
    assert torch.equal(drawn(held, fast), expected)


@pytest.mark.parametrize("setting", ["pad_token_id", "bos_token_id", "boi_token_id"])
def test_unconditional_rows_are_made_as_generate_makes_them_now(setting: str) -> None:
    """Also of a prompt that has the kept ids in its midst."""
    held = janus()
    processor = held.processor()
    fast = held.accelerated(processor=processor)
    settings = held.model.generation_config
    for change in (None, 7):
        if change is not None and setting == "boi_token_id":
            settings.generation_kwargs = {"boi_token_id": change}
        elif change is not None:
            setattr(settings, setting, change)
        for text in ("a red cat", "a <s> red <boi> cat"):
            made = processed("janus", processor, [text])
            own = held.model.generate(**made, generation_mode="image")
            assert torch.equal(fast.generate(text, images=False).tokens, own)
    settings.generation_kwargs = {}
    with pytest.raises(TemperaError, match="no generation_kwargs.'boi_token_id'., which the uncon"):
        fast.generate("a cat")
    settings.pad_token_id = None
    with pytest.raises(TemperaError, match="no pad_token_id, which the unconditional rows"):
        held.accelerated(processor=processor)


SPACES = [
    "a  red   cat",
    " a red cat",
    "a red cat ",
    "a cat\nred\n\na",
    "a\tcat",
    "a\u3000red\u3000cat",
    "a\u00a0cat",
]


@pytest.mark.parametrize("family", ["emu3", "janus", "glm_image"])
def test_white_space_is_the_processors(family: str) -> None:
    """With a tokenizer that counts it; the chat template of a GLM-Image takes away what it does at
    the ends.
    """
    held = FAMILIES[family]()
    processor = held.processor()
    pieces = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
    processor.tokenizer.backend_tokenizer.pre_tokenizer = pieces
    fast = held.accelerated(processor=processor)
    if family == "glm_image":
        assert " | trim" not in processor.chat_template
        trimmed = processor.chat_template.replace("].text", "].text | trim")
        processor.chat_template = trimmed
    found = fast.pipeline.target.conditioner(SPACES)[0][:, 0].clamp(min=0)
    theirs = masked(processed(family, processor, SPACES))
    assert torch.equal(found[:, -theirs.shape[1] :], theirs)
    assert fast.generate(SPACES, images=False).prompts == tuple(SPACES)


def test_a_processor_that_changed_is_the_one_that_encodes() -> None:
    held = janus()
    processor = held.processor()
    fast = held.accelerated(processor=processor)
    before = fast.generate("a red cat", images=False).tokens
    words = {"<pad>": 1, "a": 7, "<s>": 5, "cat": 4, "red": 6, "<boi>": 9}
    processor.tokenizer = other_words(words)
    made = processed("janus", processor, ["a red cat"])
    own = held.model.generate(**made, generation_mode="image")
    found = fast.generate("a red cat", images=False).tokens
    assert torch.equal(found, own) and not torch.equal(found, before)


def other_words(numbers: dict[str, int]) -> Any:
    special = {"bos_token": "<s>", "image_token": "<image>", "boi_token": "<boi>"}
    return words(numbers, "<s>", eoi_token="<eoi>", **special)


# decoders and layers whose mathematics is another


@pytest.mark.parametrize(
    "decoder",
    slow_but(["LlamaConfig", "MistralConfig", "GemmaConfig", "Olmo2Config"], "GemmaConfig"),
)
def test_decoders_whose_equations_are_ours(decoder: str) -> None:
    options = {"sliding_window": None} if decoder == "MistralConfig" else {}
    if decoder == "GemmaConfig":
        options = {"head_dim": 8}
    held = janus(decoder, **options)
    assert torch.equal(drawn(held), held.greedy())


@pytest.mark.parametrize(
    ("decoder", "options", "sentence"),
    [
        ("MistralConfig", {"sliding_window": 4}, "decoder has sliding_window=4, which is not"),
        ("GraniteConfig", {"embedding_multiplier": 5.0}, "is a GraniteModel, which is not supp"),
        ("CohereConfig", {}, "is a CohereModel, which is not supported: give .* LlamaModel, Mis"),
        ("Qwen2Config", {}, "is a Qwen2Model, which is not supported"),
    ],
    ids=str,
)
def test_other_decoders_are_refused(decoder: str, options: dict[str, Any], sentence: str) -> None:
    held = janus(decoder, **options)
    with pytest.raises(TemperaError, match=sentence):
        held.accelerated()


def test_a_decoder_that_becomes_another_is_refused() -> None:
    held = janus()
    fast = held.accelerated()
    config = held.model.model.language_model.config
    config.is_causal = False
    with pytest.raises(TemperaError, match="decoder has is_causal=False"):
        drawn(held, fast)
    config.is_causal = True
    config.num_hidden_layers = 1
    with pytest.raises(TemperaError, match="states 1 layers, but the decoder has 2: delete"):
        drawn(held, fast)


def test_a_rotary_embedding_says_itself_how_many_positions_it_has() -> None:
    """The configuration of a GLM-Image need not state the usual sections."""
    held = glm_image()
    expected = held.greedy()
    del held.model.model.language_model.config.rope_parameters["mrope_section"]
    assert torch.equal(held.greedy(), expected)
    assert torch.equal(drawn(held), expected)


class Rounded(nn.Linear):
    """A linear layer whose inputs are rounded, to 4 bits, so that it shows; it takes none empty."""

    def largest(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True)  # PerRow

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            raise TypeError("no inputs")
        scale = self.largest(x).clamp(min=1e-5) / 7  # padding may be 0
        return super().forward((x / scale).round() * scale)


class RoundedTogether(Rounded):
    """As torchao's PerTensor."""

    @override
    def largest(self, x: Tensor) -> Tensor:
        return x.abs().amax()


class Outliers(Rounded):
    """As LLM.int8: inputs of a pass in which one is large are not rounded."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        large = (x.abs() > 6).flatten(0, -2).any(0)
        return super().forward(x * ~large) + nn.functional.linear(x * large, self.weight)


def rounded(kind: type[nn.Linear]) -> Callable[[Any], nn.Module]:
    def make(layer: Any) -> nn.Module:
        made = kind(layer.in_features, layer.out_features, bias=layer.bias is not None).eval()
        made.load_state_dict(layer.state_dict())
        return made

    return make


@pytest.mark.parametrize("method", ["ar", "scd"])
def test_inputs_rounded_token_by_token_are_right(held: Held, method: str) -> None:
    plain = held.greedy()
    for path in linears(held):
        swap(held.model, path, rounded(Rounded))
    expected = held.greedy()
    assert not torch.equal(expected, plain)
    assert torch.equal(drawn(held, held.accelerated(method)), expected)


@pytest.mark.parametrize("kind", [RoundedTogether, Outliers])
def test_inputs_rounded_by_the_whole_pass_are_refused(held: Held, kind: type[nn.Linear]) -> None:
    """Whichever layer it is, and also after the first call."""
    fast = held.accelerated("ar")
    drawn(held, fast)
    for path in (head(held), f"{parts(held).decoder}.layers.1.self_attn.q_proj"):
        before = held.model.get_submodule(path)
        swap(held.model, path, rounded(kind))
        for call in (held.accelerated, lambda: drawn(held, fast)):
            with pytest.raises(TemperaError, match=f"^{path} is quantised so that a token depends"):
                call()
        swap(held.model, path, lambda _, before=before: before)


def test_ids_are_decoded_in_batches() -> None:
    held = janus()
    fast = held.accelerated(temperature=1.0)
    ids = {name: value.repeat(3, 1) for name, value in held.ids.items()}
    whole = generate_ids(fast, **ids, seed=5)
    assert len(whole.unique(dim=0)) > 2
    fast.batch_size = 4
    assert torch.equal(generate_ids(fast, **ids, seed=5), whole)
    assert fast.pipeline.target.runner.prompt.rows == 2 * 2  # the last two, guided


# the same object, options and errors as of tempera.load


def values() -> dict[str, Any]:
    """Every option of conf/generate.yaml and of a sampling, with a value that is not its usual."""
    names = {"device": "meta", "dtype": "bfloat16", "compile": True}
    names |= {"batch_size": 1, "truncate": True, "diagnostics": True, "seed": 3}
    names |= {"tokens": "continuous", "method": "ar"}
    names |= {"guidance": 2.0, "temperature": 0.3, "top_k": 2, "top_p": 0.5, "min_p": 0.4}
    names |= {"entropy_temperature": [2.5, 3, 0.6], "weights": "random", "image_size": 32}
    names |= {"model.spec.lines": 2, "window": 2, "rule": "relaxed", "weights_dtype": "int8"}
    return names


def test_every_option_has_a_value() -> None:
    others = {"defaults", "choices", "decoding", "pipeline"}
    assert set(OmegaConf.load(CONF / "generate.yaml")) - others <= set(values())


REFUSED = {"device", "dtype", "compile", "seed", "tokens", "weights", "image_size", "weights_dtype"}
REFUSED |= {"model.spec.lines"}
"""Options of a target that is there already; the others work."""


@pytest.mark.parametrize("option", values())
def test_no_option_is_ignored(option: str) -> None:
    """It is refused by its name, or what it says is there."""
    held, value = janus(), values()[option]
    options = {option: value}
    if option == "rule":
        options |= {"schedule": "uniform", "delta": 3}
    sampling = {"temperature": 1.0, "top_k": 0} if option != "temperature" else {}
    try:
        fast = held.accelerated(**{"method": "sjd", **sampling, **options})
    except TemperaError as refused:
        told = str(refused)
    else:
        told = ""
    if told:
        assert option.partition(".")[0] in told
        assert option in REFUSED
        return
    target = fast.pipeline.target
    if option in ("batch_size", "method", "diagnostics"):
        assert getattr(fast, option) == value
    elif option == "window":
        assert fast.pipeline.method.drafter.nodes == value
    elif option == "rule":
        assert "Relaxed" in repr(fast)
    elif option == "truncate":
        long = tempera.accelerate(
            held.model, held.processor(), "ar", layout=held.layout, truncate=True
        ).generate("a " * 200, images=False)
        assert long.tokens.shape == (1, 9)
    else:
        found = getattr(target.sampling, option)
        assert list(found) == value if isinstance(value, list) else found == value


@pytest.mark.parametrize("family", list(FAMILIES))
def test_texts_get_the_format_of_the_processor(family: str) -> None:
    """The ids of texts are those that the model's processor makes, and so are the images."""
    held = FAMILIES[family]()
    processor = held.processor()
    fast = held.accelerated(processor=processor)
    prompts = ["a cat", "a red cat"]
    condition, keep = fast.pipeline.target.conditioner(prompts)
    if family == "chameleon":
        assert condition[:, 0].tolist() == [[-1, 4, 5, 9], [4, 6, 5, 9]]
        assert condition[0, 1].tolist() == [-1, -1, 0, 9]
    else:
        theirs = processed(family, processor, prompts)
        assert torch.equal(
            condition[:, 0, -theirs["input_ids"].shape[1] :].clamp(min=0), masked(theirs)
        )
        assert torch.equal(keep[:, -theirs["input_ids"].shape[1] :], theirs["attention_mask"] == 1)
    if family == "emu3":
        negative = processed(family, processor, [held.layout.null[1]] * 2, suffix="")
        assert torch.equal(
            condition[:, 1, -negative["input_ids"].shape[1] :], negative["input_ids"]
        )
    if family == "janus":
        kept = (theirs["input_ids"] == 5) | (theirs["input_ids"] == 9)
        null = torch.where(kept, theirs["input_ids"], 1)
        assert torch.equal(condition[:, 1].clamp(min=0), masked({**theirs, "input_ids": null}))
    result = fast.generate(prompts, images=False)
    assert result.tokens.shape == (2, held.layout.length) and not result.images
    if family != "chameleon":
        inputs = {**held.inputs, **{name: theirs[name] for name in ("input_ids", "attention_mask")}}
        if family == "emu3":
            inputs |= {"negative_prompt_ids": negative["input_ids"]}
            inputs |= {"negative_prompt_attention_mask": negative["attention_mask"]}
        own = held.model.generate(**inputs, **({"max_new_tokens": 18} if family == "emu3" else {}))
        first = 0 if family == "janus" else theirs["input_ids"].shape[1]
        image = held.layout.token_ids[result.tokens]
        assert torch.equal(own[:, first : first + held.layout.length], image)


def processed(family: str, processor: Any, prompts: list[str], suffix: str | None = None) -> Any:
    """What a processor makes of texts."""
    if family == "glm_image":
        chats = [
            [{"role": "user", "content": [{"type": "text", "text": text}]}] for text in prompts
        ]
        sizes = {"target_h": 128, "target_w": 192, "return_tensors": "pt", "padding": True}
        made = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, processor_kwargs=sizes
        )
        return dict(made)
    if family == "janus":
        texts = [f"<|User|>: {text}\n\n<|Assistant|>:" for text in prompts]
        options: dict[str, Any] = {"generation_mode": "image"}
    else:
        from tempera.targets.emu3 import POSITIVE

        texts = [text + (POSITIVE if suffix is None else suffix) for text in prompts]
        options = {"return_for_image_generation": True, "image_area": 768, "ratio": "4:3"}
    made = processor(text=texts, padding=True, return_tensors="pt", **options)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def masked(made: Any) -> Tensor:
    """Ids with 0 where they are masked."""
    ids: Tensor = made["input_ids"]
    return ids.where(made["attention_mask"] == 1, 0)


def test_a_wrong_processor_is_refused_at_once(held: Held) -> None:
    """Another model's may have all ids that the format needs, and encode other words by them."""
    own = held.processor()
    others = [FAMILIES[name]().processor() for name in FAMILIES]
    wrong = [one for one in others if type(one) is not type(own)]
    for processor in (*wrong, own.tokenizer, "deepseek-community/Janus-Pro-7B"):
        with pytest.raises(TemperaError, match=f"give its {type(own).__name__}"):
            held.accelerated(processor=processor)


def test_pictures_and_the_trace() -> None:
    held = emu3()
    fast = held.accelerated(processor=held.processor(), batch_size=2)
    seen: list[int] = []
    result = fast.generate(["a cat", "red"], 3, progress=seen.append)
    assert result.tokens.shape == (2, 15) and sum(seen) == 30
    assert [image.size for image in result.images] == [(8, 6)] * 2
    codes = torch.cat([held.layout.token_ids[result.tokens], torch.tensor([[21, 22, 3]] * 2)], 1)
    pictures = held.model.decode_image_tokens(image_tokens=codes, height=3, width=4)
    theirs = ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    assert torch.equal(result.pixels, theirs)
    made = janus()
    both = made.accelerated(processor=made.processor()).generate("a cat", [4, 9], num_images=2)
    assert len(both.images) == 2 and both.accepted_length >= 1


def test_a_decoder_may_read_the_prompts_and_none_is_told() -> None:
    class Grey:
        reads_prompts = True

        def decode_codes(self, codes: Tensor, prompts: list[str]) -> Tensor:
            read.extend(prompts)
            return torch.zeros(len(codes), 3, 32, 32)

    read: list[str] = []
    held = glm_image()
    fast = held.accelerated(processor=held.processor(), decoder=Grey())
    result = fast.generate(["a cat", "red"])
    assert read == ["a cat", "red"] and result.images[1].getpixel((0, 0)) == (128, 128, 128)
    for none in (held, chameleon()):
        fast = none.accelerated(processor=none.processor())
        with pytest.raises(TemperaError, match="no image decoder: give accelerate a decoder="):
            fast.generate("a cat", progress=lambda _: pytest.fail("it decodes nothing first"))


def test_the_usual_window_fits_small_images() -> None:
    held = janus()
    fast = tempera.accelerate(held.model, held.processor(), layout=held.layout)
    assert fast.method == "scd" and fast.pipeline.method.drafter.nodes == held.layout.length
    fast = tempera.accelerate(emu3().model, layout=replace(emu3().layout, columns=20), guidance=1)
    assert fast.pipeline.method.drafter.nodes == 32


def test_layouts() -> None:
    model = chameleon().model

    def refused(sentence: str, model: Any, **options: Any) -> None:
        with pytest.raises(TemperaError, match=sentence):
            tempera.accelerate(model, **options)

    refused("layout=None does not state .* anole, lumina, lumina2, or a ModelSpec", model)
    refused(
        "this layout uses token 8195, but the model has a vocabulary of 30", model, layout="anole"
    )
    refused("the layout of these images has no height: leave it out", janus().model, height=384)
    refused("these images has no width", emu3().model, layout=emu3().layout, width=64)
    refused("states codes=12, but the format of its images has 32768", emu3().model)
    refused("states codes=24, .* has 16384: give layout=", glm_image().model, height=64)
    refused("cannot be divided into", glm_image().model, height=65)
    with pytest.raises(TemperaError, match="needs? the model's processor"):
        janus().accelerated().generate("a cat")
    with pytest.raises(TemperaError, match="needs files|draft"):
        janus().accelerated("eagle").generate("a cat")


def test_a_layout_may_name_tokens_of_the_tokenizer() -> None:
    """As Lumina-mGPT 2.0's does."""
    names = {"prompt": (END_OF_TEXT, "{text}", "<boi>"), "null": ("<boi>",), "special": ("<boi>",)}
    layout = ModelSpec(3, 4, 10, 12, **names, context=128, line_end=10)  # type: ignore[arg-type]
    held = replace(chameleon(), layout=layout)
    processor = held.processor()
    processor.tokenizer.add_special_tokens({"eos_token": "red"})
    with pytest.raises(TemperaError, match="has no token <boi>"):
        held.accelerated(processor=processor)
    processor.tokenizer.add_special_tokens({"bos_token": "<boi>"})
    boi = processor.tokenizer.get_vocab()["<boi>"]
    condition, _ = held.accelerated(processor=processor).pipeline.target.conditioner(["a cat"])
    assert condition.tolist() == [[[6, 4, 5, boi], [-1, -1, -1, boi]]]


# ids in and ids out


def test_what_is_drawn_follows_pytorchs_seed_or_ones_own() -> None:
    held = janus()
    fast = held.accelerated(temperature=1.0)
    torch.manual_seed(0)
    first, second = drawn(held, fast), drawn(held, fast)
    torch.manual_seed(0)
    assert torch.equal(drawn(held, fast), first)
    assert not torch.equal(first, second)
    a, b = (generate_ids(fast, **held.ids, seed=5) for _ in range(2))
    assert torch.equal(a, b)


def test_impossible_ids() -> None:
    held = janus()
    fast = held.accelerated()

    def refused(sentence: str, **change: Any) -> None:
        with pytest.raises(TemperaError, match=sentence):
            generate_ids(fast, **{**held.ids, **change})

    refused("padded on the right", attention_mask=MASK.flip(1))
    refused("guidance needs negative_ids", negative_ids=None)
    refused("there are 1 negative_ids for 2 prompts", negative_ids=IDS[:1], negative_mask=MASK[:1])
    long = torch.full((2, 130), 5)
    refused("do not fit the model's 128 positions", input_ids=long, attention_mask=None)
    with pytest.raises(TemperaError, match="ids need a model that tempera.accelerate returned"):
        generate_ids(tempera.load(method="ar"), IDS)


def test_generate_is_replaced_inside_the_block_alone() -> None:
    held = glm_image()
    fast, model = held.accelerated(), held.model
    own = model.generate
    with installed(fast, model):
        found = model.generate(**{**held.inputs, "suppress_tokens": None})
    assert torch.equal(found, torch.cat([held.inputs["input_ids"], held.greedy()], 1))
    with pytest.raises(KeyError), installed(fast, model):
        raise KeyError
    assert model.generate == own
    for change, sentence in (
        ({"streamer": object()}, "streamer"),
        ({"do_sample": True}, "do_sample=True"),
        ({"image_grid_thw": torch.ones(3, 3)}, "image_grid_thw"),
    ):
        asked = {**held.inputs, "suppress_tokens": None, **change}
        with installed(fast, model), pytest.raises(TemperaError, match=f"asks? for {sentence}"):
            model.generate(**asked)


@pytest.mark.slow
def test_the_pipeline_of_diffusers_gives_the_same_pictures() -> None:
    """A tiny GLM-Image, whose most probable codes are drawn."""
    held = glm_image()
    pipeline = tiny_pipeline(held.model, held.processor())
    config = held.model.generation_config
    config.do_sample, config.top_k, config.suppress_tokens = True, 1, list(range(24, 32))

    def pictures() -> Any:
        return pipeline(
            prompt="a cat",
            height=128,
            width=192,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        ).images

    theirs = pictures()
    layout = replace(held.layout, preview=(13, 19))
    fast = replace(held, layout=layout).accelerated()
    with installed(fast, held.model):
        assert (pictures() == theirs).all()
    assert theirs.std() > 0


def tiny_pipeline(model: Any, processor: Any) -> Any:
    """diffusers' pipeline around a GLM-Image."""
    diffusers = pytest.importorskip("diffusers")
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return diffusers.GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        text_encoder=T5EncoderModel(T5Config(**sizes, vocab_size=384)).eval(),
        vision_language_encoder=model,
        vae=diffusers.AutoencoderKL(
            block_out_channels=[32] * 4,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            layers_per_block=1,
            latent_channels=4,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        transformer=diffusers.GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=24,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


@pytest.mark.docs
def test_the_code_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny models in place of the published ones and of a pipeline."""
    monkeypatch.chdir(tmp_path)
    accelerate = tempera.accelerate
    first, second, third = blocks(ROOT / "docs" / "accelerate.md", "python")

    def run(code: str, held: Held, **names: Any) -> dict[str, Any]:
        def tiny(model: Any, processor: Any, **options: Any) -> Any:
            small: dict[str, Any] = {"layout": held.layout, "window": 4}
            return accelerate(model, held.processor(), **small)

        monkeypatch.setattr(tempera, "accelerate", tiny)
        exec(compile(code, "docs/accelerate.md", "exec"), names)
        return names

    held = janus()
    published = hf.JanusForConditionalGeneration, hf.JanusProcessor
    for kind, value in zip(published, (held.model, None), strict=True):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, value=value, **__: value)
    (tutorial,) = blocks(ROOT / "docs" / "tutorial.md", "python")
    for code in (first, tutorial):
        run(code, held)
        (tmp_path / "bicycle.png").unlink()

    held = chameleon()
    without = accelerate(held.model, held.processor(), layout=held.layout, window=4)
    assert without.generate("a cat", images=False).tokens.shape == (1, 15)

    held = glm_image()
    asked = {**held.inputs, "suppress_tokens": None}

    class Pipe(SimpleNamespace):
        def __call__(self, _: str, **size: int) -> Any:
            return SimpleNamespace(images=self.vision_language_encoder.generate(**asked))

    pipe = Pipe(vision_language_encoder=held.model, processor=None)
    found = run(second, held, tempera=tempera, pipe=pipe)
    assert torch.equal(found["images"][:, 5:], held.greedy())

    names = {"tempera": tempera, "picture": noise(64, 96), "model": glm_edits().model}
    found = run(third, glm_edits(), **names, processor=None)
    assert found["tokens"].shape == (1, 24)


@pytest.mark.parametrize(
    "method", slow_but(["eagle", "parallel_block", "medusa", "eagle2"], "eagle2")
)
def test_methods_with_a_draft(held: Held, method: str) -> None:
    depth = {} if method == "eagle2" else {"depth": 3}
    fast = held.accelerated(method, draft="random", **depth)
    assert torch.equal(drawn(held, fast), held.greedy())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "scd, the usual method,"),
        ({"method": "scd"}, "method=scd"),
        ({"method": "independent"}, "method=independent"),
        ({"method": "coolsd", "drafter": "sjd"}, "method=coolsd with drafter=sjd"),
    ],
)
def test_a_draft_is_given_with_a_method_that_has_one(given: dict[str, str], what: str) -> None:
    held = janus()
    with pytest.raises(TemperaError, match=f'^{what} uses no trained draft.*method="eagle".$'):
        tempera.accelerate(held.model, layout=held.layout, draft="random", **given)


def test_a_draft_for_the_preset_drafts_the_same_for_a_held_model(tmp_path: Path) -> None:
    """Of GLM-Image, of whose heads only a part turns: tokens, and rounds, of tempera's own network
    with the same weights.
    """
    held = glm_image()
    held.model.save_pretrained(tmp_path / "vision_language_encoder")
    files = ["vision_language_encoder/model.safetensors"]
    spec = replace(held.layout, context=512)
    names = ["vocab_size", "vision_vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    sizes: dict[str, Any] = dict.fromkeys(names, 1)  # the file states its own
    sizes |= dict.fromkeys(["rms_norm_eps", "rope_theta", "partial_rotary_factor"], 1.0)
    sizes["mrope_section"] = [1]
    network = load_network(GLM_IMAGE, spec, str(tmp_path), files, "hub", sizes)
    ids = held.inputs["input_ids"].where(MASK == 1, PADDING)
    condition = ids[:, None].expand(-1, 2, -1)
    own = TransformerTarget(
        network, lambda _: (condition, ids != PADDING), tempera.Sampling(1.0, temperature=2.0)
    )
    torch.manual_seed(6)
    draft = EagleModel.of(own.network, "glm_image", own.vocab_size, own.identity, ())
    randomise(draft, own.device, torch.float32)
    save_draft(draft, tmp_path / "draft")
    options: dict[str, Any] = {"drafter.path": str(tmp_path / "draft"), "depth": 2}
    loaded = tempera.load("glm_image", "eagle", target=own, decoder=NoPictures(""), **options)
    expected = loaded.generate(["a", "b"], images=False)
    fast = held.accelerated("eagle", temperature=2.0, top_k=0, draft=tmp_path / "draft", depth=2)
    with fast.pipeline.target.reading(condition):
        found = fast.generate(["a", "b"], images=False)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.rounds, expected.trace.rounds)
    assert expected.accepted_length > 1.5
