"""Who evaluates pictures: the networks behind FID, KID, precision and recall, CLIP score and
attribute accuracy, and their reference images.

Pictures are uint8 [B, 3, h, w]. Networks are loaded late, when the first pictures exist; what they
need is checked early.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.runtime.torchvision import import_open_clip, import_torchvision

Pictures = NDArray[np.uint8]
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Networks:
    """Loaded networks; a missing one leaves its metrics out.

    Attributes:
        features: pictures, uint8 tensor [B, 3, h, w] -> [B, D].
        clip_score: pictures and prompts -> cosine similarity of image and text embeddings, [B].
        attributes: pictures and prompts -> for every attribute 1 (right), 0 (wrong) or NaN (not
            told by the prompt), [B].
    """

    features: Callable[[Tensor], Tensor] | None = None
    clip_score: Callable[[Tensor, Sequence[Prompt]], Tensor] | None = None
    attributes: Callable[[Tensor, Sequence[Prompt]], dict[str, Tensor]] | None = None


class Evaluator(Protocol):
    """The networks and the reference images that a run's quality is measured with."""

    identity: str
    """Names networks and settings; verdicts of another identity are not reused."""
    neighbours: int
    resamples: int

    def check(self, model: str) -> None:
        """Raise TemperaError when something is missing or this evaluator does not fit the model;
        before anything is generated.
        """

    def load(self, device: torch.device) -> Networks:
        """Load the networks."""

    def reference(self) -> Iterator[Pictures]:
        """Real pictures in batches, uint8 [B, 3, h, w]; none when there is no reference."""


def no_evaluator() -> None:
    """`metrics=none`: speed and acceptance only."""
    return


@dataclass(frozen=True)
class RealEvaluator:
    """Evaluates pictures of any model with networks that the user supplies, against a directory of
    real images.

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
    def identity(self) -> str:
        """Hash of the options and of the files' sizes."""
        files = [
            Path(path) for path in (self.inception, self.clip_weights) if path
        ] + self._images()
        text = [repr(self), *(f"{file.name}:{file.stat().st_size}" for file in files)]
        return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]

    def check(self, model: str) -> None:
        """The files exist."""
        if not self.inception and not self.clip_weights:
            raise TemperaError(
                "metrics=real has no network to evaluate with: give metrics.inception=FILE "
                "(weights-inception-2015-12-05-6726825d.pth of "
                "torch-fidelity) with metrics.reference_dir=DIR for FID, and "
                "metrics.clip_weights=FILE for CLIP score."
            )
        for name, path in (("inception", self.inception), ("clip_weights", self.clip_weights)):
            if path and not Path(path).is_file():
                raise TemperaError(
                    f"metrics.{name}={path} is not a file: give the path of the downloaded weights."
                )
        if self.inception and len(self._images()) < 2 * (self.neighbours + 1):
            raise TemperaError(
                f"metrics.reference_dir={self.reference_dir} holds {len(self._images())} images: "
                "FID needs a directory of real images to "
                "compare with, png, jpg or webp."
            )

    def load(self, device: torch.device) -> Networks:
        """The user's networks."""
        return Networks(
            features=_inception(self.inception, device) if self.inception else None,
            clip_score=clip_scorer(*_open_clip(self.clip_model, self.clip_weights), device)
            if self.clip_weights
            else None,
        )

    def reference(self) -> Iterator[Pictures]:
        """The real images."""
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
) -> Callable[[Tensor, Sequence[Prompt]], Tensor]:
    """CLIP score (Hessel et al. 2021) without its factor: the cosine of image and text embeddings,
    through open_clip.
    """
    model = model.to(device).eval()

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        images = torch.stack(
            [
                preprocess(Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()))
                for picture in pictures
            ]
        )
        seen = torch.nn.functional.normalize(model.encode_image(images.to(device)).float(), dim=-1)
        read = torch.nn.functional.normalize(
            model.encode_text(tokenizer([prompt.text for prompt in prompts]).to(device)).float(),
            dim=-1,
        )
        return (seen * read).sum(-1)

    return score


def _signed(pictures: Tensor, device: torch.device) -> Tensor:
    """uint8 -> float32 in [−1, 1]."""
    return pictures.to(device).float() / 127.5 - 1


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
            f"{path} cannot be read as an image ({problem}): mend it or take it out of the "
            "reference directory."
        ) from None
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    return np.asarray(image).transpose(2, 0, 1).copy()
