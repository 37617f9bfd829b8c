"""Training of the shipped model's networks: each stage runs, learns, records itself; the target's
training continues exactly.
"""

import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from paths import ROOT

from tempera.config.build import build_drafter, build_target
from tempera.config.instantiate import instantiate
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.build import stages
from tempera.shapes.build.evaluators import contrastive_loss, new_clip
from tempera.shapes.build.target import TargetTraining, train_target
from tempera.shapes.build.tokenizer import (
    EmaCodebook,
    TokenizerTraining,
    images_of,
    train_tokenizer,
)
from tempera.shapes.networks import (
    SHIPPED,
    TextEncoder,
    load_target_network,
    load_text_encoder,
    load_tokenizer,
    tokenize,
)
from tempera.shapes.world import World
from tempera.targets.llamagen import LlamaGenConfig

TINY_VQ = VQConfig(16, 8, 8, (1, 2, 2), (1, 2, 2), 1, 16, norm_groups=4)
TINY_TARGET = LlamaGenConfig(16, 16, 24, 2, 2, (16, 16), 16, caption_dim=8)
STEPS = TargetTraining(steps=4, batch_size=2, save_every=2, compile=False)


def no_report(values: dict[str, float], step: int) -> None:
    assert all(value == value for value in values.values()), f"NaN at step {step}"


@pytest.mark.slow
def test_the_tokenizer_learns_and_its_codebook_follows_the_encodings() -> None:
    settings = TokenizerTraining(steps=12, warmup_steps=6, batch_size=4)
    seen: list[float] = []
    model, metrics = train_tokenizer(
        settings, TINY_VQ, lambda values, step: seen.append(values["psnr"])
    )
    assert metrics["psnr"] > seen[0] and metrics["codes_used"] > 4
    assert torch.allclose(model.quantize.embedding.weight.norm(dim=-1), torch.ones(16), atol=1e-5)


def test_k_means_finds_separate_clusters_and_dead_codes_restart() -> None:
    model = VQModel(TINY_VQ)
    centres = F.normalize(torch.eye(8)[:4] + 0.01, dim=-1)
    vectors = F.normalize(centres.repeat(64, 1) + 0.01 * torch.randn(256, 8), dim=-1)
    codebook = EmaCodebook(model, 0.9, 0.05, torch.Generator().manual_seed(0))
    codebook.fit(vectors)
    assert (vectors @ model.quantize.codebook.T).amax(-1).min() > 0.99
    model.quantize.embedding.weight.data[3] = -centres[0]
    codebook.sums[3], codebook.counts[3] = -centres[0], 0.0
    codebook.update(vectors, model.quantize.nearest(vectors))
    assert (model.quantize.codebook[3] @ centres.T).max() > 0.9  # restarted at an encoding


@pytest.mark.slow
def test_an_interrupted_target_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = VQModel(TINY_VQ).eval()
    whole, _ = train_target(STEPS, tokenizer, tmp_path / "whole", TINY_TARGET, no_report)

    class Stop(Exception):
        pass

    def saved_and_stopped(state: object, path: object) -> None:
        torch.serialization.save(state, path)
        os.replace(path, tmp_path / "cut" / "checkpoint.pt")  # type: ignore[arg-type]
        raise Stop

    with pytest.raises(Stop), monkeypatch.context() as patch:
        patch.setattr(torch, "save", saved_and_stopped)
        train_target(STEPS, tokenizer, tmp_path / "cut", TINY_TARGET, no_report)
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 2
    resumed, _ = train_target(STEPS, tokenizer, tmp_path / "cut", TINY_TARGET, no_report)
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_a_stage_writes_weights_that_load_and_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tempera.shapes.build.stages.train_tokenizer",
        lambda settings, report: (VQModel(TINY_VQ), {"psnr": 1.0}),
    )
    stages.build_tokenizer(tmp_path, TokenizerTraining(steps=1), no_report)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

    def short(
        settings: TargetTraining, vq: VQModel, directory: Path, report: stages.LogMetrics
    ) -> object:
        return train_target(settings, vq, directory, TINY_TARGET, report)

    monkeypatch.setattr("tempera.shapes.build.stages.train_target", short)
    stages.build_target(tmp_path, STEPS, no_report)
    network, text = (
        load_target_network(tmp_path / "target"),
        load_text_encoder(tmp_path / "text_encoder"),
    )
    assert network.config == TINY_TARGET and text.length == 16 and tokenizer.config == TINY_VQ
    assert json.loads((tmp_path / "target" / "training.json").read_text())["settings"]["seed"] == 0
    stages.write_readme(tmp_path)
    assert "| tokenizer |" in (tmp_path / "README.md").read_text()


