"""The shipped MAR: its classes, the scenes and losses that it learns from, and that it draws what
it is told.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from shapes_recipe import kl, mar, mar_draft
from shapes_recipe.scenes import pictures, single_shapes
from tiny_targets import composed

from tempera.config.instantiate import instantiate
from tempera.config.parts import Parts
from tempera.continuous.mar import MAR
from tempera.errors import TemperaError
from tempera.shapes.classifier import correct, load_classifier
from tempera.shapes.labels import CLASSES, ShapeLabels, class_of, shape_prompts
from tempera.shapes.world import COLOURS, SHAPES, World, parse_caption


def small(seed: int) -> MAR:
    """A random MAR of 2×2 tokens."""
    torch.manual_seed(seed)
    sizes = {"width": 16, "heads": 2, "head_width": 16}
    network = MAR(replace(mar.TINY_MAR, grid=(2, 2), depth=1, **sizes))
    mar.initialise(network)
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


def test_classes_are_shapes_in_colours() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 48
    assert [class_of(text) for text in CLASSES] == list(range(48))
    assert class_of("a small red circle on a plain teal background") == class_of("a red circle")
    assert class_of("a red circle above a blue ring") is None
    numbers = ShapeLabels().encode([prompt.text for prompt in shape_prompts(50, 1)])[0]
    assert numbers.tolist() == [*range(1, 48), 0, 1, 2]
    assert len({prompt.id for prompt in shape_prompts(50, 1)}) == 50
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


def test_distillation_brings_a_draft_to_its_target() -> None:
    teacher, draft = small(0).requires_grad_(False), small(1)
    order, drop = torch.rand(8, 4).argsort(), torch.zeros(8, dtype=torch.bool)
    batch = mar.MaskedBatch(torch.randn(8, 4, 16), torch.arange(8), drop, 1, order)
    settings = mar_draft.MARDistillation(denoising_steps=5, denoising_start=900)
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


def test_the_decoder_s_training_keeps_the_latents(tmp_path: Path) -> None:
    quick = kl.KLTraining(steps=1, decoder_steps=2, batch_size=2, bf16=False)
    model = kl.train_kl(quick, tmp_path)
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
    cfg = composed(*options, "data.limit=48", "denoising_steps=12")
    target = Parts.of(cfg).target()
    parts = {"target": target, "method": Parts.of(cfg).method(target, Parts.of(cfg).rule())}
    decoder = Parts.of(cfg).tokenizer()
    pipeline = instantiate(cfg.pipeline, **parts, image_decoder=decoder, device=torch.device("cpu"))
    prompts = instantiate(cfg.data)[::5]
    drawn = torch.from_numpy(pipeline.pictures(pipeline.tokens(prompts).tokens)).float()
    scenes = [scene for prompt in prompts if (scene := parse_caption(prompt.text))]
    found = correct(load_classifier()(drawn / 127.5 - 1), scenes)
    assert {scene.things[0].shape for scene in scenes} == set(SHAPES)
    assert {scene.things[0].colour for scene in scenes} == set(COLOURS)
    assert found["colour1"].mean() > 0.9 and found["shape1"].mean() > 0.8
