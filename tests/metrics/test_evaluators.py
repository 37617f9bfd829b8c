from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Networks
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.runtime.row_store import Store
from tempera.shapes import classifier as classifiers
from tempera.shapes import clip as clips
from tempera.shapes.evaluator import ShapesEvaluator
from tempera.shapes.world import World

CPU = torch.device("cpu")


def scenes(count: int) -> tuple[list[Prompt], np.ndarray]:
    samples = World(1).batch(0, count)
    pictures = np.stack(
        [(sample.image * 255).round().astype(np.uint8).transpose(2, 0, 1) for sample in samples]
    )
    return [Prompt(str(place), sample.caption) for place, sample in enumerate(samples)], pictures


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ShapesEvaluator:
    """The shipped evaluator with untrained networks."""
    torch.manual_seed(0)
    network = classifiers.Classifier(width=16).eval()
    monkeypatch.setattr(classifiers, "load_classifier", lambda: network)
    monkeypatch.setattr(
        clips,
        "load_clip",
        lambda: (
            TinyClip(),
            lambda texts: torch.tensor([[float(len(text))] for text in texts]),
            to_tensor,
        ),
    )
    monkeypatch.setattr(ShapesEvaluator, "identity", "untrained")
    return ShapesEvaluator(reference_count=130, resamples=20)


class TinyClip(torch.nn.Module):
    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([images.mean((1, 2, 3)), torch.ones(len(images))], 1)

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids, torch.ones_like(ids)], 1)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()


def test_the_evaluator_of_shapes(shapes: ShapesEvaluator, tmp_path: Path) -> None:
    prompts, pictures = scenes(20)
    prompts[3] = Prompt("3", "a photo of a cat")
    (networks,) = shapes.load(CPU)
    scores = score_pictures(
        networks,
        prompts,
        lambda prompt: pictures[int(prompt.id)],
        Store(tmp_path / "evaluated"),
        batch=8,
    )
    assert len(scores["0"]["features"]) == 16
    assert scores["3"]["shape1"] is None
    assert scores["0"]["shape1"] in (0.0, 1.0)
    signed = torch.from_numpy(pictures).float() / 127.5 - 1
    guess = classifiers.load_classifier()(signed)["background"].argmax(-1)
    for place, prompt in enumerate(prompts):
        if "background" in prompt.text:
            seen = list(classifiers.BACKGROUNDS)[int(guess[place])]
            right = seen == World(1).sample(place).scene.background
            assert scores[prompt.id]["background"] == float(right)
    reference = reference_features(shapes, networks, 64, tmp_path)
    assert reference is not None
    assert reference.shape == (130, 16)
    metrics = quality([scores[prompt.id] for prompt in prompts], networks, reference, 20)
    assert {"fid", "kid", "precision", "recall", "clip_score", "attribute_accuracy"} <= set(metrics)
    assert metrics["shape_accuracy"].n == 19


def test_the_reference_is_kept_and_made_again_where_it_is_damaged(
    shapes: ShapesEvaluator, tmp_path: Path
) -> None:
    (networks,) = shapes.load(CPU)
    first = reference_features(shapes, networks, 64, tmp_path / "cache")
    never = Networks(features=lambda pictures: pytest.fail("made again"))
    again = reference_features(shapes, never, 64, tmp_path / "cache")
    assert first is not None and np.array_equal(first, again)
    assert reference_features(shapes, Networks(never.features, distances={}), 64) is None
    (tmp_path / "cache" / "reference-untrained.npy").write_bytes(b"half")
    assert np.array_equal(first, reference_features(shapes, networks, 64, tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    assert np.array_equal(first, reference_features(shapes, networks, 64, tmp_path / "file" / "no"))


def test_what_an_evaluator_lacks_is_said_before_anything_is_generated() -> None:
    with pytest.raises(TemperaError, match="pictures of the shapes world, not of large"):
        ShapesEvaluator().check("large")
    with pytest.raises(TemperaError, match="reference_count=3 is too small"):
        ShapesEvaluator(reference_count=3).check("shapes")
