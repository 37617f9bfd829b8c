"""Every published family, tiny, in its official layout: loads through conf/, scores as a float64 computation, decodes, drafts."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import reference_transformer as reference
import torch
from test_adapter import check_rounds
from test_llamagen import reference_logits
from tiny_networks import TREE, random_draft, tiny_eagle
from tiny_targets import CONF, DIM, FAMILIES, HEADS, LAYERS, composed, huggingface_state, llamagen_state, meta_state

from tempera.acceptance import Exact
from tempera.config import build_drafter, build_rule, build_target, build_tokenizer
from tempera.decode import decode
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.streams import Streams
from tempera.targets.emu3 import NEGATIVE, POSITIVE
from tempera.targets.spec import FORBIDDEN
from tempera.trees import Tree


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command-line options of every tiny family."""
    return {name: family.write(tmp_path_factory.mktemp(name)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def targets(options: dict[str, list[str]]) -> dict[str, Any]:
    """Every tiny family, loaded as the scripts load it."""
    return {name: build_target(composed(*choices)) for name, choices in options.items()}


def bytes_of(text: str) -> list[int]:
    return [10 + byte for byte in text.encode()]


HF_ROLES = {"q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight",
            "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
            "attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}  # fmt: skip
HF_NORMS = {"q_norm": "self_attn.q_norm.weight", "q_bias": "self_attn.q_norm.bias", "k_norm": "self_attn.k_norm.weight",
            "k_bias": "self_attn.k_norm.bias"}  # fmt: skip
META_ROLES = {**{part: f"attention.w{part}.weight" for part in "qkvo"}, "gate": "feed_forward.w1.weight", "up": "feed_forward.w3.weight",
              "down": "feed_forward.w2.weight", "attention_norm": "attention_norm.weight", "mlp_norm": "ffn_norm.weight",
              "q_norm": "attention.q_normalization.weight", "q_bias": "attention.q_normalization.bias",
              "k_norm": "attention.k_normalization.weight", "k_bias": "attention.k_normalization.bias"}  # fmt: skip


def lumina_logits(ids: list[int]) -> torch.Tensor:
    w = huggingface_state(8832, norms=True)
    layers = [{role: w[f"model.layers.{i}.{name}"] for role, name in (HF_ROLES | HF_NORMS).items()} for i in range(LAYERS)]
    top = w["model.embed_tokens.weight"], layers, w["model.norm.weight"], w["lm_head.weight"]
    return reference.logits(ids, *top, (HEADS, HEADS), 10000.0, reference.half_split)


def anole_logits(ids: list[int]) -> torch.Tensor:
    w = meta_state(8832)
    layers = [{role: w[f"layers.{i}.{name}"] for role, name in META_ROLES.items()} for i in range(LAYERS)]
    top = w["tok_embeddings.weight"], layers, w["norm.weight"], w["output.weight"]
    return reference.logits(ids, *top, (HEADS, HEADS), 10000.0, reference.interleaved)


def emu3_logits(ids: list[int]) -> torch.Tensor:
    w = huggingface_state(184622, kv=1)
    layers = [{role: w[f"model.layers.{i}.{name}"] for role, name in HF_ROLES.items()} for i in range(LAYERS)]
    top = w["model.embed_tokens.weight"], layers, w["model.norm.weight"], w["lm_head.weight"]
    return reference.logits(ids, *top, (HEADS, 1), 1e6, reference.half_split)


LUMINA_TEXT = "Generate an image of 64x64 according to the following prompt:\n"
PROMPTED = {
    "lumina": (
        lumina_logits,
        lambda text: [0, *bytes_of(LUMINA_TEXT + text), 8710, 8197, 8806, 8806],
        [8197, 8806, 8806],
        [*range(4, 8196), 8803],
    ),
    "anole": (anole_logits, lambda text: [0, *bytes_of(text), 8710, 8197], [0, 8197], [*range(4, 8196)]),
    "emu3": (
        emu3_logits,
        lambda text: [151849, *bytes_of(text + POSITIVE), 151852, *bytes_of("4*4"), 151851],
        [151849, *bytes_of(NEGATIVE), 151852, *bytes_of("4*4"), 151851],
        [*range(151854, 184622), 151846],
    ),
}


@pytest.mark.parametrize("name", PROMPTED)
def test_logits_and_guidance_equal_a_float64_computation(name: str, targets: dict[str, Any]) -> None:
    """The whole way: prompt format, left padding, the unconditional row's own prompt, the loader's permutations, token ids, guidance."""
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    compute, format_prompt, null, ids = PROMPTED[name]
    draft = random_draft(Tree.chain(3), 2, torch.Generator().manual_seed(1), len(ids))
    target.begin(prompts, 3)
    scores = target.score(draft)
    got = target.lm_logits(scores.hidden).double()
    wanted = []
    for row in range(4):
        before = format_prompt(prompts[row]) if row < 2 else null
        drawn = [ids[token] for token in draft.tokens[row % 2].tolist()]
        wanted.append(compute([*before, *drawn])[-4:, ids[: target.network.spec.codes]])
    codes = target.network.spec.codes
    assert (got[..., :codes] - torch.stack(wanted)).abs().max() < 1e-5
    assert (got[..., codes:] < FORBIDDEN / 2).all()
    conditional, unconditional = torch.stack(wanted).chunk(2)
    logits = unconditional + target.sampling.guidance * (conditional - unconditional)
    logits = logits.masked_fill(logits < logits.topk(target.sampling.top_k).values[..., -1:], -torch.inf)
    assert (scores.p[..., :codes] - logits.softmax(-1)).abs().max() < 1e-5
    assert (scores.p[..., codes:] == 0).all()


def test_llamagen_equals_a_float64_computation(targets: dict[str, Any]) -> None:
    target, prompts = targets["llamagen_text"], ["a cat", "a dog"]
    features, _ = target.conditioner(prompts)
    state = llamagen_state(24, caption=8)
    codes = torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(0))
    _, hidden, _ = target.network(features, torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, dtype=torch.bool), codes)
    wanted = reference_logits(state, features, torch.ones(2, 6, dtype=torch.bool), codes, grid=(4, 4))
    assert (target.lm_logits(hidden) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_tree_scoring_equals_full_scoring(name: str, targets: dict[str, Any]) -> None:
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    with torch.no_grad():
        target.begin(prompts, TREE.nodes)
        check_rounds(target, prompts, lambda: TREE, torch.Generator().manual_seed(2), target._forced)


CHAIN, WINDOW = ("tree=chain", "depth=3", "drafter.path=draft"), ("window=6",)
METHODS = {
    "ar": (),
    **dict.fromkeys(("eagle", "coolsd", "uniform_rsd"), CHAIN),
    **dict.fromkeys(("jacobi", "sjd", "scd"), WINDOW),
    "sjd_pac": ("window=12", "branches=2"),
    "eagle2": ("nodes=6", "branches=2", "depth=3", "drafter.path=draft"),
}


@pytest.fixture(scope="module")
def methods() -> dict[str, Any]:
    """The methods' own options, which no model changes."""
    return {method: composed(f"method={method}", *choices) for method, choices in METHODS.items()}


def decoded(target: Any, drafter: Any, rule: Any, prompts: list[str]) -> torch.Tensor:
    return decode(target, drafter, rule, Streams(0, prompts), prompts).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_paints(
    name: str, targets: dict[str, Any], methods: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = targets[name], list(FAMILIES[name].prompts)
    eagle = tiny_eagle(target)
    eagle.save_pretrained(tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    painted = {"tree": decoded(target, StaticTreeDrafter(EagleDraft(eagle, target), TREE), Exact(), prompts)}
    for method, cfg in methods.items():
        drafter = build_drafter(cfg, target)
        painted[method] = decoded(target, drafter, build_rule(cfg, drafter.depth), prompts)
    lines = getattr(target.network, "spec", None) is not None and target.network.spec.line_end is not None
    for tokens in painted.values():
        assert tokens.shape == (2, target.length)
        grid = tokens.view(2, *target.grid)
        if lines:
            assert (grid[..., -1] == target.vocab_size - 1).all()
            assert (grid[..., :-1] < target.vocab_size - 1).all()
    assert len(painted["ar"].unique()) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_become_pixels_and_come_back_in_shape(name: str, targets: dict[str, Any], options: dict[str, list[str]]) -> None:
    tokenizer: Any = build_tokenizer(composed(*options[name]))
    grid = targets[name].grid
    height, width = tokenizer.image_size(grid)
    codes = torch.randint(tokenizer.vocab_size, (2, *grid), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = tokenizer.decode_codes(codes)
        again = tokenizer.encode(images)
    assert images.shape == (2, 3, height, width) and images.abs().max() <= 1
    assert again.shape == (2, *grid) and tokenizer.vocab_size == targets[name].vocab_size


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_belongs_to_its_target(name: str, targets: dict[str, Any]) -> None:
    draft = tiny_eagle(targets[name])
    draft.check(targets[name])
    assert draft.config.hidden_size == DIM
    other = targets["anole" if name != "anole" else "lumina"]
    with pytest.raises(TemperaError, match="give a draft for this target|was trained for"):
        draft.check(other)


def test_train_draft_builds_for_it(options: dict[str, list[str]], tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_draft_main", CONF.parent / "train_draft" / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = ["steps=1", "batch_size=2", "validate_every=1", "holdout=2", "decodes=1", "depth=2", "tracking=none", "device=cpu"]
    metrics = module.main(composed(*options["lumina"], *small, f"directory={tmp_path}", config="train_draft"))
    assert metrics["finished"] and (tmp_path / "draft" / "model.safetensors").is_file()


def test_a_saved_draft_is_read_again(targets: dict[str, Any], tmp_path: Path) -> None:
    for name in ("lumina", "emu3"):
        draft = tiny_eagle(targets[name])
        draft.save_pretrained(tmp_path / name)
        again = type(draft).from_pretrained(tmp_path / name)
        again.check(targets[name])
        assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
