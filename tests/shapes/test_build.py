"""Training of the shipped model's networks: each stage runs, learns, records itself; the target's
training continues exactly.
"""

import inspect
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from paths import CONF, ROOT
from safetensors import safe_open
from safetensors.torch import load_file

from tempera.config.build import build_drafter, build_target
from tempera.config.instantiate import instantiate
from tempera.data.prompts import Prompt
from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.files import write_json
from tempera.shapes.build import kl, mar, mar_draft, sampling, stages
from tempera.shapes.build.broken import BREAKS, broken_pictures
from tempera.shapes.build.evaluators import (
    EvaluatorTraining,
    contrastive_loss,
    measure_classifier,
    measure_clip,
    new_clip,
    train_classifier,
)
from tempera.shapes.build.record import sha256
from tempera.shapes.build.sampling import WANTED, SamplingChoice, choose_sampling, reading
from tempera.shapes.build.target import (
    TargetModel,
    TargetTraining,
    _gradients,
    encode_scenes,
    kept_scenes,
    measure_target,
    train_target,
)
from tempera.shapes.build.tokenizer import (
    EmaCodebook,
    TokenizerTraining,
    convolution_optimisers,
    images_of,
    step_convolutions,
    train_tokenizer,
)
from tempera.shapes.classifier import ATTRIBUTES, labels
from tempera.shapes.networks import SHIPPED, TextEncoder, tokenize
from tempera.shapes.world import World, parse_caption
from tempera.targets.llamagen import LlamaGenConfig
from tempera.training.checkpoint import LAST, State, save_state

TINY_VQ = VQConfig(16, 8, 8, (1, 2, 2), (1, 2, 2), 1, 16, norm_groups=4)
TINY_TARGET = LlamaGenConfig(16, 16, 24, 3, 2, (12, 12), 16, caption_dim=8)
STEPS = TargetTraining(
    steps=4, scenes=6, batch_size=4, part=2, save_every=2, compile=False, bf16=False
)


def no_report(values: dict[str, float], step: int) -> None:
    assert all(value == value for value in values.values()), f"NaN at step {step}"


@pytest.mark.slow
def test_the_tokenizer_learns_and_its_codebook_follows_the_encodings(tmp_path: Path) -> None:
    settings = TokenizerTraining(steps=12, free_steps=6, batch_size=4, warmup_steps=1)
    seen: list[float] = []
    model, metrics = train_tokenizer(
        settings, tmp_path, TINY_VQ, lambda values, step: seen.append(values["psnr"])
    )
    assert metrics["psnr"] > seen[0] and metrics["codes_used"] > 4
    assert torch.allclose(model.quantize.embedding.weight.norm(dim=-1), torch.ones(16), atol=1e-5)


class Stop(Exception):
    pass


def stopped(monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]) -> None:
    """Run a training until it has written its first checkpoint."""

    def save_and_stop(directory: Path, state: State) -> None:
        save_state(directory, state)
        raise Stop

    with pytest.raises(Stop), monkeypatch.context() as patch:
        patch.setattr("tempera.shapes.build.resumable.save_state", save_and_stop)
        train()


def steps_done(directory: Path) -> int:
    """Of a training that was stopped, as its checkpoint says."""
    with safe_open(directory / LAST, "pt") as file:
        return int(json.loads(file.metadata()["progress"])["step"])


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, mine), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.slow
def test_an_interrupted_tokenizer_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TokenizerTraining(steps=6, free_steps=1, batch_size=2, save_every=3)
    whole, _ = train_tokenizer(settings, tmp_path / "whole", TINY_VQ)
    stopped(monkeypatch, lambda: train_tokenizer(settings, tmp_path / "cut", TINY_VQ))
    assert steps_done(tmp_path / "cut") == 3
    same_weights(whole, train_tokenizer(settings, tmp_path / "cut", TINY_VQ)[0])


@pytest.mark.slow
def test_an_interrupted_evaluator_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect.unwrap(measure_classifier), "__defaults__", (8,))
    settings = EvaluatorTraining(steps=4, batch_size=4, save_every=2)
    tokenizer = VQModel(TINY_VQ).eval()

    def train(directory: str) -> torch.nn.Module:
        return train_classifier(settings, tokenizer, tmp_path / directory)[0]

    whole = train("whole")
    stopped(monkeypatch, lambda: train("cut"))
    assert steps_done(tmp_path / "cut") == 2
    same_weights(whole, train("cut"))


