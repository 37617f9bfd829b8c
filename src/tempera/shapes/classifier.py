"""The shipped evaluator: a small network that reads a scene's attributes and whose features feed
FID, KID and precision/recall.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from tempera.runtime.network_directory import read_network
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import BACKGROUNDS, COLOURS, PATTERNS, RELATIONS, SHAPES, SIZES, Scene

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "relation": ("none", *RELATIONS),
    "shape1": SHAPES,
    "colour1": tuple(COLOURS),
    "size1": tuple(SIZES),
    "shape2": SHAPES,
    "colour2": tuple(COLOURS),
    "size2": tuple(SIZES),
    "background": tuple(BACKGROUNDS),
    "pattern": PATTERNS,
}
"""What is read from an image, and the classes of each. The second thing is below or right of the
first.
"""

UNTOLD = -1
"""Label of an attribute that a scene does not have or a caption does not tell."""


def labels(scene: Scene) -> dict[str, int]:
    """Class index of every attribute of a scene (or of a parsed caption); `UNTOLD` where it is
    unknown.
    """
    attributes = {
        "relation": scene.relation or "none",
        "background": scene.background,
        "pattern": scene.pattern,
    }
    for i, thing in enumerate(scene.things, start=1):
        attributes[f"shape{i}"] = thing.shape
        attributes[f"colour{i}"] = thing.colour
        attributes[f"size{i}"] = thing.size
    result = {}
    for name, classes in ATTRIBUTES.items():
        value = attributes.get(name)
        result[name] = classes.index(value) if value else UNTOLD
    return result


def _block(inner: int, outer: int, stride: int) -> nn.Sequential:
    """[B, inner, h, w] → [B, outer, h / stride, w / stride]."""
    convolution = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU())


class Classifier(nn.Module):
    """Images [B, 3, 48, 48] in [−1, 1] → features [B, width] → attribute logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.trunk = nn.Sequential(
            _block(3, 24, stride=2),
            _block(24, 48, stride=2),
            _block(48, 48, stride=1),
            _block(48, 96, stride=2),
            _block(96, 96, stride=1),
            _block(96, 96, stride=2),
            nn.Flatten(),
            nn.Linear(96 * 9, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict(
            {name: nn.Linear(width, len(classes)) for name, classes in ATTRIBUTES.items()}
        )

    def features(self, images: Tensor) -> Tensor:
        """Images [B, 3, 48, 48] in [−1, 1] → [B, width]."""
        out: Tensor = self.trunk(images)
        return out

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images [B, 3, 48, 48] in [−1, 1] → logits [B, classes] of every attribute in
        `ATTRIBUTES`.
        """
        features = self.features(images)
        return {name: head(features) for name, head in self.heads.items()}


def correct(logits: dict[str, Tensor], scenes: list[Scene]) -> dict[str, Tensor]:
    """For every attribute, 1.0 where the prediction agrees, 0.0 where not, NaN where the scene does
    not tell: float32 [B].
    """
    truth = [labels(scene) for scene in scenes]
    result = {}
    for name, scores in logits.items():
        classes = torch.tensor([of_scene[name] for of_scene in truth], device=scores.device)
        right = (scores.argmax(-1) == classes).float()
        result[name] = torch.where(classes == UNTOLD, torch.nan, right)
    return result


def load_classifier(directory: Path = SHIPPED / "classifier") -> Classifier:
    """The shipped classifier, frozen."""
    model = read_network(directory, lambda config: Classifier(**config))
    return model.eval().requires_grad_(False)
