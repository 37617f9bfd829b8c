"""Evaluators: the networks and the reference images behind FID, KID, precision and recall, CLIP
score and other scores of pictures.

Pictures are uint8 [B, 3, h, w]. Options are checked before anything is generated; networks are
loaded when the pictures exist.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.distances import Distance, feature_distances
from tempera.runtime.torchvision import import_open_clip, import_torchvision

Pictures = NDArray[np.uint8]
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


Score = Callable[[Tensor, Sequence[Prompt]], Mapping[str, Tensor]]
"""Pictures, uint8 [B, 3, h, w], and their prompts -> named scores [B] of each picture; NaN where a
prompt leaves a score open.
"""


@dataclass(frozen=True)
class Networks:
    """Loaded networks; metrics whose network is missing are left out.

    Attributes:
        features: pictures, uint8 [B, 3, h, w] -> [B, D].
        scores: what scores each picture; the entries of `tempera.metrics.table` name the scores
            whose means are metrics.
        distances: between the features of generated and of real pictures, by metric key.
    """

    features: Callable[[Tensor], Tensor] | None = None
    scores: Sequence[Score] = ()
    distances: Mapping[str, Distance] = field(default_factory=feature_distances)

    def __bool__(self) -> bool:
        """Whether there is any network."""
        return self.features is not None or bool(self.scores)


class Evaluator(Protocol):
    """Measures the quality of a run's pictures."""

    @property
    def identity(self) -> str:
        """Names networks and settings: scores made under another identity are not reused."""

    @property
    def resamples(self) -> int:
        """Bootstrap resamples behind each interval."""

    def check(self, model: str) -> None:
        """Check, before anything is generated, that all files are there and that this evaluator
        fits the model preset.

        Raises:
            TemperaError: something is missing, or the evaluator is for other models.
        """

    def load(self, device: torch.device) -> Networks:
        """Load the networks."""

    def reference(self) -> Iterator[Pictures]:
        """Real pictures in batches, uint8 [B, 3, h, w]; no batches without a reference."""


@dataclass(frozen=True)
class NoEvaluator(Evaluator):
    """`metrics=none`: acceptance and speed only."""

    identity = "none"
    resamples = 0

    @override
    def check(self, model: str) -> None:
        pass

    @override
    def load(self, device: torch.device) -> Networks:
        return Networks()

    @override
    def reference(self) -> Iterator[Pictures]:
        return iter(())


@dataclass(frozen=True)
class StandardEvaluator(Evaluator):
    """`metrics=real`: the field's networks, Inception for FID and an open_clip model for CLIP
    score, from the user's files, against a directory of real images. Fits any model.

    Args:
        inception: weights of the FID Inception network in torch-fidelity's format
            (weights-inception-2015-12-05-6726825d.pth).
        reference_dir: directory of real images (png, jpg, webp), cut to their central square and
            resized to `reference_size`.
        reference_size: edge length in pixels.
        clip_model: an open_clip model name.
        clip_weights: its weights, a local file.
        neighbours: k of precision and recall.
        resamples: bootstrap resamples behind each interval.
    """

    inception: str | None = None
    reference_dir: str | None = None
    reference_size: int = 256
    clip_model: str = "ViT-B-32"
    clip_weights: str | None = None
    neighbours: int = 3
    resamples: int = 200

    @property
    @override
    def identity(self) -> str:
        """A hash of the options and of the sizes of the files."""
        files = [
            Path(path) for path in (self.inception, self.clip_weights) if path
        ] + self._images()
        text = [repr(self), *(f"{file.name}:{file.stat().st_size}" for file in files)]
        return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]

    @override
    def check(self, model: str) -> None:
        if not self.inception and not self.clip_weights:
            raise TemperaError(
                "metrics=real has no network to evaluate with: give metrics.inception=FILE "
                "(weights-inception-2015-12-05-6726825d.pth of torch-fidelity) with "
                "metrics.reference_dir=DIR for FID, and metrics.clip_weights=FILE for CLIP score."
            )
        for name, path in (("inception", self.inception), ("clip_weights", self.clip_weights)):
            if path and not Path(path).is_file():
                raise TemperaError(
                    f"metrics.{name}={path} is not a file: give the path of the downloaded weights."
                )
        if self.inception and len(self._images()) < 2 * (self.neighbours + 1):
            raise TemperaError(
                f"metrics.reference_dir={self.reference_dir} holds {len(self._images())} images: "
                "FID needs a directory of real images (png, jpg or webp) to compare with."
            )

    @override
    def load(self, device: torch.device) -> Networks:
        scores = []
        if self.clip_weights:
            scores.append(clip_scorer(*_open_clip(self.clip_model, self.clip_weights), device))
        return Networks(
            features=_inception(self.inception, device) if self.inception else None,
            scores=scores,
            distances=feature_distances(self.neighbours),
        )

    @override
    def reference(self) -> Iterator[Pictures]:
        images = self._images()
        for first in range(0, len(images), 50):
            yield np.stack(
                [_square(path, self.reference_size) for path in images[first : first + 50]]
            )

    def _images(self) -> list[Path]:
        if not self.reference_dir:
            return []
        return sorted(
            path
            for path in Path(self.reference_dir).rglob("*")
            if path.suffix.lower() in IMAGE_ENDINGS
        )


