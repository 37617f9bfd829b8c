"""The shipped MAR: its classes, the scenes and losses that it learns from, and that it draws what
it is told.
"""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from paths import CONF
from shapes_recipe import kl, mar, mar_draft
from shapes_recipe.scenes import pictures, single_shapes

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.continuous.diffusion import TRAINING_STEPS, NoiseSchedule
from tempera.continuous.mar import MAR
from tempera.errors import TemperaError
from tempera.image_tokenizers.kl import KLModel
from tempera.image_tokenizers.vq import VQModel
from tempera.shapes.classifier import correct, load_classifier
from tempera.shapes.labels import CLASSES, ShapeLabels, class_of, shape_prompts
from tempera.shapes.world import COLOURS, SHAPES, World, parse_caption, render

STAGES = {"denoising_steps": 5, "denoising_start": 900}


def small(depth: int = 1, std: float | None = None, seed: int = 0) -> MAR:
    """An untrained MAR of 2×2 tokens, whose head says 0; with `std`, a random one."""
    torch.manual_seed(seed)
    sizes = {"width": 16, "heads": 2, "head_width": 16}
    network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=depth, **sizes))
    mar.initialise(network)
    if std is not None:
        for parameter in network.parameters():
            parameter.data += std * torch.randn_like(parameter)
    return network


def random_batch(count: int, known: int = 0) -> mar.MaskedBatch:
    order, drop = torch.rand(count, 4).argsort(), torch.zeros(count, dtype=torch.bool)
    return mar.MaskedBatch(torch.randn(count, 4, 16), torch.arange(count) % 48, drop, known, order)


def test_classes_are_shapes_in_colours() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 48
    assert [class_of(text) for text in CLASSES] == list(range(48))
    assert class_of("a small red circle on a plain teal background") == class_of("a red circle")
    assert class_of("a red circle above a blue ring") is None
    numbers = ShapeLabels().encode([prompt.text for prompt in shape_prompts(50, 1)])[0]
    assert numbers.tolist() == [*range(1, 48), 0, 1, 2]
    assert ShapeLabels().encode(["47", CLASSES[3]])[0].tolist() == [47, 3]
    for wrong in ("48", "-1", "1.0", "1" * 5000, "a dog"):
        with pytest.raises(TemperaError, match="prompt 2 of 2, .*is not a shape"):
            ShapeLabels().check(["a red ring", wrong])


@pytest.mark.parametrize(("lattice", "size"), [(1, None), (8, None), (8, "large")])
def test_scenes_of_one_shape_stand_on_their_lattice(lattice: int, size: str | None) -> None:
    samples = single_shapes(World(0), 4, 6, lattice, size)
    things = [thing for sample in samples for thing in sample.scene.things]
    assert len(samples) == len(things) == 6
    assert {(thing.x % lattice, thing.y % lattice) for thing in things} == {(0, 0)}
    assert len({(thing.x, thing.y) for thing in things}) > 1
    assert size is None or {thing.size for thing in things} == {size}
    assert samples[2].scene == single_shapes(World(0), 4, 3, lattice, size)[2].scene


def test_the_posterior_s_own_variance_is_minus_one() -> None:
    """A head that gives it and the true noise has nothing to learn."""
    schedule, t = NoiseSchedule(TRAINING_STEPS), torch.tensor([1, 500, 999])
    output = torch.cat([torch.randn(3, 4), -torch.ones(3, 4)], -1)
    found = schedule.kernel(output, torch.randn(3, 4), t).std.double().square()
    now, before = schedule.kept[t], schedule.kept[t - 1]
    expected = (1 - now / before) * (1 - before) / (1 - now)
    assert torch.allclose(found, expected.unsqueeze(-1).expand(3, 4), rtol=1e-4)


def test_losses_of_a_head_that_says_nothing_are_known() -> None:
    """Its noise error is 1 at every level, so weighted too; its divergence has a closed form."""
    network, batch = small(), random_batch(64)
    settings = mar.MARTraining(repeats=32, snr_clip=1.0, **STAGES)
    plain, divergence = mar.token_losses(network, batch, settings)
    weighted, _ = mar.token_losses(network, batch, replace(settings, snr_clip=10.0))
    assert plain.item() == pytest.approx(1, abs=0.05)
    assert weighted.item() == pytest.approx(1, abs=0.1) and weighted != plain
    zero, one, stages = torch.zeros(5, 1), torch.ones(5, 1), torch.arange(5)
    sampling = settings.sampling
    mine, true = (
        sampling.kernel(torch.cat(output, -1), zero, stages)
        for output in ((zero, zero), (one, -one))
    )
    ratio = (true.std / mine.std).square()
    expected = 0.5 * (ratio - 1 - ratio.log() + (true.mean / mine.std).square())  # E[noise²] = 1
    assert divergence.item() == pytest.approx(expected.mean().item(), rel=0.08)


def test_tokens_count_by_their_weights() -> None:
    network, weights = small(std=0.1), torch.tensor([0.0, 0, 5, 0]).expand(8, -1)
    error, _ = mar.token_losses(network, random_batch(8), mar.MARTraining(), weights)
    error.backward()
    learned = network.diffusion_pos_embed_learned.grad  # of each place, next to the head
    assert learned is not None and learned[0, 2].abs().max() > 0
    assert learned[0, [0, 1, 3]].abs().max() == 0


