"""The recipe of the shipped model: all stages run, are built once and work together, and a stage
that is stopped ends with the same weights.
"""

import math
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from random_drafts import new_sequences
from safetensors.torch import load_file
from shapes_recipe import kl, mar, mar_draft, recipe, stage, target
from shapes_recipe.evaluators import EvaluatorTraining
from shapes_recipe.recipe import STAGES, DraftTraining, Recipe, build
from shapes_recipe.stage import is_built, minimise, muon
from shapes_recipe.target import TargetTraining
from tiny_targets import composed

from tempera.config.instantiate import instantiate
from tempera.config.parts import Parts
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import records
from tempera.image_tokenizers.vq import VQConfig
from tempera.runtime.files import read_json
from tempera.shapes.networks import SHIPPED, TextEncoder, tokenize
from tempera.targets.llamagen import LlamaGenConfig
from tempera.training.averaging import moving_average
from tempera.training.checkpoint import Checkpoints

TINY_VQ = VQConfig(16, 8, 8, (1, 2, 2), (1, 2, 2), 1, 16, norm_groups=4)
TINY_TARGET = LlamaGenConfig(1008, 16, 24, 4, 2, (12, 12), 16, caption_dim=8)
SHORT = {"steps": 2, "batch_size": 2}
TARGET = TargetTraining(**SHORT, part=1, measured=4, bf16=False)
EVALUATOR = EvaluatorTraining(steps=2, batch_size=4, measured=8)
DRAFT = [
    "training.warmup_steps=0",
    "training.batch_size=2",
    "training.holdout=2",
    "training.decodes=0",
]


def short(output: Path) -> Recipe:
    return Recipe(
        output=str(output),
        classifier=EVALUATOR,
        target=TARGET,
        independent=TARGET,
        draft=DraftTraining(2, DRAFT),
        parallel=DraftTraining(2, ["draft=parallel", *DRAFT]),
        medusa=DraftTraining(2, ["draft=medusa", *DRAFT]),
        dflash=DraftTraining(2, ["draft=dflash", *DRAFT]),
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
@pytest.mark.parametrize("method", ["eagle", "parallel", "medusa", "dflash"])
def test_drafts_are_of_the_target_beside_them(method: str, output: Path) -> None:
    cfg = composed(f"method={method}", "depth=2", "tree=chain", f"weights={output}", "device=cpu")
    network = Parts.of(cfg).target()
    drafter = Parts.of(cfg).drafter(network)
    with torch.no_grad():
        images = new_sequences(1, network.length, drafter.depth)
        network.begin(["a red ring"], drafter.nodes)
        drafter.begin(["a red ring"], images, torch.empty(1, 0), None)
        draft = drafter.propose(images, torch.rand(1, drafter.uniforms))
        assert draft.q.shape == (1, 2, 1008)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar steps=2", "cspd gamma=3", "cspd_exact gamma=2"])
def test_the_mar_generates_through_the_configuration(method: str, output: Path) -> None:
    options = (
        f"method={method} denoising_steps=3 data=shape_classes data.limit=3 device=cpu".split()
    )
    cfg = composed("model=shapes_mar", f"weights={output}", *options)
    network = Parts.of(cfg).target()
    parts = {"target": network, "method": Parts.of(cfg).method(network, Parts.of(cfg).rule())}
    decoder = Parts.of(cfg).tokenizer()
    pipeline = instantiate(cfg.pipeline, **parts, image_decoder=decoder, device=network.device)
    prompts = instantiate(cfg.data)
    rows = [row for done in pipeline.decoded(prompts, 3) for row in records(done)]
    kept = torch.tensor([row["tokens"] for row in rows])  # what a run keeps
    assert pipeline.pictures(kept).shape == (3, 3, 48, 48)
    assert len(rows[0]["depth"]) == 4


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

    save = Checkpoints.save

    def save_and_stop(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    whole = train("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", save_and_stop)
        train("cut")
    again = train("cut").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_batches_are_those_of_their_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any step on, and without a draw of the training's random numbers; two processes make
    those of a GPU.
    """
    monkeypatch.setattr(stage, "device", lambda: torch.device(kind))
    monkeypatch.setattr(stage.os, "cpu_count", lambda: 3)
    ahead = stage.Ahead(partial(torch.full, (2,)), 9)
    before = torch.get_rng_state()
    assert [ahead.batch(step).tolist() for step in range(4, 9)] == [[n, n] for n in range(4, 9)]
    assert torch.get_rng_state().equal(before)


def test_a_moving_average_follows_fast_at_first_then_by_its_decay() -> None:
    network = torch.nn.Linear(1, 1, bias=False)
    average, expected = moving_average(network, 0.5), 0.0
    for step in range(12):
        network.weight.data.fill_(float(step))
        average.update_parameters(network)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert average.module.weight.item() == pytest.approx(expected)


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


def test_the_script_reads_options_and_tells_a_wrong_stage_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*options: str) -> None:
        script = str(ROOT / "train_draft" / "build_shapes.py")
        monkeypatch.setattr(sys, "argv", [script, *options, f"output={tmp_path}"])
        runpy.run_path(script, run_name="__main__")

    with pytest.raises(SystemExit, match=r"error: stages= has no stage nothing; choose among cla"):
        run("stages=[nothing]")
    with pytest.raises(TemperaError, match="there is no directory"):
        build(Recipe(stages=["mar"], output=str(tmp_path)))
    read: list[Recipe] = []
    monkeypatch.setattr(recipe, "build", read.append)
    run("stages=[mar]", "mar.further=[{steps:7,size:small}]", "clip.lr=0.5", "target.pairs=0")
    changed = {"clip": replace(Recipe().clip, lr=0.5), "target": replace(TargetTraining(), pairs=0)}
    further = mar.MARTraining(further=[mar.Cycle(7, "small")])
    assert read == [Recipe(["mar"], str(tmp_path), mar=further, **changed)]


def test_shipped_weights_are_small_float16_and_record_the_recipe_s_settings() -> None:
    paths = sorted(SHIPPED.rglob("*.safetensors"))
    kinds = {value.dtype for path in paths for value in load_file(path).values()}
    assert len(paths) == 13 and kinds <= {torch.float16, torch.int64}
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 40e6
    others = {name for name in STAGES if not is_built(SHIPPED / name, getattr(Recipe(), name))}
    assert others == {"target", "kl_decoder"}  # weights/README.md says why