def clip_scorer(
    model: Any,
    tokenizer: Callable[[list[str]], Tensor],
    preprocess: Callable[[Any], Tensor],
    device: torch.device,
) -> Score:
    """The score `clip_score` (Hessel et al. 2021) without its factor 2.5: the cosine of the image's
    and the prompt's embedding by an open_clip model.
    """
    model = model.to(device).eval()

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        images = torch.stack(
            [
                preprocess(Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()))
                for picture in pictures
            ]
        )
        texts = tokenizer([prompt.text for prompt in prompts])
        image = normalize(model.encode_image(images.to(device)).float(), dim=-1)
        text = normalize(model.encode_text(texts.to(device)).float(), dim=-1)
        return {"clip_score": (image * text).sum(-1)}

    return score


def _open_clip(
    name: str, weights: str | None
) -> tuple[Any, Callable[[list[str]], Tensor], Callable[[Any], Tensor]]:
    open_clip = import_open_clip()
    if name not in open_clip.list_models():
        raise TemperaError(
            f"metrics.clip_model={name} is not a model that open_clip knows: see "
            "open_clip.list_models()."
        )
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=weights)
    except (RuntimeError, OSError, KeyError) as problem:
        raise TemperaError(
            f"{weights} does not hold weights of {name} ({str(problem).splitlines()[0][:80]}): "
            "give matching files."
        ) from None
    return model, open_clip.get_tokenizer(name), preprocess


def _inception(weights: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The Inception network of FID, 2048 features."""
    import_torchvision()
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise TemperaError(
            "metrics.inception needs torch-fidelity, which is not installed: pip install "
            "torch-fidelity."
        ) from None
    try:
        torch.load(weights, weights_only=True)
        network = FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048"], feature_extractor_weights_path=weights
        ).to(device)
    except Exception as problem:
        reason = str(problem).splitlines()[0][:80]
        raise TemperaError(
            f"{weights} does not hold torch-fidelity's Inception weights ({reason}): download "
            "them again."
        ) from None
    return lambda pictures: network(pictures.to(device))[0]


def _square(path: Path, size: int) -> Pictures:
    """The central square of an image, resized: uint8 [3, size, size]."""
    try:
        image = Image.open(path).convert("RGB")
    except OSError as problem:
        raise TemperaError(
            f"{path} cannot be read as an image ({problem}): repair it or remove it from the "
            "reference directory."
        ) from None
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    return np.asarray(image).transpose(2, 0, 1).copy()