def test_words_stand_at_the_end_and_unknown_ones_share_an_id() -> None:
    ids = tokenize(["a red star", "an astronaut", "a " * 40], 6)
    assert ids[0].tolist()[:3] == [0, 0, 0] and ids[0, 3:].min() > 1
    assert ids[1, -1] == 1 and (ids[2] == ids[0, 3]).all()


def test_padding_does_not_change_a_caption_s_features() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder(8, 16).eval()
    features, keep = encoder.encode(["a red star", "a small red star above a blue ring"])
    alone, _ = encoder.encode(["a red star"])
    assert torch.allclose(features[0], alone[0], atol=1e-6)
    assert keep.sum(-1).tolist() == [3, 8] and features[0, :5].abs().max() == 0


@pytest.mark.slow
def test_the_contrastive_loss_prefers_matching_pairs() -> None:
    torch.manual_seed(0)
    model, words = new_clip()
    samples = World(0).batch(0, 8)
    images = images_of(World(0), 0, 8)
    texts = words([sample.scene.caption for sample in samples])
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(6):
        loss = contrastive_loss(model, images, texts)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


Command = Callable[..., tuple[object, str]]
SCRIPT = ROOT / "train_draft" / "build_shapes.py"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run train_draft/build_shapes.py on a command line -> exit status and errors."""

    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(
            sys,
            "argv",
            [str(SCRIPT), "hydra/job_logging=none", "hydra/hydra_logging=none", *arguments],
        )
        status: object = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        return status, capfd.readouterr().err

    return run


@pytest.mark.slow
def test_the_half_size_target_is_built_beside_a_tokenizer_and_drafts(
    tmp_path: Path, build: Command
) -> None:
    shutil.copytree(SHIPPED / "tokenizer", tmp_path / "tokenizer")
    short = [
        "independent.steps=2",
        "independent.batch_size=2",
        "independent.compile=false",
        "independent.save_every=1",
    ]
    status, err = build("stages=[independent]", f"output={tmp_path}", *short)
    assert status == 0, err
    written = {
        str(path.relative_to(tmp_path / "independent"))
        for path in (tmp_path / "independent").rglob("*.*")
    }
    network, encoder = (
        {"config.json", "model.safetensors"},
        {"text_encoder/config.json", "text_encoder/model.safetensors"},
    )
    assert written == network | encoder | {"training.json"}
    assert sum(path.stat().st_size for path in (tmp_path / "independent").rglob("*")) < 1.5e6
    with initialize_config_dir(str(SCRIPT.parent.parent / "conf"), version_base="1.3"):
        smaller = f"model.independent.directory={tmp_path / 'independent'}"
        cfg = compose("eval", ["method=independent", "depth=2", smaller])
    target = build_target(cfg)
    drafter = build_drafter(cfg, target)
    with torch.no_grad():
        target.begin(["a red ring"], drafter.nodes)
        drafter.begin(["a red ring"])
        draft = drafter.propose(torch.rand(1, drafter.uniforms))
    assert draft.q.shape == (1, 2, 1024) and torch.isfinite(draft.q).all()


STAGES = ["tokenizer", "target", "independent", "classifier", "clip", "mar"]
DEPARTURES = {"independent": {"steps": 1500}, "clip": {"batch_size": 128, "lr": 1e-3}}


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_of_a_stage_is_an_option_with_its_default(stage: str) -> None:
    with initialize_config_dir(str(SCRIPT.parent.parent / "conf"), version_base="1.3"):
        cfg = compose("build_shapes")
    assert list(cfg.stages) == STAGES
    settings = {name: value for name, value in cfg[stage].items() if name != "_target_"}
    defaults = asdict(instantiate(OmegaConf.create({"_target_": cfg[stage]["_target_"]})))
    assert settings == defaults | DEPARTURES.get(stage, {})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("stages=[nothing]", f"stages=['nothing'] are unknown; choose among {', '.join(STAGES)}"),
        (
            "stages=[target] target.steps=abc",
            "`target.steps=abc` is not possible; it must be a whole number",
        ),
        (
            "stages=[target] target.stepz=5",
            "there is no option `target.stepz`: did you mean `target.steps`?",
        ),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(
    arguments: str, told: str, tmp_path: Path, build: Command
) -> None:
    assert build(*arguments.split(), f"output={tmp_path}") == (1, f"error: {told}\n")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_steps_of_every_stage_can_be_chosen(stage: str) -> None:
    with initialize_config_dir(str(SCRIPT.parent.parent / "conf"), version_base="1.3"):
        cfg = compose("build_shapes", [f"{stage}.steps=5000"])
    assert instantiate(cfg[stage]).steps == 5000
