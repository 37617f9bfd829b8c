"""Looking at a model while it trains: pictures of fixed prompts, and what the classifier reads in
them, every few minutes.
"""

import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.image_tokenizers.vq import VQModel
from tempera.rules.standard import Exact
from tempera.runtime.files import replacing
from tempera.shapes.build.target import TargetModel
from tempera.shapes.classifier import correct, load_classifier
from tempera.shapes.scenes import world_prompts
from tempera.shapes.world import parse_caption
from tempera.targets.llamagen import LlamaGen
from tempera.targets.prompt_state import Conditioner
from tempera.targets.transformer import TransformerTarget

LOOKING_SEED = 7
"""World of the prompts that are looked at; no figure is measured on it."""


def attribute_means(batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Share of right readings of every attribute that is told at all, from what `correct` gives."""
    hits = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return {name: right.nanmean().item() for name, right in hits.items() if not right.isnan().all()}


class Looks:
    """Draws `count` prompts when `minutes` have passed since the last time, into `directory`:
    step-000000.png and looks.jsonl. What the network in `classifier` reads in them is added as soon
    as it is there.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: VQModel,
        classifier: Path,
        sampling: Sampling,
        minutes: float = 10.0,
        count: int = 48,
    ) -> None:
        self.directory, self.tokenizer, self.classifier, self.sampling = (
            directory,
            tokenizer,
            classifier,
            sampling,
        )
        self.seconds, self.prompts, self.last = (
            60 * minutes,
            world_prompts(count, seed=LOOKING_SEED),
            time.monotonic(),
        )

    def __call__(self, model: TargetModel, step: int) -> None:
        """Look, if it is time."""
        if time.monotonic() - self.last < self.seconds:
            return
        self.write(model, step)
        self.last = time.monotonic()

    @torch.no_grad()
    def write(self, model: TargetModel, step: int) -> dict[str, float]:
        """Look now; returns what was read."""
        text, network = copy.deepcopy(model.text).eval(), copy.deepcopy(model.network).eval()
        images, top = draw(network, text.encode, self.tokenizer, self.prompts, self.sampling)
        read = {"top1": top}
        if (self.classifier / "training.json").is_file():
            scenes = [scene for prompt in self.prompts if (scene := parse_caption(prompt.text))]
            hits = correct(load_classifier(self.classifier).attributes(images), scenes)
            read |= attribute_means([hits])
        self.directory.mkdir(parents=True, exist_ok=True)
        with replacing(self.directory / f"step-{step:06d}.png") as temporary:
            picture_grid(images, columns=12).save(temporary, format="png")
        with (self.directory / "looks.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": step} | {name: round(value, 4) for name, value in read.items()})
                + "\n"
            )
        return read


@torch.no_grad()
def draw(
    network: LlamaGen,
    encode: Conditioner,
    tokenizer: VQModel,
    prompts: list[Prompt],
    sampling: Sampling,
    seed: int = 0,
) -> tuple[Tensor, float]:
    """Images [B, 3, H, W] in [−1, 1] by plain autoregression, and the mean probability of the most
    probable token.
    """
    target, codes = _Watched(network, encode, sampling, identity="in training"), []
    for first in range(0, len(prompts), 64):
        part = prompts[first : first + 64]
        streams = RandomStreams(seed, [prompt.id for prompt in part])
        output = decode(target, NoDraft(), Exact(), streams, [prompt.text for prompt in part])
        codes += output.tokens.unflatten(1, network.config.grid).split(16)
    images = torch.cat([tokenizer.decode_codes(part) for part in codes])
    return images, float(torch.cat(target.tops).mean())


class _Watched(TransformerTarget):
    """A target that remembers the probability of its most probable token."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tops: list[Tensor] = []

    def score(self, draft: Any) -> Any:
        """See `TransformerTarget`."""
        scores = super().score(draft)
        self.tops.append(scores.p.amax(-1).flatten())
        return scores


def picture_grid(images: Tensor, columns: int, zoom: int = 2) -> Image.Image:
    """Images [B, 3, H, W] in [−1, 1] in rows of `columns`; what does not fill the last row is left
    out.
    """
    whole = images[: max(len(images) // columns, 1) * columns]
    pixels = ((whole.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    rows = [
        np.concatenate(list(pixels[i : i + columns]), 1) for i in range(0, len(pixels), columns)
    ]
    picture = Image.fromarray(np.concatenate(rows, 0))
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)
