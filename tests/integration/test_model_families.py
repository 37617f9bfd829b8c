"""Every published family, tiny, in its official layout: loads through conf/, scores as a
computation written apart from the package, decodes, drafts.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_transformer as reference
import torch
from cases import slow_but
from network_drafts import write_smaller
from omegaconf import open_dict
from PIL import Image
from round_checks import check_rounds
from tiny_networks import TREE, random_draft, tiny_eagle, tiny_parallel
from tiny_targets import (
    COUSINS,
    DIM,
    DISTINCT,
    FAMILIES,
    HEADS,
    LAYERS,
    META,
    STATES,
    composed,
    llamagen_state,
    method_options,
    official_state,
    vq_option,
)
from torch.nn.functional import gelu

from tempera.config.instantiate import part
from tempera.config.parts import Parts
from tempera.data.entries import Entry
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.draft_files import save_draft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.targets.emu3 import NEGATIVE, POSITIVE
from tempera.targets.prompt_encoder import about_as_many
from tempera.targets.token_head import FORBIDDEN
from tempera.targets.transformer import TransformerTarget
from tempera.training.teacher_forcing import teach


class Made(dict[str, Any]):
    """What belongs to each family, made when it is asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command-line options of every tiny family."""
    return Made(lambda name: FAMILIES[name].write(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def targets(options: dict[str, list[str]]) -> dict[str, Any]:
    """Every tiny family, loaded as the scripts load it."""
    return Made(lambda name: Parts.of(composed(*options[name])).target())


LUMINA_TEXT = "Generate an image of 64x64 according to the following prompt:\n"
LUMINA2_START = [*about_as_many("<racm3:break>"), *about_as_many("<reserved08801>") * 2]
LUMINA2_TEXT = LUMINA_TEXT.replace("64", "32")
EMU3_GRID = [151852, *about_as_many("4*4"), 151851]
PROMPTED = {  # prompt and null prompt, ids of the tokens, θ, whether pairs are neighbours
    "lumina": (
        lambda text: [0, *about_as_many(LUMINA_TEXT + text), 8710, 8197, 8806, 8806],
        [8197, 8806, 8806],
        [*range(4, 8196), 8803],
        (10000.0, False),
    ),
    "lumina2": (
        lambda text: [
            *about_as_many("{end of text}"),
            *about_as_many(LUMINA2_TEXT + text),
            *about_as_many("<reserved08706>"),
            *LUMINA2_START,
        ],
        LUMINA2_START,
        [*range(155000, 171384), 151670],
        (10000.0, False),
    ),
    "anole": (
        lambda text: [0, *about_as_many(text), 8710, 8197],
        [0, 8197],
        [*range(4, 8196)],
        (10000.0, True),
    ),
    "emu3": (
        lambda text: [151849, *about_as_many(text + POSITIVE), *EMU3_GRID],
        [151849, *about_as_many(NEGATIVE), *EMU3_GRID],
        [*range(151854, 184622), 151846],
        (1e6, False),
    ),
}


@pytest.mark.parametrize("name", slow_but(PROMPTED, "lumina"))
def test_logits_and_guidance_equal_another_computation(name: str, targets: dict[str, Any]) -> None:
    """The whole way, in float64: prompt format, left padding, the unconditional row's own prompt,
    the loader's permutations, token ids, guidance.
    """
    loaded, prompts = targets[name], list(FAMILIES[name].prompts)
    network = deepcopy(loaded.network).double()
    target = TransformerTarget(network, loaded.conditioner.encode, loaded.sampling)
    format_prompt, null, ids, (theta, interleaved) = PROMPTED[name]
    names, _, kv, *_ = STATES[name]
    state = official_state(*STATES[name])
    embedding, norm, head = (state[one] for one in names.top)
    draft = random_draft(Tree.chain(3), 2, torch.Generator().manual_seed(1), len(ids))
    target.begin(prompts, 3)
    scores = target.score(draft, 0)
    got, wanted, codes = target.head.lm_logits(scores.hidden), [], network.spec.codes
    for row in range(4):
        before = format_prompt(prompts[row]) if row < 2 else null
        sequence = [*before, *(ids[token] for token in draft.tokens[row % 2].tolist())]
        turns = reference.line_turns(len(sequence), DIM // HEADS, theta)
        given = names.layers(state), norm, head, (HEADS, kv), turns, interleaved
        wanted.append(reference.logits(embedding[sequence], *given)[-4:, ids[:codes]])
    assert (got[..., :codes] - torch.stack(wanted)).abs().max() < 1e-5
    assert (got[..., codes:] < FORBIDDEN / 2).all()
    conditional, unconditional = torch.stack(wanted).chunk(2)
    logits = unconditional + target.sampling.guidance * (conditional - unconditional)
    least = logits.topk(target.sampling.top_k).values[..., -1:]
    expected = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
    assert (scores.p[..., :codes] - expected).abs().max() < 1e-5
    assert (scores.p[..., codes:] == 0).all()


def test_llamagen_equals_another_computation(targets: dict[str, Any]) -> None:
    """Of a caption, and of the null caption with a caption's padding."""
    target, prompts, size = targets["llamagen_text"], ["a cat", "a dog"], DIM // HEADS
    features, keep = target.conditioner(prompts)
    state = llamagen_state(24, caption=8)
    for i in range(LAYERS):
        fused = state.pop(f"layers.{i}.attention.wqkv.weight").chunk(3)
        names = (f"layers.{i}.attention.w{part}.weight" for part in "qkv")
        state |= zip(names, fused, strict=True)
    codes = torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = teach(target, prompts, codes, torch.tensor([False, True])).hidden
    features = torch.stack([features[0], state["cls_embedding.uncond_embedding"]])
    embedding, norm, head = (state[one] for one in META.top)
    first, second = (state[f"cls_embedding.cap_proj.fc{n}.weight"].double().T for n in (1, 2))
    for row in range(2):
        caption = gelu(features[row, keep[row]].double() @ first, approximate="tanh") @ second
        x = torch.cat([caption, embedding[codes[row, :-1]]])
        turns = reference.grid_turns(len(caption), len(x), size, columns=4)
        wanted = reference.logits(x, META.layers(state), norm, head, (HEADS, HEADS), turns, True)
        found = target.head.lm_logits(hidden[row])[-16:]
        assert (found - wanted[-16:]).abs().max() < 1e-5


