"""Names the colours of detected objects with CLIP, as GenEval does."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from tempera.metrics.clip_model import ClipModel
from tempera.metrics.geneval_tasks import COLOURS, Found

TEMPLATES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)


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
