"""The shipped model's evaluator: the structure of its pictures, and a classifier and a small CLIP
of its own world.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import to_images
from tempera.metrics.clip import clip_scorer, load_open_clip
from tempera.metrics.evaluators import Evaluator, Networks, Pictures, Score
from tempera.metrics.reference import LEAST
from tempera.runtime.files import sha256_file
from tempera.shapes import classifier as classifiers
from tempera.shapes import structure as structures
from tempera.shapes.classifier import Classifier, correct
from tempera.shapes.clip import DIRECTORY, WEIGHTS, tokenize
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import Scene, Texture, Thing, World, parse_caption

NETWORKS = (
    SHIPPED / "classifier" / "model.safetensors",
    WEIGHTS,
)
TEXTURES: dict[str, Texture] = {"shapes": "weave", "shapes_mar": "clouds"}
"""Of the worlds of the shipped models."""
_ANY_SCENE = Scene((Thing("circle", "red"),))
"""Stands in for captions of other worlds, whose scores are masked."""


@dataclass(frozen=True)
class ShapesEvaluator(Evaluator):
    """`metrics=shapes`: scores pictures of the shapes world with the shipped classifier and CLIP,
    against real scenes.

    Args:
        texture: of the model's world.
        reference_count: number of real scenes.
        reference_seed: seed of the real scenes, other than those of the training scenes and of the
            prompts.
        resamples: bootstrap resamples behind each interval.
    """

    texture: Texture = "weave"
    reference_count: int = 1000
    reference_seed: int = 2
    resamples: PositiveInt = 1000

    @property
    @override
    def identity(self) -> str:
        """A hash of the first real scene, and of how many there are and their seed."""
        scene = World(self.reference_seed, texture=self.texture).sample(0).image.tobytes()
        return _hash(hashlib.sha256(scene).hexdigest(), self.reference_count, self.reference_seed)

    @override
    def check(self, model: str) -> None:
        """See `Evaluator.check`: raises TemperaError for pictures of another world."""
        if model not in TEXTURES:
            raise TemperaError(
                "metrics=shapes evaluates pictures of the shapes world, not of "
                f"{model or 'an unknown model'}: choose metrics=real or none",
                option="metrics",
            )
        if TEXTURES[model] != self.texture:
            raise TemperaError(
                f"metrics.texture={self.texture} is not that of {model}'s world: give "
                f"metrics.texture={TEXTURES[model]}",
                option="metrics",
            )
        if self.reference_count < LEAST:
            raise TemperaError(
                f"reference_count={self.reference_count} is too small: give at least {LEAST}."
            )

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        classifier = classifiers.load_classifier().to(device)
        clip = load_open_clip(f"local-dir:{DIRECTORY}", None)
        yield Networks(
            features=lambda pictures: classifier.features(to_images(pictures.to(device))),
            scores=[
                clip_scorer(clip.network, tokenize, clip.preprocess, device),
                attribute_scorer(classifier, device),
                structure_scorer(self.texture),
            ],
            identity=_hash(*map(sha256_file, NETWORKS), *structures.LIMITS, self.texture),
        )

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        world = World(self.reference_seed, texture=self.texture)
        for first in range(0, self.reference_count, 100):
            scenes = world.batch(first, min(100, self.reference_count - first))
            images = np.stack([scene.image for scene in scenes])
            yield (images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2)


def _hash(*parts: object) -> str:
    """What names these parts."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def attribute_scorer(classifier: Classifier, device: torch.device) -> Score:
    """Scores every attribute of a caption's scene: 1 where the classifier sees it in the picture, 0
    where it sees another, NaN where the caption leaves it open or is not a caption of this world.
    """

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        scenes = [parse_caption(prompt.text) for prompt in prompts]
        foreign = torch.tensor([scene is None for scene in scenes])
        logits = classifier(to_images(pictures.to(device)))
        hits = correct(logits, [scene or _ANY_SCENE for scene in scenes])
        return {name: hit.cpu().masked_fill(foreign, torch.nan) for name, hit in hits.items()}

    return score


def structure_scorer(texture: Texture) -> Score:
    """Scores whether the caption's scene is not whole in a picture of this texture (1 or 0), and
    the areas of what is stray and missing, in pixels; NaN for captions of other worlds.
    """

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        values = torch.full((len(prompts), 3), torch.nan)
        for row, prompt in enumerate(prompts):
            scene = parse_caption(prompt.text)
            if scene is not None:
                picture = pictures[row].permute(1, 2, 0).float() / 255
                fit = structures.structure(picture.cpu().numpy(), scene, texture)
                values[row] = torch.tensor([fit.broken, fit.stray.sum(), fit.missing.sum()])
        broken, stray, missing = values.unbind(1)
        return {"broken": broken, "stray": stray, "missing": missing}

    return score