@pytest.mark.parametrize("name", slow_but(DISTINCT, "llamagen_text", "lumina"))
def test_cached_tree_scoring_equals_full_scoring(name: str, targets: dict[str, Any]) -> None:
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    generator = torch.Generator().manual_seed(2)
    check_rounds(target, prompts, TREE.nodes, lambda: TREE, generator, target.head.forced)


EXACT = ("eagle tree", "parallel", "independent", "sjd_pac")


@pytest.fixture(scope="module")
def methods() -> dict[str, Any]:
    """The methods' own options, which no model changes."""
    return Made(lambda name: composed(*method_options(name, "draft", "parallel")))


@pytest.fixture(scope="module")
def models(options: dict[str, list[str]]) -> dict[str, Any]:
    """The models' own options, which no method changes."""
    return Made(lambda name: composed(*options[name]))


@pytest.fixture(scope="module")
def places(targets: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For every family a directory with an EAGLE draft, a parallel draft, and a smaller model of
    the same tokens.
    """

    def make(name: str) -> Path:
        directory, target = tmp_path_factory.mktemp("beside"), targets[name]
        save_draft(tiny_eagle(target), directory / "draft")
        save_draft(tiny_parallel(target, layers=2, length=5), directory / "parallel")
        write_smaller(directory / "smaller", target.vocab_size, target.grid)
        return directory

    return Made(make)


@pytest.fixture
def generate(
    targets: dict[str, Any],
    methods: dict[str, Any],
    models: dict[str, Any],
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., torch.Tensor]:
    """Generate a family's two prompts with a method, with its options or at a temperature ->
    tokens int64 [2, length].
    """

    def call(name: str, method: str, temperature: float | None = None) -> torch.Tensor:
        monkeypatch.chdir(places[name])
        cfg = methods[method].copy()
        cfg.model = models[name].model.copy()
        with open_dict(cfg):
            for option in models[name].keys() - cfg.keys():  # such as the size of images
                cfg[option] = models[name][option]
        with open_dict(cfg.model):
            cfg.model.independent = {
                "_target_": "tempera.shapes.networks.load_smaller",
                "directory": str(places[name] / "smaller"),
            }
        if "neighbours" in cfg:
            cfg.neighbours = {"_target_": "near_codes.next_codes"}
        target, prompts = targets[name], list(FAMILIES[name].prompts)
        if temperature is not None:
            monkeypatch.setattr(
                target, "sampling", replace(target.sampling, temperature=temperature)
            )
        drafter = Parts.of(cfg).drafter(target)
        return decode(
            target, drafter, Parts.of(cfg).rule(), RandomStreams(0, prompts), prompts
        ).tokens

    return call


GENERATED = [
    *((name, method) for name in DISTINCT for method in ("eagle2", "lanternpp", "sjd")),
    *((name, "sjd") for name in COUSINS),
]


@pytest.mark.parametrize(
    ("name", "method"),
    slow_but(GENERATED, ("llamagen_text", "lanternpp")),
)
def test_every_model_generates(
    name: str, method: str, targets: dict[str, Any], generate: Callable[..., torch.Tensor]
) -> None:
    target, tokens = targets[name], generate(name, method)
    assert tokens.shape == (2, target.length) and len(tokens.unique()) > 3
    spec = target.network.spec
    if spec is not None and spec.line_end is not None:
        grid = tokens.view(2, *target.grid)
        assert (grid[..., -1] == target.vocab_size - 1).all()
        assert (grid[..., :-1] < target.vocab_size - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_no_exact_method_changes_a_greedy_image(
    name: str, generate: Callable[..., torch.Tensor]
) -> None:
    plain = generate(name, "ar", temperature=0.0)
    assert not torch.equal(plain[0], plain[1])
    for method in EXACT:
        assert torch.equal(generate(name, method, temperature=0.0), plain), method


@pytest.mark.slow
def test_a_smaller_llamagen_drafts_for_a_larger_one(
    options: dict[str, list[str]], tmp_path: Path
) -> None:
    """LlamaGen-L for LlamaGen-3B, in official files of tiny sizes: `method=independent` finds it
    beside the target.
    """
    state = llamagen_state(24)
    torch.save({"model": state}, tmp_path / "c2i_3B_384.pt")
    smaller = {name: tensor * 0.9 for name, tensor in state.items()}
    torch.save({"model": smaller}, tmp_path / "c2i_L_384.pt")
    sizes = options["llamagen_classes"][3].partition("=")[2]
    tiny = [
        f"{sign}model.{part}network.config{value}"
        for part in ("", "independent.")
        for sign, value in (("~", ""), ("+", f"={sizes}"))
    ]
    rest = [vq_option(24), "model.tokenizer_weights=random", "model.text_encoder.classes=10"]
    choose = ["model=llamagen_3b_c2i", "method=independent", "depth=3", *tiny, *rest]

    def rounds(*more: str) -> Any:
        cfg, prompts = composed(*choose, f"weights={tmp_path}", *more), ["3", "7"]
        target: Any = Parts.of(cfg).target()
        drafter = Parts.of(cfg).drafter(target)
        return decode(target, drafter, Exact(), RandomStreams(0, prompts), prompts).trace.rounds

    same = f"model.independent.network.weights={tmp_path / 'c2i_3B_384.pt'}"
    assert rounds(same).tolist() == [4, 4]  # 16 tokens, 3 drafted and 1 more
    assert 4 < rounds().sum() / 2 < 16
    (tmp_path / "c2i_L_384.pt").unlink()
    with pytest.raises(TemperaError, match=r"contains no c2i_L_384.pt: .* give .*weights=DIR"):
        rounds()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lumina", "emu3", "janus"])
def test_a_model_of_a_shared_vocabulary_drafts_for_another(
    name: str, options: dict[str, list[str]], targets: dict[str, Any]
) -> None:
    """Named in a YAML file of one's own; here it is the target, so every draft is accepted."""
    parts = "network:${model.network},text_encoder:${model.text_encoder}"
    smaller = f"+model.independent={{_target_:tempera.drafters.independent.SmallerModel,{parts}}}"
    cfg = composed(*options[name], smaller, "method=independent", "depth=3")
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    drafter: Any = Parts.of(cfg).drafter(target)
    output = decode(target, drafter, Exact(), RandomStreams(0, prompts), prompts)
    assert output.trace.rounds.tolist() == [-(-target.length // 4)] * 2


@pytest.mark.parametrize("name", slow_but(FAMILIES, "lumina"))
def test_tokens_become_pixels_and_come_back_in_shape(
    name: str,
    targets: dict[str, Any],
    options: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the target's grid, without its weights."""
    monkeypatch.setattr(Parts, "target", None)
    cfg, grid = composed("+encoder=vq", *options[name]), targets[name].grid
    tokenizer: Any = Parts.of(cfg).tokenizer()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(tokenizer.vocab_size, (2, *grid), generator=generator)
    with torch.no_grad():
        images = tokenizer.decode_codes(codes)
        again = tokenizer.encode(images)
    assert images.shape == (2, 3, *tokenizer.image_size(grid)) and images.abs().max() <= 1
    assert again.shape == (2, *grid) and tokenizer.vocab_size == targets[name].vocab_size
    encoder = Parts.of(cfg).code_encoder(part(cfg.encoder))
    found = encoder.encode([Entry("a.png", "a", "a red ring", Image.new("RGB", (50, 40)))]).codes
    assert encoder.grid == grid and found.shape == (1, grid[0] * grid[1])
    assert found.max() < targets[name].vocab_size
