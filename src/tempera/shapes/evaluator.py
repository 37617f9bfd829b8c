"""The shipped model's evaluator: a classifier and a small CLIP of its own world."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Networks, Pictures, _signed, clip_scorer
from tempera.runtime.files import sha256_file
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import Scene, Thing, World, parse_caption

NETWORKS = (
    SHIPPED / "classifier" / "model.safetensors",
    SHIPPED / "clip" / "open_clip_model.safetensors",
)


@dataclass(frozen=True)
class ShapesEvaluator:
    """Evaluates pictures of the shapes world with the shipped classifier and CLIP, against real
    scenes.

    Args:
        reference_count: how many real scenes.
        reference_seed: seed of their world, neither the training world's nor the prompts'.
        neighbours: k of precision and recall.
        resamples: bootstrap resamples behind each interval.
    """

    reference_count: int = 1000
    reference_seed: int = 2
    neighbours: int = 3
    resamples: int = 1000

    @property
    def identity(self) -> str:
        """Hash of the networks' files and of the first real scene."""
        scene = hashlib.sha256(World(self.reference_seed).sample(0).image.tobytes()).hexdigest()
        text = [
            *map(sha256_file, NETWORKS),
            scene,
            str(self.reference_count),
            str(self.reference_seed),
        ]
        return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]

    def check(self, model: str) -> None:
        """Only the shipped models generate this world."""
        if model not in ("shapes", "shapes_mar"):
            raise TemperaError(
                f"metrics=shapes evaluates pictures of the shapes world, not model={model}: use "
                "metrics=real with metrics.inception=FILE "
                "and metrics.reference_dir=DIR for FID, metrics.clip_weights=FILE for CLIP "
                "score, or metrics=none."
            )
        missing = [str(path) for path in NETWORKS if not path.is_file()]
        if missing:
            raise TemperaError(
                f"{missing[0]} is missing: reinstall tempera, or rebuild it with `python "
                "train_draft/build_shapes.py`."
            )
        if self.reference_count < 2 * (self.neighbours + 1):
            raise TemperaError(
                f"metrics.reference_count={self.reference_count} is too small: give at least "
                f"{2 * (self.neighbours + 1)}."
            )

    def load(self, device: torch.device) -> Networks:
        """The shipped classifier and CLIP."""
        from tempera.shapes.classifier import correct, load_classifier
        from tempera.shapes.clip import load_clip

        classifier = load_classifier().to(device)

        def attributes(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            scenes = [parse_caption(prompt.text) for prompt in prompts]
            foreign = torch.tensor([scene is None for scene in scenes])
            any_scene = Scene(
                (Thing("circle", "red", None),), None, None, None
            )  # for captions outside the grammar; masked out
            verdicts = correct(
                classifier.attributes(_signed(pictures, device)),
                [scene or any_scene for scene in scenes],
            )
            return {
                name: verdict.cpu().masked_fill(foreign, torch.nan)
                for name, verdict in verdicts.items()
            }

        return Networks(
            features=lambda pictures: classifier.features(_signed(pictures, device)),
            clip_score=clip_scorer(*load_clip(), device),
            attributes=attributes,
        )

    def reference(self) -> Iterator[Pictures]:
        """Real scenes."""
        world = World(self.reference_seed)
        for first in range(0, self.reference_count, 100):
            scenes = world.batch(first, min(100, self.reference_count - first))
            yield np.stack(
                [
                    (scene.image * 255).round().astype(np.uint8).transpose(2, 0, 1)
                    for scene in scenes
                ]
            )