def test_convolutions_are_stepped_as_matrices_in_the_same_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    before = [p.detach().clone() for p in model.parameters()]
    optimisers, matrices = convolution_optimisers(model, list(model.parameters()), 0.0, 0.1)
    model(torch.randn(1, 3, 8, 8)).square().mean().backward()
    step_convolutions(model, matrices, optimisers)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, False]  # the hidden convolution's weight, by Muon
    assert all(p.grad is None for p in model.parameters())


def test_k_means_finds_separate_clusters_and_dead_codes_restart() -> None:
    model = VQModel(TINY_VQ)
    centres = F.normalize(torch.eye(8)[:4] + 0.01, dim=-1)
    vectors = F.normalize(centres.repeat(64, 1) + 0.01 * torch.randn(256, 8), dim=-1)
    codebook = EmaCodebook(model, 0.9, 0.05, seed=0)
    codebook.fit(vectors)
    assert (vectors @ model.quantize.codebook.T).amax(-1).min() > 0.99
    model.quantize.embedding.weight.data[3] = -centres[0]
    codebook.state["sums"][3], codebook.state["counts"][3] = -centres[0], 0.0
    codebook.update(vectors, model.quantize.nearest(vectors))
    assert (model.quantize.codebook[3] @ centres.T).max() > 0.9  # restarted at an encoding


@pytest.mark.slow
def test_an_interrupted_target_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = VQModel(TINY_VQ).eval()

    def train(directory: str) -> TargetModel:
        return train_target(STEPS, tokenizer, tmp_path / directory, TINY_TARGET, no_report)[0]

    whole = train("whole")
    stopped(monkeypatch, lambda: train("cut"))
    assert steps_done(tmp_path / "cut") == 2
    same_weights(whole, train("cut"))


@pytest.fixture
def model() -> TargetModel:
    torch.manual_seed(0)
    made = TargetModel(TINY_TARGET, F.normalize(torch.randn(16, 8), dim=-1))
    for name, parameter in made.network.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def test_the_joined_layers_compute_what_the_network_computes(model: TargetModel) -> None:
    words = tokenize(["a red star", "a small green ring above a white cross"], 16)
    codes, drop = torch.randint(16, (2, 144)), torch.tensor([False, True])
    losses, _ = model(words, drop, codes)
    _, hidden, _ = model.network(*model.text(words), drop, codes)
    logits = model.network.lm_head(hidden[:, 15:])
    expected = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
    assert torch.allclose(losses.flatten(), expected, atol=1e-5)


def test_gradients_in_parts_are_those_of_the_whole(model: TargetModel) -> None:
    tokenizer = VQModel(TINY_VQ).eval()
    scenes = encode_scenes(World(0), 0, 4, tokenizer, 16).batch(torch.arange(4))
    drop = torch.tensor([False, True, False, False])
    _gradients(model, scenes, drop, STEPS, calm=True)
    in_parts = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(scenes.words, drop, scenes.codes)[0].mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(in_parts[name], parameter.grad, atol=1e-6), name


def test_shapes_and_where_they_begin_count_more(model: TargetModel) -> None:
    scenes = encode_scenes(World(0), 0, 4, VQModel(TINY_VQ).eval(), 16).batch(torch.arange(4))
    heavy = replace(STEPS, object_weight=1e6, onset_weight=1e6, readout=0.0)
    _gradients(model, scenes, torch.zeros(4, dtype=torch.bool), heavy, calm=False)
    head = model.network.lm_head.weight
    assert head.grad is not None
    weighted = head.grad.clone()
    model.zero_grad()
    losses, _ = model(scenes.words, torch.zeros(4, dtype=torch.bool), scenes.codes)
    losses[scenes.parts > 0].mean().backward()
    assert torch.allclose(weighted, head.grad, atol=1e-5)


