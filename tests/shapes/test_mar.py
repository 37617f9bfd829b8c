"""The shipped MAR: its classes, two steps of every stage, what is written loads, and eval/run.py
generates with it.
"""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from paths import CONF

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.continuous.diffusion import TRAINING_STEPS, NoiseSchedule
from tempera.continuous.mar import MAR, initialise, read_mar
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Pipeline, records
from tempera.evaluation.run import evaluate
from tempera.image_tokenizers.kl import KLModel, read_kl
from tempera.image_tokenizers.vq import VQModel
from tempera.runtime.files import read_json
from tempera.shapes.build import kl, mar, mar_draft, stages
from tempera.shapes.build.record import is_built
from tempera.shapes.build.single_shapes import images_and_classes, single_shapes
from tempera.shapes.classifier import correct, load_classifier
from tempera.shapes.labels import CLASSES, ShapeLabels, class_of, shape_prompts
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import COLOURS, SHAPES, World, parse_caption, render
from tempera.training.checkpoint import State, save_state

COMMON: dict[str, Any] = {
    "scenes": 5,
    "steps": 2,
    "batch_size": 2,
    "warmup_steps": 1,
    "repeats": 2,
    "save_every": 2,
    "bf16": False,
}
QUICK = mar.MARTraining(**COMMON, further=(mar.Cycle(1, "large", save_every=1),))
QUICK_DRAFT = mar_draft.MARDistillation(**COMMON)
QUICK_DECODER = kl.DecoderTraining(steps=2, batch_size=2, bf16=False)
QUICK_KL = kl.KLTraining(steps=2, batch_size=2, start=False, bf16=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages with images of 2×2 tokens."""
    directory = tmp_path_factory.mktemp("shapes_mar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kl, "TINY_KL", replace(kl.TINY_KL, patch=6))
        for module, name, depth in ((mar, "TINY_MAR", 2), (mar_draft, "TINY_DRAFT", 1)):
            small = replace(getattr(module, name), grid=(2, 2), patch=6, depth=depth)
            patch.setattr(module, name, small)
        stages.build_kl(directory, QUICK_KL, lambda values, step: None)
        stages.build_kl_decoder(directory, QUICK_DECODER, lambda values, step: None)
        stages.build_mar(directory, QUICK, lambda values, step: None)
        stages.build_mar_draft(directory, QUICK_DRAFT, lambda values, step: None)
    return directory


def composed(bundle: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "eval",
            [
                "model=shapes_mar",
                f"weights={bundle}",
                "data=shape_classes",
                "device=cpu",
                "limit=3",
                *overrides,
            ],
        )


def pipeline_of(cfg: DictConfig) -> Pipeline:
    """As eval/run.py builds it."""
    target = build.build_target(cfg)
    parts = {
        "target": target,
        "method": build.build_method(cfg, target),
        "image_decoder": build.build_tokenizer(cfg),
    }
    pipeline: Pipeline = instantiate(cfg.pipeline, **parts, device=torch.device("cpu"))
    return pipeline


def test_classes_are_shapes_in_colours() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 48
    assert [class_of(text) for text in CLASSES] == list(range(48))
    assert class_of("a small red circle on a plain teal background") == class_of("a red circle")
    assert class_of("a red circle above a blue ring") is None
    assert ShapeLabels().encode([prompt.text for prompt in shape_prompts(50, 1)])[0].tolist() == [
        *range(1, 48),
        0,
        1,
        2,
    ]
    assert ShapeLabels().encode(["47", CLASSES[3]])[0].tolist() == [47, 3]
    for number in ("48", "-1", "1.0", "1" * 5000):
        with pytest.raises(TemperaError, match="is no shape"):
            ShapeLabels().check([number])
    with pytest.raises(
        TemperaError, match="prompt 2 of 2, 'a dog', is no shape: give one shape in one colour"
    ):
        ShapeLabels().encode(["a red ring", "a dog"])


def test_scenes_of_one_shape() -> None:
    samples = single_shapes(World(0), 4, 6)
    assert len(samples) == 6 and all(len(sample.scene.things) == 1 for sample in samples)


def test_scenes_on_a_lattice() -> None:
    samples = single_shapes(World(0), 4, 6, 8)
    things = [sample.scene.things[0] for sample in samples]
    assert {(thing.x % 8, thing.y % 8) for thing in things} == {(0, 0)}
    assert len({(thing.x, thing.y) for thing in things}) > 1
    assert samples[2].scene == single_shapes(World(0), 4, 3, 8)[2].scene
    large = single_shapes(World(0), 4, 6, 8, "large")
    assert {sample.scene.things[0].size for sample in large} == {"large"}


def test_the_sizes_fit_into_twelve_megabytes() -> None:
    with torch.device("meta"):
        numbers = sum(
            p.numel()
            for size in (mar.TINY_MAR, mar_draft.TINY_DRAFT)
            for p in MAR(size).parameters()
        )
        numbers += sum(p.numel() for p in KLModel(kl.TINY_KL).parameters())
    assert 2 * numbers < 12e6


def test_the_divergence_is_zero_for_the_true_noise_and_variance() -> None:
    """At t the posterior's own variance is place = −1; a head that gives it and the true noise has
    nothing to learn.
    """
    schedule, t = NoiseSchedule(TRAINING_STEPS), torch.tensor([1, 500, 999])
    noise, x = torch.randn(3, 4), torch.randn(3, 4)
    output = torch.cat([noise, -torch.ones(3, 4)], -1)
    kernel = schedule.kernel(output, x, t)
    assert torch.allclose(
        kernel.std.double().square(),
        mar_posterior(schedule, t).unsqueeze(-1).expand(3, 4),
        rtol=1e-4,
    )


def mar_posterior(schedule: NoiseSchedule, t: torch.Tensor) -> torch.Tensor:
    kept, before = schedule.kept[t], schedule.kept[t - 1]
    return (1 - kept / before) * (1 - before) / (1 - kept)


@pytest.mark.slow
def test_a_fresh_head_predicts_nothing_and_learns() -> None:
    network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1))
    initialise(network)
    tokens, labels, order = torch.randn(4, 4, 16), torch.arange(4), torch.rand(4, 4).argsort()
    optimiser, errors = torch.optim.Adam(network.parameters(), 3e-3), []
    for _ in range(30):
        batch = mar.MaskedBatch(tokens, labels, torch.zeros(4, dtype=torch.bool), 1, order)
        error, divergence = mar.token_losses(network, batch, 8)
        optimiser.zero_grad()
        (error + 0.1 * divergence).backward()
        optimiser.step()
        errors.append(error.item())
    assert errors[0] == pytest.approx(1, abs=0.2) and errors[-1] < 0.8 * errors[0]


def test_noisy_levels_count_more_and_the_weights_have_mean_one() -> None:
    network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1))
    initialise(network)  # its head says 0, so that every squared error is about 1
    tokens, labels, order, drop = (
        torch.randn(64, 4, 16),
        torch.zeros(64).long(),
        torch.rand(64, 4).argsort(),
        torch.zeros(64).bool(),
    )
    plain, weighted = (
        mar.token_losses(network, mar.MaskedBatch(tokens, labels, drop, 0, order), 8, emphasis)[
            0
        ].item()
        for emphasis in (1.0, 10.0)
    )
    assert (
        plain == pytest.approx(1, abs=0.05)
        and weighted == pytest.approx(1, abs=0.15)
        and weighted != plain
    )


def test_tokens_count_by_their_weights() -> None:
    network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens, labels, order, drop = (
        torch.randn(8, 4, 16),
        torch.zeros(8).long(),
        torch.rand(8, 4).argsort(),
        torch.zeros(8).bool(),
    )
    weights = torch.tensor([0.0, 0, 5, 0]).expand(8, -1)
    error, _ = mar.token_losses(
        network, mar.MaskedBatch(tokens, labels, drop, 0, order), 2, 10.0, weights
    )
    error.backward()
    learned = (
        network.diffusion_pos_embed_learned.grad
    )  # of each place in the image, next to the head
    assert learned is not None
    assert learned[0, 2].abs().max() > 0 and learned[0, [0, 1, 3]].abs().max() == 0


@pytest.mark.slow
def test_variances_are_learned_for_the_steps_that_are_taken() -> None:
    """A fresh head says 0: the divergence is then known in closed form, E[noise²] being 1."""
    network, taken = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1)), NoiseSchedule(5, start=900)
    initialise(network)
    tokens, labels, order, drop = (
        torch.randn(64, 4, 16),
        torch.zeros(64).long(),
        torch.rand(64, 4).argsort(),
        torch.zeros(64).bool(),
    )
    _, found = mar.token_losses(
        network, mar.MaskedBatch(tokens, labels, drop, 0, order), 32, taken=taken
    )
    zero, one, stages = torch.zeros(5, 1), torch.ones(5, 1), torch.arange(5)
    mine, true = (
        taken.kernel(torch.cat(output, -1), zero, stages) for output in ((zero, zero), (one, -one))
    )
    ratio = (true.std / mine.std).square()
    expected = 0.5 * (ratio - 1 - ratio.log() + (true.mean / mine.std).square())
    assert found.item() == pytest.approx(expected.mean().item(), rel=0.05)


def test_the_shape_is_where_its_colour_shows() -> None:
    tokenizer = KLModel(kl.TINY_KL).eval()
    latents, samples = (
        mar.encode_scenes(World(0), 5, tokenizer),
        single_shapes(World(0), 0, 5, 8),
    )
    for sample, touched in zip(samples, latents.touched, strict=True):
        thing = sample.scene.things[0]
        other = replace(
            sample.scene,
            things=(replace(thing, colour="white" if thing.colour == "black" else "black"),),
        )
        changed = (
            torch.from_numpy(np.abs(render(other) - sample.image).max(-1) > 0.1)
            .unflatten(0, (6, 8))
            .unflatten(2, (6, 8))
        )
        assert not (changed.transpose(1, 2).flatten(2).any(-1).flatten() & ~touched).any()
        assert 4 <= touched.sum() <= 36


@pytest.mark.slow
def test_classes_of_a_shape_and_of_a_colour_learn_together() -> None:
    gradient = torch.zeros(48, 3)
    gradient[class_of("a red ring")] = torch.tensor([1.0, 2.0, 3.0])
    shared = mar._taught_together(gradient)[:, 0]
    assert shared[class_of("a red ring")] == 3
    assert (
        shared[class_of("a blue ring")] == shared[class_of("a red star")] == 1
        and shared[class_of("a blue star")] == 0
    )
    assert shared.sum() == 1 + 8 + 6


def test_places_of_the_grid_are_told_apart_from_the_start() -> None:
    network = MAR(mar.TINY_MAR)
    initialise(network)
    mar._lay_out(network)
    learned = (
        network.encoder_pos_embed_learned,
        network.decoder_pos_embed_learned,
        network.diffusion_pos_embed_learned,
    )
    for embedding in (parameter.detach() for parameter in learned):
        near, far = (
            torch.cosine_similarity(embedding[0, -36], embedding[0, place], 0)
            for place in (-35, -1)
        )
        assert near > far + 0.2 and embedding[0, -36:].std().item() == pytest.approx(0.6, abs=0.1)
    assert (
        network.decoder_pos_embed_learned[0, :-36].std() < 0.05
    )  # those of the class stay as they were


def stopped(monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]) -> None:
    """Run a training until it has written its first checkpoint."""

    def save_and_stop(directory: Path, state: State) -> None:
        save_state(directory, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tempera.shapes.build.resumable.save_state", save_and_stop)
        train()


@pytest.mark.slow
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KLModel(replace(kl.TINY_KL, patch=6)).eval()
    start = mar.new_mar(replace(mar.TINY_MAR, grid=(2, 2), patch=6, depth=1, head_depth=1), 0)
    settings, scenes = (
        replace(QUICK, save_every=1, steps=3),
        mar.encode_scenes(World(0), 5, tokenizer),
    )

    def train(directory: str) -> torch.nn.Module:
        return mar.train_mar(settings, tokenizer, scenes, tmp_path / directory, start)

    whole = train("whole")
    stopped(monkeypatch, lambda: train("parts"))
    for a, b in zip(whole.parameters(), train("parts").parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_further_cycle_starts_from_the_weights_of_the_one_before(bundle: Path) -> None:
    """With the smallest of rates it leaves them as they are."""
    tokenizer, first = read_kl(bundle / "kl"), read_mar(bundle / "mar_run" / "cycle_1")
    still = replace(QUICK, lr=1e-12, matrix_lr=1e-12)
    scenes = mar.encode_scenes(World(0), 5, tokenizer)
    again = mar.train_mar(still, tokenizer, scenes, bundle / "still", first)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    last = read_mar(bundle / "mar").parameters()
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), last, strict=True))


def test_the_settings_of_a_further_cycle_are_its_own_or_the_first_ones() -> None:
    first, second = mar.MARTraining(further=(mar.Cycle(7, "large"),), emphasis=3.0).cycles
    assert (first.steps, first.size, second.steps, second.size) == (12000, None, 7, "large")
    assert first.emphasis == second.emphasis == 3.0 and second.repeats == 4


def test_a_pruned_network_has_its_targets_first_and_last_blocks() -> None:
    torch.manual_seed(0)
    target = MAR(replace(mar.TINY_MAR, grid=(2, 2), width=16, heads=2, head_width=16))
    draft = mar_draft.pruned(target, replace(target.config, depth=2, head_depth=1))
    mine, theirs = draft.state_dict(), target.state_dict()
    assert target.config.depth == 4 and len(mine) < len(theirs)
    for name, block in (("encoder_blocks.1", 3), ("decoder_blocks.0", 0), ("decoder_blocks.1", 3)):
        kind = name.split(".")[0]
        assert torch.equal(
            mine[f"{name}.attn.qkv.weight"], theirs[f"{kind}.{block}.attn.qkv.weight"]
        )
    same = mar_draft.pruned(target, target.config).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in theirs.items())


@pytest.mark.slow
def test_training_the_decoder_changes_no_latent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = KLModel(kl.TINY_KL).eval()
    images = images_and_classes(single_shapes(World(0), 0, 2))[0]
    before, decoded = model.encode(images), model.decode_codes(model.encode(images))
    after, _ = kl.train_decoder(QUICK_DECODER, tmp_path, model)
    assert torch.equal(after.encode(images), before)
    assert not torch.allclose(after.decode_codes(before), decoded)


@pytest.mark.slow
def test_an_interrupted_kl_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(QUICK_KL, save_every=1)

    def train(directory: str) -> KLModel:
        return kl.train_kl(settings, tmp_path / directory, kl.TINY_KL)[0]

    whole = train("whole")
    stopped(monkeypatch, lambda: train("parts"))
    for a, b in zip(whole.parameters(), train("parts").parameters(), strict=True):
        assert torch.equal(a, b)


def test_scenes_are_encoded_once_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = [KLModel(kl.TINY_KL).eval() for _ in range(2)]
    path, settings = tmp_path / "run", replace(QUICK, scenes=3)
    first = mar.kept_latents(settings, tokenizers[0], path)
    images, classes = images_and_classes(single_shapes(World(0), 0, 3, 8))
    assert torch.equal(first.classes, classes)
    assert torch.allclose(first.moments[:, 0].float(), tokenizers[0].moments(images)[0], atol=1e-2)
    assert not torch.equal(
        first.moments, mar.kept_latents(settings, tokenizers[1], path).moments
    )  # those of another are made anew
    monkeypatch.setattr(mar, "encode_scenes", None)
    assert torch.equal(mar.kept_latents(settings, tokenizers[1], path).classes, classes)


@pytest.mark.slow
def test_what_the_stage_writes_loads(bundle: Path) -> None:
    network, smaller, tokenizer = (load(bundle / name) for load, name in (
        (read_mar, "mar"), (read_mar, "mar_draft"), (read_kl, "kl_decoder")))  # fmt: skip
    assert (
        network.config.grid == smaller.config.grid == (2, 2)
        and network.config.depth > smaller.config.depth
    )
    assert tokenizer.encode(torch.zeros(1, 3, 48, 48)).shape == (1, 2, 2, 144)
    assert {path.parent.name for path in bundle.glob("*/training.json")} == {
        "mar",
        "mar_draft",
        "kl",
        "kl_decoder",
    }
    with pytest.raises(TemperaError, match=r"there is no directory .*nowhere: train a model with"):
        read_mar(bundle / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "ar",
        "ar steps=2",
        "cspd gamma=2 prefill=0",
        "cspd alignment=false",
        "cspd_published gamma=3",
        "cspd_published gamma=2 steps=3 prefill=0.15",
        "cspd_exact gamma=2",
        "cspd_exact gamma=2 coupling=stage",
    ],
)
def test_every_method_generates_through_the_configuration(method: str, bundle: Path) -> None:
    cfg = composed(bundle, *f"method={method} denoising_steps=3".split())
    pipeline = pipeline_of(cfg)
    prompts = instantiate(cfg.data)
    output = pipeline.tokens(prompts)
    rows = records(prompts, output, 1.0)
    assert pipeline.pictures(output.tokens).shape == (3, 3, 48, 48)
    assert pipeline.pictures(torch.tensor([rows[1]["tokens"]])).shape == (
        1,
        3,
        48,
        48,
    )  # from what a run keeps
    assert pipeline.method.is_plain == (method == "ar") and pipeline.method.plain.is_plain
    assert len(rows[0]["depth"]) == 4 and "residual_trials" in rows[0]


@pytest.mark.slow
def test_the_shipped_weights_generate_what_they_are_told() -> None:
    """Every shape and every colour once at least, read by the shipped classifier; by chance it
    would read 1/6 and 1/8 of them.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "eval",
            [
                "model=shapes_mar",
                "method=ar",
                "data=shape_classes",
                "device=cpu",
                "limit=48",
                "denoising_steps=12",
            ],
        )
    pipeline = pipeline_of(cfg)
    prompts = instantiate(cfg.data)[::5]
    pictures = (
        torch.from_numpy(pipeline.pictures(pipeline.tokens(prompts).tokens)).float() / 127.5 - 1
    )
    scenes = [scene for prompt in prompts if (scene := parse_caption(prompt.text))]
    found = correct(load_classifier().attributes(pictures), scenes)
    assert {scene.things[0].shape for scene in scenes} == set(SHAPES) and {
        scene.things[0].colour for scene in scenes
    } == set(COLOURS)
    assert found["colour1"].mean() > 0.9 and found["shape1"].mean() > 0.8
    assert (
        sum(
            path.stat().st_size
            for name in ("kl", "kl_decoder", "mar", "mar_draft")
            for path in (SHIPPED / name).iterdir()
        )
        < 14e6
    )


