"""The recipe of the shipped model: all stages run, are built once and work together, and a stage
that is stopped ends with the same weights.
"""

import math
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from paths import CONF, ROOT
from safetensors.torch import load_file
from shapes_recipe import kl, mar, mar_draft, recipe, stage, target, tokenizer
from shapes_recipe.evaluators import TINY_CLIP, EvaluatorTraining, contrastive_loss
from shapes_recipe.recipe import STAGES, DraftTraining, Recipe, build
from shapes_recipe.stage import is_built, minimise, muon
from shapes_recipe.target import TargetModel, TargetTraining, encode_scenes, losses_in_parts
from shapes_recipe.tokenizer import EmaCodebook, TokenizerTraining, train_tokenizer

from tempera.config.build import build_drafter, build_method, build_target, build_tokenizer
from tempera.config.instantiate import instantiate
from tempera.continuous.mar import MAR
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import records
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.files import read_json
from tempera.runtime.torchvision import import_open_clip
from tempera.shapes.clip import world_tokenizer
from tempera.shapes.networks import SHIPPED, TextEncoder, tokenize
from tempera.shapes.world import World
from tempera.targets.llamagen import LlamaGenConfig
from tempera.training.averaging import moving_average

TINY_VQ = VQConfig(16, 8, 8, (1, 2, 2), (1, 2, 2), 1, 16, norm_groups=4)
TINY_TARGET = LlamaGenConfig(16, 16, 24, 3, 2, (12, 12), 16, caption_dim=8)
SHORT = {"steps": 2, "batch_size": 2}
TARGET = TargetTraining(**SHORT, scenes=4, part=1, measured=4, bf16=False)
EVALUATOR = EvaluatorTraining(steps=2, batch_size=4, measured=8)
DRAFT = ["warmup_steps=0", "batch_size=2", "holdout=2", "decodes=0"]


def short(output: Path) -> Recipe:
    return Recipe(
        output=str(output),
        tokenizer=TokenizerTraining(**SHORT, free_steps=1),
        classifier=EVALUATOR,
        target=TARGET,
        independent=TARGET,
        draft=DraftTraining(2, DRAFT),
        parallel=DraftTraining(2, ["draft=parallel", *DRAFT]),
        clip=EVALUATOR,
        kl_decoder=kl.KLTraining(**SHORT, decoder_steps=1),
        mar=mar.MARTraining(**SHORT, scenes=5, measured=4, further=[mar.Cycle(1, save_every=1)]),
        mar_draft=mar_draft.MARDistillation(**SHORT, scenes=5, measured=4),
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages with tiny networks, the MAR's on images of 2×2 tokens."""
    directory = tmp_path_factory.mktemp("recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "TINY_VQ", TINY_VQ)
        patch.setattr(target, "TINY_TARGET", TINY_TARGET)
        patch.setattr(target, "HALF_TARGET", TINY_TARGET)
        networks = replace(TINY_VQ, z_channels=4)
        patch.setattr(kl, "TINY_KL", replace(kl.TINY_KL, networks=networks, patch=6))
        for module, name, depth in ((mar, "TINY_MAR", 2), (mar_draft, "TINY_DRAFT", 1)):
            sizes = {"width": 16, "heads": 2, "head_width": 16, "head_depth": 1, "patch": 6}
            small = replace(getattr(module, name), grid=(2, 2), depth=depth, **sizes)
            patch.setattr(module, name, small)
        build(short(directory))
    return directory


def composed(*options: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("eval", [*options, "device=cpu"])


@pytest.mark.slow
def test_stages_are_built_once_and_record_what_made_them(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STAGES:
        record = read_json(output / name / "training.json")
        assert record["settings"]["seed"] is not None and record["seconds"] >= 0, name
        assert record["metrics"] and all(map(math.isfinite, record["metrics"].values())), name
        weights = list((output / name).glob("*model.safetensors"))
        kinds = {value.dtype for path in weights for value in load_file(path).values()}
        assert torch.float16 in kinds and kinds <= {torch.float16, torch.int64}, name
    made = []
    for name in STAGES:
        monkeypatch.setitem(STAGES, name, lambda *_, name=name: made.append(name) or {})
    build(short(output))
    assert made == []
    again = replace(short(output), clip=replace(EVALUATOR, lr=1.0))
    assert not is_built(output / "clip", again.clip) and not is_built(output / "no", again.clip)
    build(again)
    assert made == ["clip"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "parallel"])
def test_drafts_are_of_the_target_beside_them(method: str, output: Path) -> None:
    cfg = composed(f"method={method}", "depth=2", "tree=chain", f"weights={output}")
    network = build_target(cfg)
    drafter = build_drafter(cfg, network)
    with torch.no_grad():
        network.begin(["a red ring"], drafter.nodes)
        drafter.begin(["a red ring"])
        assert drafter.propose(torch.rand(1, drafter.uniforms)).q.shape == (1, 2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar steps=2", "cspd_published gamma=3", "cspd_exact gamma=2"])
def test_the_mar_generates_through_the_configuration(method: str, output: Path) -> None:
    options = f"method={method} denoising_steps=3 data=shape_classes limit=3".split()
    cfg = composed("model=shapes_mar", f"weights={output}", *options)
    network = build_target(cfg)
    parts = {"target": network, "method": build_method(cfg, network)}
    decoder = build_tokenizer(cfg)
    pipeline = instantiate(cfg.pipeline, **parts, image_decoder=decoder, device=network.device)
    prompts = instantiate(cfg.data)
    rows = records(prompts, pipeline.tokens(prompts), 1.0)
    kept = torch.tensor([row["tokens"] for row in rows])  # what a run keeps
    assert pipeline.pictures(kept).shape == (3, 3, 48, 48)
    assert len(rows[0]["depth"]) == 4


def test_a_further_cycle_goes_on_from_the_weights_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str | None, int]] = []

    def train(cycle: mar.MARTraining, vq: object, run: Path, network: MAR) -> MAR:
        seen.append((cycle.steps, cycle.size, round(network.class_emb.weight.mean().item())))
        network.class_emb.weight.data += 1.0
        return network

    monkeypatch.setattr(recipe, "read_kl", lambda *_: None)
    monkeypatch.setattr(mar, "train_mar", train)
    monkeypatch.setattr(mar, "measure_mar", lambda network, *_: {"depth": network.config.depth})
    assert recipe.build_mar(tmp_path, mar.MARTraining(), tmp_path) == {"depth": 4}
    assert seen == [(12000, None, 0), (5000, None, 1), (4000, "large", 2)]


def stop_at_the_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]
) -> None:
    save = stage.save_state

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "save_state", save_and_stop)
        train()


