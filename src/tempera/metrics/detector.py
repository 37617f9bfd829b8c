"""Object detection with Mask2Former (Cheng et al. 2022), computed as MMDetection does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from tempera.metrics.geneval_tasks import CLASSES, Found
from tempera.metrics.weights import not_of

SHORT, LONG, DIVISOR, MOST = 800, 1333, 32, 100
"""Pixel limits of the shorter and the longer side, the number that both are padded to multiples of,
and the most objects per picture.
"""
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def load_detector(config: Path, weights: Path) -> nn.Module:
    """A Mask2Former for MS-COCO's classes, in transformers' layout, from one directory.

    Raises:
        TemperaError: the files hold another model.
    """
    from tempera.runtime.huggingface import Mask2FormerForUniversalSegmentation

    what = "a Mask2Former of MS-COCO's instances"
    try:
        network, report = Mask2FormerForUniversalSegmentation.from_pretrained(
            config.parent, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, TypeError) as problem:
        raise not_of(weights, what, str(problem).splitlines()[0]) from None
    if report["missing_keys"] or report["mismatched_keys"]:
        first = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))[0]
        raise not_of(weights, what, f"it lacks {first}")
    if network.config.num_labels != len(CLASSES):
        raise not_of(weights, what, f"it knows {network.config.num_labels} classes")
    made: nn.Module = network.float().eval().requires_grad_(False)
    return made


def detect(network: Any, picture: Tensor, least: float) -> dict[str, list[Found]]:
    """The objects found, by GenEval's name of their class, highest score first.

    Args:
        network: from `load_detector`.
        picture: uint8 [3, h, w].
        least: objects with lower scores are left out.
    """
    device = next(network.parameters()).device
    size = picture.shape[-2:]
    image, inner = _input(picture.to(device))
    found = network(pixel_values=image)
    masks = interpolate(found.masks_queries_logits, image.shape[-2:], mode="bilinear")
    masks = masks[:, :, : inner[0], : inner[1]]
    masks = interpolate(masks, size, mode="bilinear")[0]
    classes = found.class_queries_logits[0].softmax(-1)[:, :-1]
    scores, places = classes.flatten().topk(min(MOST, classes.numel()))
    objects: dict[str, list[Found]] = {}
    for score, place in zip(scores, places.tolist(), strict=True):
        query, kind = divmod(place, classes.shape[1])
        mask = masks[query] > 0
        sure = float(score * (masks[query].sigmoid() * mask).sum() / (mask.sum() + 1e-6))
        if sure > least:
            inside = mask.cpu().numpy()
            rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
            left, top, right, low = (
                float(edge) for edge in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            )
            one = Found((left, top, right, low), inside, sure)
            objects.setdefault(CLASSES[kind], []).append(one)
    return {name: sorted(group, key=lambda one: -one.score) for name, group in objects.items()}


def _input(picture: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A picture → the network's input [1, 3, H, W], and the size of its part without padding."""
    high, wide = picture.shape[-2:]
    scale = min(SHORT / min(high, wide), LONG / max(high, wide))
    inner = int(high * scale + 0.5), int(wide * scale + 0.5)
    image = interpolate(picture[None].float(), inner, mode="bilinear")
    mean, deviation = (
        torch.tensor(values, device=picture.device)[:, None, None] for values in (MEAN, DEVIATION)
    )
    rest = [-side % DIVISOR for side in inner]
    return pad((image - mean) / deviation, (0, rest[1], 0, rest[0])), inner
