"""The shipped evaluator, and the reference that it keeps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.runtime.row_store import Store
from tempera.shapes.evaluator import ShapesEvaluator
from tempera.shapes.world import World

CPU = torch.device("cpu")
SHAPES = ShapesEvaluator(reference_count=30, resamples=20)


def test_the_evaluator_of_shapes(tmp_path: Path) -> None:
    """The scene of every picture is that of its caption, but for the fourth."""
    scenes = World(1).batch(0, 20)
    pictures = [(255 * one.image).round().astype(np.uint8).transpose(2, 0, 1) for one in scenes]
    prompts = [Prompt(str(place), one.caption) for place, one in enumerate(scenes)]
    prompts[3] = Prompt("3", "a photo of a cat")
    (networks,) = SHAPES.load(CPU)
    store = Store(tmp_path / "evaluated", "run")
    scores = score_pictures(networks, prompts, lambda one: pictures[int(one.id)], store, batch=8)
    assert scores["3"]["shape1"] is None and scores["0"]["shape1"] == 1
    reference = reference_features(SHAPES, networks, 64, tmp_path)
    assert reference is not None and len(reference) == 30
    metrics = quality([scores[prompt.id] for prompt in prompts], networks, reference, 20)
    assert {"fid", "kid", "precision", "recall", "clip_score", "attribute_accuracy"} <= set(metrics)
    assert metrics["shape_accuracy"].value > 0.9 and metrics["shape_accuracy"].n == 19


def test_the_reference_is_kept_and_made_again_where_it_is_damaged(tmp_path: Path) -> None:
    (networks,) = SHAPES.load(CPU)
    first = reference_features(SHAPES, networks, 64, tmp_path / "cache")
    never = replace(networks, features=lambda pictures: pytest.fail("made again"))
    again = reference_features(SHAPES, never, 64, tmp_path / "cache")
    assert first is not None and np.array_equal(first, again)
    assert reference_features(SHAPES, replace(never, distances={}), 64) is None
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"half")
    assert np.array_equal(first, reference_features(SHAPES, networks, 64, kept.parent))
    assert np.array_equal(first, reference_features(SHAPES, networks, 64, kept / "no"))
    for other, edge in ((SHAPES, 32), (ShapesEvaluator(20), 64)):
        reference_features(other, networks, edge, kept.parent)
    assert len(list(kept.parent.glob("*.npy"))) == 3  # of each size and set


def test_scores_do_not_depend_on_the_real_pictures() -> None:
    """What distances are taken from has a name of its own."""
    others = [
        ShapesEvaluator(reference_count=30, reference_seed=5),
        ShapesEvaluator(reference_count=31),
        SHAPES,
    ]
    assert len({evaluator.identity for evaluator in others}) == 3
    assert len({next(evaluator.load(CPU)).identity for evaluator in others}) == 1


def test_what_an_evaluator_lacks_is_said_before_anything_is_generated() -> None:
    with pytest.raises(TemperaError, match="pictures of the shapes world, not of large"):
        ShapesEvaluator().check("large")
    with pytest.raises(TemperaError, match="reference_count=3 is too small"):
        ShapesEvaluator(reference_count=3).check("shapes")