def test_the_shape_is_where_its_colour_shows() -> None:
    latents = mar.encode_scenes(World(0), 5, KLModel(kl.TINY_KL).eval())
    for sample, touched in zip(single_shapes(World(0), 0, 5, 8), latents.touched, strict=True):
        (thing,) = sample.scene.things
        colour = "white" if thing.colour == "black" else "black"
        other = render(replace(sample.scene, things=(replace(thing, colour=colour),)))
        changed = torch.from_numpy(np.abs(other - sample.image).max(-1) > 0.1)
        tokens = changed.unflatten(0, (6, 8)).unflatten(2, (6, 8)).transpose(1, 2)
        assert not (tokens.flatten(2).any(-1).flatten() & ~touched).any()
        assert 4 <= touched.sum() <= 36


def test_classes_of_a_shape_and_of_a_colour_learn_together() -> None:
    gradient = torch.zeros(48, 3)
    gradient[class_of("a red ring")] = torch.tensor([1.0, 2.0, 3.0])
    shared = mar.taught_together(gradient)[:, 0]
    told = {"a red ring": 3, "a blue ring": 1, "a red star": 1, "a blue star": 0}
    assert {text: shared[class_of(text)].item() for text in told} == told
    assert shared.sum() == 1 + 8 + 6


def test_places_of_the_grid_are_told_apart_from_the_start() -> None:
    network = mar.new_mar(mar.TINY_MAR, 0)
    for name in ("encoder", "decoder", "diffusion"):
        places = getattr(network, f"{name}_pos_embed_learned").detach()[0, -36:]
        near, far = (torch.cosine_similarity(places[0], places[other], 0) for other in (1, -1))
        assert near > far + 0.2 and places.std().item() == pytest.approx(0.6, abs=0.1)
    assert network.decoder_pos_embed_learned[0, :-36].std() < 0.05  # the class keeps its own


def test_a_pruned_network_has_its_targets_first_and_last_blocks() -> None:
    target = small(depth=4)
    draft = mar_draft.pruned(target, replace(target.config, depth=2, head_depth=1))
    mine, theirs = draft.state_dict(), target.state_dict()
    assert len(mine) < len(theirs)
    for kind in ("encoder_blocks", "decoder_blocks"):
        for block, source in ((0, 0), (1, 3)):
            expected = theirs[f"{kind}.{source}.attn.qkv.weight"]
            assert torch.equal(mine[f"{kind}.{block}.attn.qkv.weight"], expected)
    same = mar_draft.pruned(target, target.config).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in theirs.items())


def test_distillation_brings_a_draft_to_its_target() -> None:
    teacher, draft = small(std=0.05).requires_grad_(False), small(std=0.05, seed=1)
    batch, settings = random_batch(8, known=1), mar_draft.MARDistillation(**STAGES)
    same = mar_draft.kernel_divergence(teacher, teacher, batch, settings)
    assert same.item() == pytest.approx(0, abs=1e-6)
    optimiser, losses = torch.optim.Adam(draft.parameters(), 2e-3), []
    for _ in range(30):
        loss = mar_draft.kernel_divergence(draft, teacher, batch, settings)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 1e-3 and np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])


def test_the_kl_tokenizer_starts_from_the_vq_tokenizer_and_keeps_its_latents(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    trained = VQModel(replace(kl.TINY_KL.networks, z_channels=64))
    quick = kl.KLTraining(steps=0, decoder_steps=2, batch_size=2, bf16=False)
    model = kl.train_kl(quick, tmp_path, trained)
    assert torch.equal(model.decoder.conv_out.weight, trained.decoder.conv_out.weight)
    assert model.decoder.conv_in.weight.shape != trained.decoder.conv_in.weight.shape
    images = pictures(single_shapes(World(0), 0, 64))
    drawn = model.encode(images, torch.randn(64, 4, 12, 12))
    assert drawn.std().item() == pytest.approx(1, abs=0.05)  # tokens of unit variance
    before, decoded = model.encode(images[:2]), model.decode_codes(model.encode(images[:2]))
    after = kl.train_decoder(quick, tmp_path / "decoder", model)
    assert torch.equal(after.encode(images[:2]), before)
    assert not torch.allclose(after.decode_codes(before), decoded)


@pytest.mark.slow
def test_the_shipped_weights_generate_what_they_are_told() -> None:
    """Every shape and every colour, read by the shipped classifier; by chance it would read 1/6 and
    1/8 of them.
    """
    options = ["model=shapes_mar", "method=ar", "data=shape_classes", "device=cpu"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("eval", [*options, "limit=48", "denoising_steps=12"])
    target = build.build_target(cfg)
    parts = {"target": target, "method": build.build_method(cfg, target)}
    decoder = build.build_tokenizer(cfg)
    pipeline = instantiate(cfg.pipeline, **parts, image_decoder=decoder, device=torch.device("cpu"))
    prompts = instantiate(cfg.data)[::5]
    drawn = torch.from_numpy(pipeline.pictures(pipeline.tokens(prompts).tokens)).float()
    scenes = [scene for prompt in prompts if (scene := parse_caption(prompt.text))]
    found = correct(load_classifier().attributes(drawn / 127.5 - 1), scenes)
    assert {scene.things[0].shape for scene in scenes} == set(SHAPES)
    assert {scene.things[0].colour for scene in scenes} == set(COLOURS)
    assert found["colour1"].mean() > 0.9 and found["shape1"].mean() > 0.8


def test_calibration_is_refused() -> None:
    script = runpy.run_path(str(CONF.parent / "eval" / "calibrate.py"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("calibrate", ["model=shapes_mar", "data=shape_classes", "method=ar"])
    with pytest.raises(TemperaError, match=r"discrete"):
        script["main"](cfg)