def test_an_interrupted_stage_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Muon, a moving average, buffers and random numbers."""
    settings = EvaluatorTraining(steps=4, save_every=2)

    def train(place: str) -> torch.nn.Module:
        torch.manual_seed(7)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))

        def losses(step: int) -> Iterator[dict[str, torch.Tensor]]:
            for _ in range(2):
                yield {"loss": network(torch.randn(2, 3, 4, 4)).square().mean() + step}

        optimisers = [
            muon([network[0].weight], 0.1, 0.1),
            torch.optim.Adam(network[1].parameters()),
        ]
        return minimise(
            network, optimisers, lambda step: 1 / (step + 1), losses, settings, tmp_path / place,
            ema=0.9,
        )  # fmt: skip

    whole = train("whole")
    stop_at_the_first_checkpoint(monkeypatch, lambda: train("cut"))
    again = train("cut").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.state_dict().items())


@pytest.mark.slow
def test_an_interrupted_tokenizer_keeps_its_codebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TokenizerTraining(steps=4, free_steps=1, batch_size=1, save_every=2, bf16=False)
    monkeypatch.setattr(tokenizer, "measure_tokenizer", lambda *_: {})
    whole, _ = train_tokenizer(settings, tmp_path / "whole", TINY_VQ)
    cut = tmp_path / "cut"
    stop_at_the_first_checkpoint(monkeypatch, lambda: train_tokenizer(settings, cut, TINY_VQ))
    again, _ = train_tokenizer(settings, cut, TINY_VQ)
    codes, found = whole.quantize.embedding.weight, again.quantize.embedding.weight
    assert torch.equal(codes, found)
    assert torch.allclose(codes.norm(dim=-1), torch.ones(16), atol=1e-5)


def test_muon_steps_convolutions_as_matrices_in_the_same_memory() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4, 3, 3))
    matrix = torch.nn.Parameter(weight.detach().flatten(1).clone())
    optimiser = muon([weight], 0.1, 0.02)
    reference = torch.optim.Muon(
        [matrix], lr=0.1, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        matrix.grad = weight.grad.flatten(1)
        optimiser.step()
        reference.step()
    assert torch.equal(weight.flatten(1), matrix)


def test_a_moving_average_follows_fast_at_first_then_by_its_decay() -> None:
    network = torch.nn.Linear(1, 1, bias=False)
    average, seen = moving_average(network, 0.5), []
    for step in range(12):
        network.weight.data.fill_(float(step))
        average.update_parameters(network)
        seen.append(average.module.weight.item())
    expected = 0.0
    for step in range(1, 12):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert seen[0] == 0 and seen[-1] == pytest.approx(expected)


def test_k_means_finds_separate_clusters_and_dead_codes_restart() -> None:
    torch.manual_seed(0)
    model = VQModel(TINY_VQ)
    centres = F.normalize(torch.eye(8)[:4] + 0.01, dim=-1)
    vectors = F.normalize(centres.repeat(64, 1) + 0.01 * torch.randn(256, 8), dim=-1)
    codebook = EmaCodebook(model, 0.9, 0.05)
    codebook.fit(vectors)
    assert (vectors @ model.quantize.codebook.T).amax(-1).min() > 0.99
    model.quantize.embedding.weight.data[3] = -centres[0]
    codebook.state["sums"][3], codebook.state["counts"][3] = -centres[0], 0.0
    codebook.update(vectors, model.quantize.nearest(vectors))
    assert (model.quantize.codebook[3] @ centres.T).max() > 0.9  # restarted at an encoding


def test_parts_add_up_to_the_batch_and_shapes_count_more() -> None:
    torch.manual_seed(0)
    model = TargetModel(TINY_TARGET, F.normalize(torch.randn(16, 8), dim=-1))
    scenes = encode_scenes(World(0), 4, VQModel(TINY_VQ).eval(), 16).batch(torch.arange(4))
    drop = torch.tensor([False, True, False, False])
    head = model.network.lm_head.weight

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, head, retain_graph=True)[0]

    expected = model(scenes.words, drop, scenes.codes)[0].flatten()
    heavy = replace(TARGET, object_weight=1e6, onset_weight=1e6, readout=0.0)
    shapes = (scenes.parts > 0).flatten()
    for settings, calm, wanted in (
        (TARGET, True, expected.mean()),
        (heavy, False, expected[shapes].mean()),
    ):
        parts = list(losses_in_parts(model, scenes, drop, settings, calm))
        assert len(parts) == 4
        total = torch.stack([part["loss"] for part in parts]).sum()
        assert torch.allclose(gradient(total), gradient(wanted), atol=1e-5)
        nats = torch.stack([part["nats"] for part in parts]).sum()
        assert torch.allclose(nats, expected.mean())


def test_words_stand_at_the_end_and_padding_does_not_change_features() -> None:
    torch.manual_seed(0)
    ids = tokenize(["a red star", "an astronaut", "a " * 40], 6)
    assert ids[0].tolist()[:3] == [0, 0, 0] and ids[0, 3:].min() > 1
    assert ids[1, -1] == 1 and (ids[2] == ids[0, 3]).all()
    encoder = TextEncoder(8, 16).eval()
    features, keep = encoder.encode(["a red star", "a small red star above a blue ring"])
    alone, _ = encoder.encode(["a red star"])
    assert torch.allclose(features[0], alone[0], atol=1e-6)
    assert keep.sum(-1).tolist() == [3, 8] and features[0, :5].abs().max() == 0


def test_clip_has_a_row_for_every_word_and_the_end_is_the_largest() -> None:
    words = [sample.caption for sample in World(0).batch(0, 50)]
    tokens, ids = (
        make(["astronaut", "A red ring.", *words])
        for make in (import_open_clip().SimpleTokenizer(context_length=32), world_tokenizer())
    )
    assert ids.max() == TINY_CLIP["model_cfg"]["text_cfg"]["vocab_size"] - 1
    assert torch.equal(tokens.argmax(-1), ids.argmax(-1))
    assert ids[0, 1] == 0  # a word of other worlds
    known = tokens[1:].unique()
    assert len(known) == len(ids[1:].unique()) and torch.equal(ids[1:] == 0, tokens[1:] == 0)


def test_the_contrastive_loss_is_that_of_telling_pairs_apart() -> None:
    pairs = torch.eye(4)
    loss = contrastive_loss(lambda images, texts: (images, texts, 3.0), pairs, pairs)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(math.log(1 + 3 * math.exp(-3)))


def test_the_script_reads_options_and_tells_a_wrong_stage_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*options: str) -> None:
        script = str(ROOT / "train_draft" / "build_shapes.py")
        monkeypatch.setattr(sys, "argv", [script, *options, f"output={tmp_path}"])
        runpy.run_path(script, run_name="__main__")

    with pytest.raises(SystemExit, match=r"error: stages= has no stage nothing; choose among tok"):
        run("stages=[nothing]")
    with pytest.raises(TemperaError, match="there is no directory"):
        build(Recipe(stages=["clip"], output=str(tmp_path)))
    read: list[Recipe] = []
    monkeypatch.setattr(recipe, "build", read.append)
    run("stages=[mar]", "mar.further=[{steps:7,size:small}]", "clip.lr=0.5", "target.pairs=0")
    changed = {"clip": replace(Recipe().clip, lr=0.5), "target": replace(TargetTraining(), pairs=0)}
    further = mar.MARTraining(further=[mar.Cycle(7, "small")])
    assert read == [Recipe(["mar"], str(tmp_path), mar=further, **changed)]


def test_shipped_weights_are_small_float16_and_record_the_recipe_s_settings() -> None:
    paths = sorted(SHIPPED.rglob("*.safetensors"))
    kinds = {value.dtype for path in paths for value in load_file(path).values()}
    assert len(paths) == 12 and kinds <= {torch.float16, torch.int64}
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 30e6
    assert all(is_built(SHIPPED / name, getattr(Recipe(), name)) for name in STAGES)
