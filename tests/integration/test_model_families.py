"""Every published family, tiny, in its official layout: loads through conf/, scores as a float64
computation, decodes, drafts.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_transformer as reference
import torch
from accelerate.state import AcceleratorState
from cases import slow_but, slow_rows_but
from omegaconf import open_dict
from PIL import Image
from reference_llamagen import reference_logits
from round_checks import check_rounds
from tiny_networks import TREE, lively, random_draft, tiny_eagle, tiny_parallel
from tiny_targets import (
    DIM,
    FAMILIES,
    HEADS,
    LAYERS,
    composed,
    huggingface_state,
    llamagen_state,
    meta_state,
    script,
    vq_option,
)

from tempera.config import build
from tempera.config.build import (
    build_drafter,
    build_encoder,
    build_rule,
    build_target,
    build_tokenizer,
)
from tempera.data.sources import Entry
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle_network import EagleModel
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.runtime.network_directory import write_network
from tempera.shapes.networks import TextEncoder, target_config
from tempera.targets.emu3 import NEGATIVE, POSITIVE
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.shared_vocabulary import about_as_many
from tempera.targets.token_head import FORBIDDEN
from tempera.training.teacher_forcing import teach


@pytest.fixture(autouse=True)
def _fresh() -> None:
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command-line options of every tiny family."""
    return {name: family.write(tmp_path_factory.mktemp(name)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def targets(options: dict[str, list[str]]) -> dict[str, Any]:
    """Every tiny family, loaded as the scripts load it."""
    return {name: build_target(composed(*choices)) for name, choices in options.items()}


HF_ROLES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
HF_NORMS = {
    "q_norm": "self_attn.q_norm.weight",
    "q_bias": "self_attn.q_norm.bias",
    "k_norm": "self_attn.k_norm.weight",
    "k_bias": "self_attn.k_norm.bias",
}
META_ROLES = {
    **{part: f"attention.w{part}.weight" for part in "qkvo"},
    "gate": "feed_forward.w1.weight",
    "up": "feed_forward.w3.weight",
    "down": "feed_forward.w2.weight",
    "attention_norm": "attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attention.q_normalization.weight",
    "q_bias": "attention.q_normalization.bias",
    "k_norm": "attention.k_normalization.weight",
    "k_bias": "attention.k_normalization.bias",
}


def lumina_logits(ids: list[int]) -> torch.Tensor:
    w = huggingface_state(8832, norms=True)
    layers = [
        {role: w[f"model.layers.{i}.{name}"] for role, name in (HF_ROLES | HF_NORMS).items()}
        for i in range(LAYERS)
    ]
    top = w["model.embed_tokens.weight"], layers, w["model.norm.weight"], w["lm_head.weight"]
    return reference.logits(ids, *top, (HEADS, HEADS), 10000.0, reference.half_split)


def anole_logits(ids: list[int]) -> torch.Tensor:
    w = meta_state(8832)
    layers = [
        {role: w[f"layers.{i}.{name}"] for role, name in META_ROLES.items()} for i in range(LAYERS)
    ]
    top = w["tok_embeddings.weight"], layers, w["norm.weight"], w["output.weight"]
    return reference.logits(ids, *top, (HEADS, HEADS), 10000.0, reference.interleaved)


def emu3_logits(ids: list[int]) -> torch.Tensor:
    w = huggingface_state(184622, kv=1)
    layers = [
        {role: w[f"model.layers.{i}.{name}"] for role, name in HF_ROLES.items()}
        for i in range(LAYERS)
    ]
    top = w["model.embed_tokens.weight"], layers, w["model.norm.weight"], w["lm_head.weight"]
    return reference.logits(ids, *top, (HEADS, 1), 1e6, reference.half_split)


LUMINA_TEXT = "Generate an image of 64x64 according to the following prompt:\n"
PROMPTED = {
    "lumina": (
        lumina_logits,
        lambda text: [0, *about_as_many(LUMINA_TEXT + text), 8710, 8197, 8806, 8806],
        [8197, 8806, 8806],
        [*range(4, 8196), 8803],
    ),
    "anole": (
        anole_logits,
        lambda text: [0, *about_as_many(text), 8710, 8197],
        [0, 8197],
        [*range(4, 8196)],
    ),
    "emu3": (
        emu3_logits,
        lambda text: [
            151849,
            *about_as_many(text + POSITIVE),
            151852,
            *about_as_many("4*4"),
            151851,
        ],
        [151849, *about_as_many(NEGATIVE), 151852, *about_as_many("4*4"), 151851],
        [*range(151854, 184622), 151846],
    ),
}


@pytest.mark.parametrize("name", slow_but(PROMPTED, "lumina"))
def test_logits_and_guidance_equal_a_float64_computation(
    name: str, targets: dict[str, Any]
) -> None:
    """The whole way: prompt format, left padding, the unconditional row's own prompt, the loader's
    permutations, token ids, guidance.
    """
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    compute, format_prompt, null, ids = PROMPTED[name]
    draft = random_draft(Tree.chain(3), 2, torch.Generator().manual_seed(1), len(ids))
    target.begin(prompts, 3)
    scores = target.score(draft)
    got = target.head.lm_logits(scores.hidden).double()
    wanted = []
    for row in range(4):
        before = format_prompt(prompts[row]) if row < 2 else null
        drawn = [ids[token] for token in draft.tokens[row % 2].tolist()]
        wanted.append(compute([*before, *drawn])[-4:, ids[: target.network.spec.codes]])
    codes = target.network.spec.codes
    assert (got[..., :codes] - torch.stack(wanted)).abs().max() < 2e-5
    assert (got[..., codes:] < FORBIDDEN / 2).all()
    conditional, unconditional = torch.stack(wanted).chunk(2)
    logits = unconditional + target.sampling.guidance * (conditional - unconditional)
    logits = logits.masked_fill(
        logits < logits.topk(target.sampling.top_k).values[..., -1:], -torch.inf
    )
    assert (scores.p[..., :codes] - logits.softmax(-1)).abs().max() < 1e-5
    assert (scores.p[..., codes:] == 0).all()


def test_llamagen_equals_a_float64_computation(targets: dict[str, Any]) -> None:
    target, prompts = targets["llamagen_text"], ["a cat", "a dog"]
    features, keep = target.conditioner(prompts)
    state = llamagen_state(24, caption=8)
    codes = torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = teach(target, prompts, codes, torch.zeros(2, dtype=torch.bool)).hidden
    wanted = reference_logits(state, features, keep, codes, grid=(4, 4))
    assert (target.head.lm_logits(hidden) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", slow_but(FAMILIES, "llamagen_text", "lumina"))
def test_cached_tree_scoring_equals_full_scoring(name: str, targets: dict[str, Any]) -> None:
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    with torch.no_grad():
        target.begin(prompts, TREE.nodes)
        check_rounds(
            target, prompts, lambda: TREE, torch.Generator().manual_seed(2), target.head.forced
        )


DRAFT, WINDOW = "drafter.path=draft", "window=6"
METHODS = {
    "ar": [],
    "eagle": ["tree=chain", "depth=3", DRAFT],
    "eagle tree": ["tree=mc_sim_7b_63", DRAFT],
    "eagle2": ["nodes=6", "branches=2", "depth=3", DRAFT],
    "parallel": ["depth=3", "drafter.path=parallel"],
    "coolsd": ["tree=chain", "depth=3", DRAFT],
    "uniform_rsd": ["tree=chain", "depth=3", DRAFT],
    "optimal_rsd": ["tree=chain", "depth=3", DRAFT],
    "lantern": ["k=5", "tree=chain", "depth=3", DRAFT],
    "lanternpp": ["k=5", "tree=mc_sim_7b_63", DRAFT],
    "block": ["depth=3", DRAFT],
    "independent": ["depth=3"],
    "jacobi": [WINDOW],
    "sjd": [WINDOW],
    "gsd": [WINDOW, "k=5"],
    "scd": [WINDOW],
    "sjd_pac": ["window=12", "branches=2"],
}
EXACT = ("eagle tree", "parallel", "independent", "sjd_pac")


@pytest.fixture(scope="module")
def methods() -> dict[str, Any]:
    """The methods' own options, which no model changes."""
    return {
        name: composed(f"method={name.split()[0]}", *choices) for name, choices in METHODS.items()
    }


@pytest.fixture(scope="module")
def models(options: dict[str, list[str]]) -> dict[str, Any]:
    """The models' own options, which no method changes."""
    return {name: composed(*choices).model for name, choices in options.items()}


@pytest.fixture(scope="module")
def places(targets: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For every family a directory with an EAGLE draft, a parallel draft, and a smaller model of
    the same tokens.
    """
    found = {}
    for name, target in targets.items():
        directory = found[name] = tmp_path_factory.mktemp("beside")
        tiny_eagle(target).save_pretrained(directory / "draft")
        tiny_parallel(target, layers=2).save_pretrained(directory / "parallel")
        sizes = LlamaGenConfig(
            target.vocab_size, 8, 12, 1, 1, target.grid, prefix_length=4, caption_dim=4
        )
        network, encoder = lively(LlamaGen(sizes)), TextEncoder(4, 4, 1, 1)
        place = directory / "smaller"
        write_network(place, network.state_dict(), target_config(network))
        write_network(place / "text_encoder", encoder.state_dict(), encoder.config)
    return found


def smaller(directory: Path) -> dict[str, str]:
    """The node that names the smaller model in a directory."""
    return {
        "_target_": "tempera.shapes.networks.load_smaller",
        "directory": str(directory / "smaller"),
    }


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
        cfg.model = models[name].copy()
        with open_dict(cfg.model):
            cfg.model.independent = smaller(places[name])
        if "neighbours" in cfg:
            cfg.neighbours = {"_target_": "near_codes.next_codes"}
        target, prompts = targets[name], list(FAMILIES[name].prompts)
        if temperature is not None:
            monkeypatch.setattr(
                target, "sampling", replace(target.sampling, temperature=temperature)
            )
        drafter = build_drafter(cfg, target)
        return decode(
            target, drafter, build_rule(cfg, drafter.depth), RandomStreams(0, prompts), prompts
        ).tokens

    return call


GENERATED = [
    *(("llamagen_text", method) for method in METHODS),
    *((name, method) for name in FAMILIES for method in ("eagle2", "lanternpp", "sjd")),
]


@pytest.mark.parametrize(
    ("name", "method"),
    slow_rows_but(dict.fromkeys(GENERATED), ("llamagen_text", "eagle tree")),
)
def test_every_method_generates(
    name: str, method: str, targets: dict[str, Any], generate: Callable[..., torch.Tensor]
) -> None:
    target, tokens = targets[name], generate(name, method)
    assert tokens.shape == (2, target.length) and len(tokens.unique()) > 3
    spec = getattr(target.network, "spec", None)
    if spec is not None and spec.line_end is not None:
        grid = tokens.view(2, *target.grid)
        assert (grid[..., -1] == target.vocab_size - 1).all()
        assert (grid[..., :-1] < target.vocab_size - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
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
    larger, smaller = (
        llamagen_state(24),
        {name: tensor * 0.9 for name, tensor in llamagen_state(24).items()},
    )
    torch.save({"model": larger}, tmp_path / "c2i_3B_384.pt")
    torch.save({"model": smaller}, tmp_path / "c2i_L_384.pt")
    sizes = next(
        option
        for option in options["llamagen_classes"]
        if option.startswith("+model.network.config=")
    ).partition("=")[2]
    tiny = [
        f"{sign}model.{part}network.config{value}"
        for part in ("", "independent.")
        for sign, value in (("~", ""), ("+", f"={sizes}"))
    ]
    rest = [vq_option(24), "model.tokenizer_weights=random", "model.text_encoder.classes=10"]
    choose = ["model=llamagen_3b_c2i", "method=independent", "depth=3", *tiny, *rest]

    def rounds(*more: str) -> Any:
        cfg = composed(*choose, f"weights={tmp_path}", *more)
        target: Any = build_target(cfg)
        return decode(
            target, build_drafter(cfg, target), Exact(), RandomStreams(0, ["3", "7"]), ["3", "7"]
        ).trace.rounds

    assert rounds(f"model.independent.network.weights={tmp_path / 'c2i_3B_384.pt'}").tolist() == [
        4,
        4,
    ]  # 16 tokens, 3 drafted and 1 more
    assert 4 < rounds().sum() / 2 < 16
    (tmp_path / "c2i_L_384.pt").unlink()
    with pytest.raises(TemperaError, match=r"holds no c2i_L_384.pt: .* give .*weights=DIR"):
        rounds()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lumina", "emu3", "janus"])
def test_a_model_of_a_shared_vocabulary_drafts_for_another(
    name: str, options: dict[str, list[str]], targets: dict[str, Any]
) -> None:
    """Named in a YAML file of one's own; here it is the target, so every draft is accepted."""
    made_by = "tempera.targets.shared_vocabulary.prompted_target"
    parts = "network:${model.network},text_encoder:${model.text_encoder}"
    parts += f",target:{{_target_:{made_by},_partial_:true}}"
    smaller = f"+model.independent={{_target_:tempera.drafters.independent.SmallerModel,{parts}}}"
    cfg = composed(*options[name], smaller, "method=independent", "depth=3")
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    drafter: Any = build_drafter(cfg, target)
    output = decode(target, drafter, Exact(), RandomStreams(0, prompts), prompts)
    assert output.trace.rounds.tolist() == [-(-target.length // 4)] * 2


@pytest.mark.slow
def test_a_model_without_a_smaller_one_is_refused(targets: dict[str, Any]) -> None:
    cfg = composed("model=lumina", "method=independent")
    with pytest.raises(
        TemperaError,
        match="^this model names no smaller one to draft for it: choose another model or drafter",
    ):
        build_drafter(cfg, targets["lumina"])


@pytest.mark.parametrize("name", slow_but(FAMILIES, "lumina"))
def test_tokens_become_pixels_and_come_back_in_shape(
    name: str,
    targets: dict[str, Any],
    options: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the target's grid, without its weights."""
    monkeypatch.setattr(build, "build_target", None)
    cfg, grid = composed("+encoder=vq", *options[name]), targets[name].grid
    tokenizer: Any = build_tokenizer(cfg)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(tokenizer.vocab_size, (2, *grid), generator=generator)
    with torch.no_grad():
        images = tokenizer.decode_codes(codes)
        again = tokenizer.encode(images)
    assert images.shape == (2, 3, *tokenizer.image_size(grid)) and images.abs().max() <= 1
    assert again.shape == (2, *grid) and tokenizer.vocab_size == targets[name].vocab_size
    encoder = build_encoder(cfg)
    found = encoder.encode([Entry("a.png", "a", "a red ring", Image.new("RGB", (50, 40)))]).codes
    assert encoder.grid == grid and found.shape == (1, grid[0] * grid[1])
    assert found.max() < targets[name].vocab_size


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_belongs_to_its_target(name: str, targets: dict[str, Any]) -> None:
    draft = tiny_eagle(targets[name])
    draft.check(targets[name])
    assert draft.config.hidden_size == DIM
    for other in targets.keys() - {name}:
        with pytest.raises(TemperaError, match=".*(give|train) a draft for this target"):
            draft.check(targets[other])


@pytest.fixture(scope="module")
def drawn(
    options: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Shards of images that every family draws for MS-COCO captions, by train_draft/prepare.py."""
    found = {}
    for name, family in FAMILIES.items():
        directory = found[name] = tmp_path_factory.mktemp("shards")
        captions = [{"image_id": i, "id": i, "caption": family.prompts[i % 2]} for i in range(12)]
        (directory / "captions.json").write_text(json.dumps({"annotations": captions}))
        source = [
            "source=coco",
            f"source.path={directory / 'captions.json'}",
            "encoder=target",
            "batch_size=12",
            "device=cpu",
        ]
        AcceleratorState._reset_state(True)
        made = script("prepare")(
            composed(*options[name], *source, f"directory={directory / 'codes'}", config="prepare")
        )
        assert made == {"count": 12, "broken": 0}
    return found


QUICK = [
    "steps=2",
    "batch_size=2",
    "validate_every=2",
    "holdout=2",
    "decodes=1",
    "depth=2",
    "warmup_steps=0",
    "tracking=none",
    "device=cpu",
]
PRECISIONS = {"float32": ["dtype=float32"], "bf16": ["dtype=bfloat16", "mixed_precision=bf16"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [("llamagen_text", "float32"), *((name, "bf16") for name in FAMILIES)]
)
def test_a_draft_is_trained_and_drafts(
    name: str,
    precision: str,
    options: dict[str, list[str]],
    drawn: dict[str, Path],
    targets: dict[str, Any],
    tmp_path: Path,
) -> None:
    data = [
        "train_data=shards",
        f"train_data.path={drawn[name] / 'codes'}",
        *QUICK,
        *PRECISIONS[precision],
        f"directory={tmp_path}",
    ]
    metrics = script("main")(composed(*options[name], *data, config="train_draft"))
    assert metrics["finished"] and metrics["steps"] == 2 and metrics["best"]["accepted_length"] >= 1
    cfg = composed(
        *options[name],
        "method=eagle",
        f"drafter.path={tmp_path / 'draft'}",
        "depth=2",
        *PRECISIONS[precision][:1],
        "device=cpu",
    )
    target, prompts = build_target(cfg), list(FAMILIES[name].prompts)
    drafter: Any = build_drafter(cfg, target)
    assert decode(target, drafter, Exact(), RandomStreams(0, prompts), prompts).tokens.shape == (
        2,
        targets[name].length,
    )
    trained = EagleModel.from_pretrained(tmp_path / "draft")
    torch.manual_seed(0)
    untrained = EagleModel(trained.config)
    assert all(
        value.dtype == torch.float32 and value.isfinite().all() for value in trained.parameters()
    )
    assert not torch.equal(trained.fc.weight, untrained.fc.weight)