def test_scenes_are_encoded_once_for_a_tokenizer_and_a_world(tmp_path: Path) -> None:
    tokenizer, path = VQModel(TINY_VQ).eval(), tmp_path / "scenes.safetensors"
    first = kept_scenes(STEPS, tokenizer, 16, path)
    assert first.codes.shape == (6, 144) and int(first.parts.max()) == 2
    written = path.stat().st_mtime_ns
    assert torch.equal(kept_scenes(STEPS, tokenizer, 16, path).codes, first.codes)
    assert path.stat().st_mtime_ns == written
    other = kept_scenes(replace(STEPS, seed=1), tokenizer, 16, path)
    assert not torch.equal(other.words, first.words)


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


def test_reading_tells_scenes_of_one_shape_from_scenes_of_two() -> None:
    texts = ["a red ring on a pink background", "a red star above a blue star", "a red star"]
    scenes = [scene for text in texts if (scene := parse_caption(text))]
    truth = [labels(scene) for scene in scenes]

    class Told:
        """Reads what is true, but for the second scene's second shape and the third's colour."""

        def attributes(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = {
                name: F.one_hot(torch.tensor([max(t[name], 0) for t in truth]), len(classes))
                for name, classes in ATTRIBUTES.items()
            }
            logits["shape2"][1] = logits["shape2"][1].roll(1)
            logits["colour1"][2] = logits["colour1"][2].roll(1)
            return logits

    read = reading(Told(), torch.zeros(3, 3, 48, 48), scenes)  # type: ignore[arg-type]
    assert read == pytest.approx(
        {"one_shape": 1, "two_shapes": 0, "colour": 0.75, "background": 1, "relation": 1}
    )


def test_a_picture_is_broken_in_the_one_way_it_should_be() -> None:
    judged = {"wrong_colour": "colour1", "wrong_shape": "shape1", "wrong_background": "background"}
    for kind in BREAKS:
        samples, images = broken_pictures(World(3), kind, 6)
        rng = np.random.default_rng(0)
        for sample, image in zip(samples, images, strict=True):
            true = torch.from_numpy(sample.image).permute(2, 0, 1) * 2 - 1
            assert (image - true).abs().max() > 0.2, (kind, sample.caption)
            broken = BREAKS[kind](sample.scene, rng)
            if kind in judged:
                right, wrong = labels(sample.scene), labels(broken)
                assert {n for n in right if right[n] != wrong[n]} == {judged[kind]}
            elif kind == "missing_shape":
                assert broken.things == sample.scene.things[1:]
            else:
                assert {(t.x, t.y) for t in broken.things} == {
                    (t.x, t.y) for t in sample.scene.things
                }


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


STAGES = [
    "tokenizer",
    "classifier",
    "target",
    "sampling",
    "measured",
    "independent",
    "draft",
    "parallel",
    "clip",
    "kl",
    "kl_decoder",
    "mar",
    "mar_draft",
]
WITHOUT_WEIGHTS = ("sampling", "measured")
DEPARTURES = {
    "independent": {"steps": 1500},
    "draft": {
        "options": (
            "train_data=shapes_mixed",
            "train_data.limit=2048",
            "draft.features=[2,4,5]",
            "mixed_precision=bf16",
        )
    },
    "parallel": {
        "steps": 2400,
        "options": (
            "draft=parallel",
            "train_data=shapes_mixed",
            "train_data.limit=2048",
            "draft.features=[2,4,5]",
            "mixed_precision=bf16",
        ),
    },
    "clip": {"steps": 1500, "batch_size": 128, "lr": 1e-3},
    "mar": {"further": ({"steps": 5000}, {"steps": 4000, "size": "large"})},
}
SHORT = [
    "tokenizer.steps=2 tokenizer.free_steps=1 tokenizer.batch_size=2",
    *(f"{judge}.steps=2 {judge}.batch_size=8" for judge in ("classifier", "clip")),
    *(
        f"{name}.steps=2 {name}.scenes=4 {name}.batch_size=2 {name}.compile=false"
        for name in ("target", "independent")
    ),
    "sampling.prompts=12 sampling.guidance=[1,2] sampling.top_k=[4] sampling.top1=[0,1]",
    "sampling.temperature=[1,2]",
    "measured.prompts=12",
    "draft.steps=2 draft.options=['warmup_steps=0','batch_size=2','holdout=2','decodes=0']",
    "parallel.steps=2 parallel.options=['draft=parallel','warmup_steps=0','batch_size=2',"
    "'holdout=2','decodes=0']",
    "kl.steps=2 kl.batch_size=2 kl_decoder.steps=2 kl_decoder.batch_size=2",
    *(f"{name}.steps=2 {name}.scenes=5 {name}.batch_size=2" for name in ("mar", "mar_draft")),
    "mar.further=[{_target_:tempera.shapes.build.mar.Cycle,steps:2}]",
]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network tiny, and what is measured at the end of a stage measured on little."""
    monkeypatch.setattr(stages, "TINY_TARGET", TINY_TARGET)
    monkeypatch.setattr(stages, "HALF_TARGET", replace(TINY_TARGET, num_hidden_layers=3))
    monkeypatch.setattr(train_tokenizer, "__defaults__", (TINY_VQ, None))
    monkeypatch.setattr(kl, "TINY_KL", replace(kl.TINY_KL, networks=replace(TINY_VQ, z_channels=4)))
    for module, name in ((mar, "TINY_MAR"), (mar_draft, "TINY_DRAFT")):
        small = replace(
            getattr(module, name), width=16, depth=1, heads=2, head_width=16, head_depth=1
        )
        monkeypatch.setattr(module, name, small)
    measures = (mar.measure_mar, mar_draft.measure_draft, measure_classifier, measure_clip)
    for function in (measure_target, *measures):
        inner = inspect.unwrap(function)
        assert inner.__defaults__ is not None and inner.__defaults__[-1] >= 512
        monkeypatch.setattr(inner, "__defaults__", (8,))
    monkeypatch.setattr(stages, "LOOKED_AT", 2)


@pytest.mark.slow
def test_all_stages_are_built_once_by_one_command_and_work_together(
    tmp_path: Path, build: Command, tiny: None
) -> None:
    short = [option for line in SHORT for option in line.split()]
    status, err = build(f"output={tmp_path}", *short)
    assert status == 0, err
    records = {name: json.loads((tmp_path / name / "training.json").read_text()) for name in STAGES}
    for name, record in records.items():
        assert record["seed"] == record["settings"]["seed"] and record["seconds"] > 0, name
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|none", record["commit"]), name
        assert (
            record["command"].startswith("build_shapes.py") and "draft.steps=2" in record["command"]
        )
        assert bool(record["sha256"]) == (name not in WITHOUT_WEIGHTS), name
        assert all(map(math.isfinite, record["metrics"].values())), name
    for method, name in (("eagle", "draft"), ("parallel", "parallel")):
        chosen = [f"method={method}", "depth=2", "tree=chain", f"weights={tmp_path}"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("eval", chosen)
        target = build_target(cfg)
        drafter = build_drafter(cfg, target)
        weights = tmp_path / name / "model.safetensors"
        assert records[name]["sha256"]["model.safetensors"] == sha256(weights)
        assert {value.dtype for value in load_file(weights).values()} == {torch.float16}
        with torch.no_grad():
            target.begin(["a red ring"], drafter.nodes)
            drafter.begin(["a red ring"])
            assert drafter.propose(torch.rand(1, drafter.uniforms)).q.shape == (1, 2, 16)
    assert records["target"]["sha256"]["../text_encoder/model.safetensors"] == sha256(
        tmp_path / "text_encoder" / "model.safetensors"
    )
    before = {
        path: path.stat().st_mtime_ns
        for name in STAGES
        for path in [tmp_path / name / "training.json"]
    }
    (tmp_path / "kl" / "model.safetensors").write_bytes(b"damaged")
    status, err = build(f"output={tmp_path}", *short)
    assert status == 0, err
    made_again = {path.parent.name for path, at in before.items() if path.stat().st_mtime_ns != at}
    assert made_again == {"kl"}
    compared = json.loads((tmp_path / "sampling" / "compared.json").read_text())
    assert [row["guidance"] for row in compared[:2]] == [1, 2]
    assert [row["temperature"] for row in compared] == [1, 1, 2]
    assert "| mar_draft |" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "target_run" / "looks" / "step-000002.png").is_file()


def test_temperatures_are_compared_with_the_best_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scripted:
        def __init__(self, output: Path) -> None: ...

        def read(self, prompts: list[Prompt], option: Sampling) -> dict[str, float]:
            share = 1 - abs(option.guidance - 2) - abs(option.temperature - 0.9)
            return {**dict.fromkeys(WANTED, share), "top1": 0.3}

    monkeypatch.setattr(sampling, "Bundle", Scripted)
    (tmp_path / "sampling").mkdir()
    settings = SamplingChoice(prompts=1, guidance=(1.5, 2.0, 3.0), top_k=(16,))
    best = choose_sampling(tmp_path, settings, lambda *_: None)
    compared = json.loads((tmp_path / "sampling" / "compared.json").read_text())
    assert [(row["guidance"], row["temperature"]) for row in compared] == [
        *((guidance, 1.0) for guidance in (1.5, 2.0, 3.0)),
        *((2.0, temperature) for temperature in (0.9, 1.1)),
    ]
    assert best == compared[3]
    with pytest.raises(TemperaError, match="no option"):
        choose_sampling(tmp_path, replace(settings, temperature=()), lambda *_: None)


@pytest.mark.slow
def test_a_stage_is_built_again_and_its_hashes_compared(
    tmp_path: Path, build: Command, tiny: None
) -> None:
    again = [f"output={tmp_path}", "kl.steps=2", "kl.batch_size=2", "kl.start=false"]
    assert build(*again, "rebuild=kl")[1] == (
        f"error: {tmp_path / 'kl'} holds no record of a stage: build it first.\n"
    )
    assert build(*again, "stages=[kl]") == (0, "")
    record = json.loads((tmp_path / "kl" / "training.json").read_text())
    assert record["command"].startswith("build_shapes.py") and "output=DIR " in record["command"]
    assert str(tmp_path) not in json.dumps(record)
    assert build(*again, "rebuild=kl") == (0, "")
    assert json.loads((tmp_path / "kl" / "training.json").read_text()) == record
    write_json(tmp_path / "kl" / "training.json", record | {"sha256": {"model.safetensors": "0"}})
    status, err = build(*again, "rebuild=kl")
    assert status == 1 and "kl, built again, differs from its record in model.safetensors" in err
    write_json(tmp_path / "kl" / "training.json", record | {"machine": "another"})
    assert build(*again, "rebuild=kl") == (0, "")
    status, err = build(*again, "rebuild=kl", "kl.kl=1")
    assert status == 1 and "was built with other settings (kl): give those that" in err


def test_shipped_records_hold_no_path_of_a_machine() -> None:
    records = sorted(SHIPPED.glob("*/training.json"))
    assert len(records) == len(STAGES)
    for record in records:
        assert not re.search(r"(?<![\w.])/\w", record.read_text(encoding="utf-8")), record


def without_targets(settings: DictConfig) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in settings.items():
        if OmegaConf.is_dict(value):
            plain[str(name)] = without_targets(value)
        elif OmegaConf.is_list(value):
            plain[str(name)] = tuple(
                without_targets(item) if OmegaConf.is_dict(item) else item for item in value
            )
        elif name != "_target_":
            plain[str(name)] = value
    return plain


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_of_a_stage_is_an_option_with_its_default(stage: str) -> None:
    with initialize_config_dir(str(SCRIPT.parent.parent / "conf"), version_base="1.3"):
        cfg = compose("build_shapes")
    assert list(cfg.stages) == STAGES
    settings = without_targets(cfg[stage])
    defaults = asdict(instantiate(OmegaConf.create({"_target_": cfg[stage]["_target_"]})))
    assert settings == defaults | DEPARTURES.get(stage, {})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("rebuild=nothing", f"rebuild= has no stage nothing; choose among {', '.join(STAGES)}"),
        ("stages=[nothing]", f"stages= has no stage nothing; choose among {', '.join(STAGES)}"),
        (
            "stages=[target] target.steps=abc",
            "`target.steps=abc` is not possible: it must be a valid integer, "
            "unable to parse string as an integer",
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
def test_shipped_weights_are_float16() -> None:
    paths = sorted(SHIPPED.rglob("*.safetensors"))
    kinds = {value.dtype for path in paths for value in load_file(path).values()}
    assert len(paths) >= 12 and kinds <= {torch.float16, torch.int64}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in WITHOUT_WEIGHTS])
def test_steps_of_every_stage_can_be_chosen(stage: str) -> None:
    with initialize_config_dir(str(SCRIPT.parent.parent / "conf"), version_base="1.3"):
        cfg = compose("build_shapes", [f"{stage}.steps=5000"])
    assert instantiate(cfg[stage]).steps == 5000
