"""GenEval (Ghosh et al. 2023): whether pictures show the objects, counts, colours and positions
that their prompts ask for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.clip_model import ClipModel
from tempera.metrics.detector import detect, load_detector
from tempera.metrics.evaluators import Networks
from tempera.metrics.geneval_tasks import COLOURS, TASKS, Found, fulfilled, task_of
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile

TEMPLATES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)
MOST = 16
"""At most this many objects of a class are considered."""


@dataclass(frozen=True)
class GenEval(Adapter):
    """GenEval with a Mask2Former Swin-S whose weights transformers converted from its authors'.
    GenEval itself uses MMDetection's own training of this model, so scores are close but not equal
    to the published ones.

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
        config, weights = (file.path() for file in self.files[:2])
        return load_detector(config, weights)

    @override
    def load(self, device: torch.device) -> Networks:
        network = self.network().to(device)
        namer = colour_namer(ClipModel(self.clip_model, self.clip_weights), device)

        def judged(picture: Tensor, prompt: Prompt) -> dict[str, float]:
            scores = dict.fromkeys((f"geneval_{task}" for task in TASKS), float("nan"))
            task = task_of(prompt.text)
            if task is not None:
                least = self.sure_counted if task.name == "counting" else self.sure
                found = detect(network, picture, least)
                objects = {name: group[:MOST] for name, group in found.items()}
                right = fulfilled(task, objects, lambda *of: namer(picture, *of))
                scores[f"geneval_{task.name}"] = float(right)
            return scores

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            rows = [judged(*pair) for pair in zip(pictures, prompts, strict=True)]
            return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

        return Networks(scores=[score])


def colour_namer(
    clip: ClipModel, device: torch.device
) -> Callable[[Tensor, Sequence[Found], str], list[str]]:
    """A function that names the colours of a picture's objects of one class. CLIP compares each
    object, cut out on grey, with three sentences per colour.
    """
    made, tokenizer, preprocess = clip.tools()
    network: Any = made.to(device)

    def named(picture: Tensor, objects: Sequence[Found], name: str) -> list[str]:
        sentences = [
            template.format(colour=colour, name=name)
            for colour in COLOURS
            for template in TEMPLATES
        ]
        texts = network.encode_text(tokenizer(sentences).to(device)).float()
        texts = normalize(texts, dim=-1).unflatten(0, (len(COLOURS), -1)).mean(1)
        cuts = torch.stack([preprocess(_cut(picture, one)) for one in objects]).to(device)
        images = normalize(network.encode_image(cuts).float(), dim=-1)
        return [COLOURS[place] for place in (images @ normalize(texts, dim=-1).T).argmax(1)]

    return named


def _cut(picture: Tensor, one: Found) -> Image.Image:
    """The picture inside the object's box, with a grey (#999) background."""
    colours = picture.permute(1, 2, 0).cpu().numpy()
    cut = np.where(one.mask[:, :, None], colours, np.uint8(0x99))
    return Image.fromarray(cut).crop(tuple(map(round, one.box)))  # type: ignore[arg-type]