@pytest.mark.parametrize("options", [["method=cspd"], ["method=eagle"], ["method=ar"]])
def test_calibration_is_refused(options: list[str]) -> None:
    script = runpy.run_path(str(CONF.parent / "eval" / "calibrate.py"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("calibrate", ["model=shapes_mar", "data=shape_classes", *options])
    with pytest.raises(TemperaError, match=r"discrete"):
        script["main"](cfg)


@pytest.mark.slow
def test_the_kl_tokenizer_starts_from_the_vq_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained, none = (
        VQModel(replace(kl.TINY_KL.networks, z_channels=64)),
        replace(QUICK_KL, steps=0),
    )
    started, fresh = (
        kl.train_kl(none, tmp_path / str(start is None), kl.TINY_KL, start)[0]
        for start in (trained, None)
    )
    assert torch.equal(started.decoder.conv_out.weight, trained.decoder.conv_out.weight)
    assert not torch.equal(fresh.decoder.conv_out.weight, trained.decoder.conv_out.weight)
    assert started.decoder.conv_in.weight.shape != trained.decoder.conv_in.weight.shape


@pytest.mark.slow
def test_a_built_network_is_kept_until_settings_or_weights_change(bundle: Path) -> None:
    assert is_built(bundle / "mar", QUICK) and is_built(bundle / "kl", QUICK_KL)
    assert not is_built(bundle / "mar", replace(QUICK, steps=7))
    assert not is_built(bundle / "nowhere", QUICK)


def two_networks() -> tuple[MAR, MAR]:
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1))
        initialise(network)
        for parameter in network.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        made.append(network)
    return made[0], made[1]


