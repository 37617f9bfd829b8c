"""GenEval (Ghosh et al. 2023): whether pictures show the objects, counts, colours and positions
that their prompts ask for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.clip_model import ClipModel
from tempera.metrics.colour_namer import colour_namer
from tempera.metrics.detector import detect, load_detector
from tempera.metrics.evaluators import Networks
from tempera.metrics.geneval_tasks import TASKS, fulfilled, task_of
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile


@dataclass(frozen=True)
class GenEval(Adapter):
    """GenEval with a Mask2Former Swin-S whose weights transformers converted from its authors'.
    GenEval itself uses MMDetection's own training of this model, so scores are close but not equal
    to the published ones. Prompts of other forms than GenEval's have no score.

    Args:
        detector: the detector's directory (config.json, model.safetensors), or a hub id.
        clip_model, clip_weights: the CLIP model that names colours; see
            `tempera.metrics.clip_model.ClipModel`.
        sure, sure_counted: lowest score of an object, and of one that is counted.
    """

    detector: str = "facebook/mask2former-swin-small-coco-instance"
    clip_model: str = "ViT-L-14"
    clip_weights: str | None = "openai"
    sure: float = 0.3
    sure_counted: float = 0.9

    metrics = ("geneval", *(f"geneval_{task}" for task in TASKS))

    def __post_init__(self) -> None:
        for name, share in (("sure", self.sure), ("sure_counted", self.sure_counted)):
            if not 0 <= share < 1:
                raise TemperaError(f"{name}={share} is no score of an object: give 0 to 1.")

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        return (
            WeightsFile(self.detector, ("config.json",)),
            WeightsFile(self.detector, ("model.safetensors", "pytorch_model.bin")),
            *ClipModel(self.clip_model, self.clip_weights).files,
        )

    @override
    def network(self) -> nn.Module:
        return load_detector(*(file.path() for file in self.files[:2]))

    @override
    def load(self, device: torch.device) -> Networks:
        network = self.network().to(device)
        namer = colour_namer(ClipModel(self.clip_model, self.clip_weights), device)

        def judged(picture: Tensor, prompt: Prompt) -> dict[str, float]:
            scores = dict.fromkeys(self.metrics[1:], float("nan"))
            if (task := task_of(prompt.text)) is not None:
                least = self.sure_counted if task.name == "counting" else self.sure
                found = detect(network, picture, least)
                right = fulfilled(task, found, lambda *of: namer(picture, *of))
                scores[f"geneval_{task.name}"] = float(right)
            return scores

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            rows = [judged(*pair) for pair in zip(pictures, prompts, strict=True)]
            return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

        return Networks(scores=[score])