def test_a_draft_that_is_its_target_diverges_nowhere() -> None:
    network, other = two_networks()
    batch = mar.MaskedBatch.drawn(torch.randn(4, 4, 16), torch.arange(4), 0.5)
    taken, scale = NoiseSchedule(5, start=900), torch.tensor([1.0, 1.5, 2.0, 3.0])
    same = mar_draft.kernel_divergence(network, network, batch, scale, taken)
    different = mar_draft.kernel_divergence(network, other, batch, scale, taken)
    assert same.item() == pytest.approx(0, abs=1e-6) and different.item() > 1e-3


@pytest.mark.slow
def test_distillation_brings_a_draft_to_its_target() -> None:
    teacher, draft = two_networks()
    teacher.requires_grad_(False)
    batch = mar.MaskedBatch.drawn(torch.randn(8, 4, 16), torch.arange(8), 0.5)
    taken, losses = NoiseSchedule(5, start=900), []
    optimiser = torch.optim.Adam(draft.parameters(), 1e-3)
    for _ in range(40):
        loss = mar_draft.kernel_divergence(draft, teacher, batch, torch.full((8,), 2.0), taken)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


@pytest.mark.slow
def test_an_evaluation_from_end_to_end(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("run", CONF.parent / "eval" / "run.py")
    assert spec is not None and spec.loader is not None and evaluate is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    options = [
        "method=cspd_exact",
        "gamma=2",
        "denoising_steps=3",
        "metrics=none",
        "tracking=none",
        "speed.prompts=1",
        "speed.warmup=0",
    ]
    cfg = composed(bundle, *options, f"directory={tmp_path / 'run'}", "choices={}", "overrides=[]")
    metrics = script.main(cfg)
    assert (
        0 <= metrics["acceptance_rate"] <= 1
        and metrics["accepted_length"] >= 1
        and "speedup" in metrics
    )
    assert "logprob_per_token" not in metrics
    assert (tmp_path / "run" / "accepted.png").is_file() and len(
        read_json(tmp_path / "run" / "metrics.json")["acceptance_by_tenth"]
    ) == 10
    assert (tmp_path / "run" / "acceptance_map.png").is_file() and len(
        list((tmp_path / "run").rglob("*.png"))
    ) >= 5
