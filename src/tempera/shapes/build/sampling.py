"""The sampling options of the shipped model: chosen on captions of their own, by one command."""

import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.runtime.files import read_json, write_json
from tempera.shapes.build.looks import draw
from tempera.shapes.build.record import RECORD, LogMetrics
from tempera.shapes.classifier import Classifier, correct, load_classifier
from tempera.shapes.networks import load_target_network, load_text_encoder, load_tokenizer
from tempera.shapes.scenes import world_prompts
from tempera.shapes.world import Scene, parse_caption

WANTED = {
    "one_shape": 0.97,
    "two_shapes": 0.90,
    "colour": 0.98,
    "background": 0.99,
    "relation": 0.95,
}
"""What `reading` should give at least."""


@dataclass(frozen=True)
class SamplingChoice:
    """Which options are compared, and on what.

    Attributes:
        prompts, seed: captions, and the world they come from; no figure is measured on it.
        guidance, top_k: what is compared, all pairs, at the first temperature.
        temperature: the others are compared with the best pair.
        top1: the mean probability of the most probable token must lie between these two, the
            entropy of published image models.
    """

    prompts: int = 256
    seed: int = 3
    guidance: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0)
    top_k: tuple[int, ...] = (16, 32, 64, 0)
    temperature: tuple[float, ...] = (1.0, 0.9, 1.1)
    top1: tuple[float, float] = (0.2, 0.35)


def reading(classifier: Classifier, images: Tensor, scenes: list[Scene]) -> dict[str, float]:
    """What the classifier reads in pictures of told scenes, as shares of right readings.

    `one_shape`: of the shape, in scenes of one; `two_shapes`: of both shapes, in scenes of two;
    `colour`: over all shapes; `background`; `relation`: of two shapes.
    """
    with torch.no_grad():
        parts = [classifier.attributes(part) for part in images.split(64)]
    logits = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    right = correct(logits, scenes)
    pair = torch.tensor([len(scene.things) == 2 for scene in scenes])
    shares = {
        "one_shape": right["shape1"][~pair],
        "two_shapes": right["shape1"][pair] * right["shape2"][pair],
        "colour": torch.cat([right["colour1"], right["colour2"]]),
        "background": right["background"],
        "relation": right["relation"][pair],
    }
    return {name: share.nanmean().item() for name, share in shares.items()}


class Bundle:
    """What is built in a directory, as far as pictures are drawn and read with it."""

    def __init__(self, output: Path) -> None:
        self.text = load_text_encoder(output / "text_encoder")
        self.network = load_target_network(output / "target")
        self.tokenizer = load_tokenizer(output / "tokenizer")
        self.classifier = load_classifier(output / "classifier")

    def read(self, prompts: list[Prompt], sampling: Sampling) -> dict[str, float]:
        """Draw the prompts; `reading` of them, and `top1`, the mean probability of the most
        probable token.
        """
        scenes = [scene for prompt in prompts if (scene := parse_caption(prompt.text))]
        images, top1 = draw(self.network, self.text.encode, self.tokenizer, prompts, sampling)
        return reading(self.classifier, images, scenes) | {"top1": top1}


def choose_sampling(output: Path, settings: SamplingChoice, report: LogMetrics) -> dict[str, float]:
    """Compare the options with what is built in `output`. Returns the one with the largest of the
    least ratios to `WANTED`, with what was read, and writes all to `output`/sampling/compared.json.

    Raises:
        TemperaError: with no option `top1` is within its bounds.
    """
    bundle, prompts = Bundle(output), world_prompts(settings.prompts, seed=settings.seed)
    rows: list[dict[str, float]] = []

    def compare(guidance: float, top_k: int, temperature: float) -> None:
        read = bundle.read(prompts, Sampling(guidance, temperature, top_k))
        rows.append({"guidance": guidance, "top_k": top_k, "temperature": temperature} | read)
        report(read, len(rows) - 1)

    first = settings.temperature[:1]
    for guidance, top_k, temperature in product(settings.guidance, settings.top_k, first):
        compare(guidance, top_k, temperature)
    pair = _best(rows, settings.top1)
    for temperature in settings.temperature[1:]:
        compare(pair["guidance"], int(pair["top_k"]), temperature)
    write_json(output / "sampling" / "compared.json", rows)
    return _best(rows, settings.top1)


def _best(rows: list[dict[str, float]], top1: tuple[float, float]) -> dict[str, float]:
    """The option with the largest of the least ratios to `WANTED`, of those with `top1` within
    these bounds.
    """
    low, high = top1
    fitting = [row for row in rows if low <= row["top1"] <= high]
    if not fitting:
        raise TemperaError(
            f"top1 is between {low} and {high} with no option: compare others (sampling.guidance, "
            "sampling.top_k, sampling.temperature)."
        )
    return max(fitting, key=lambda row: min(row[name] / bar for name, bar in WANTED.items()))


@dataclass(frozen=True)
class Measurement:
    """Captions that nothing was chosen on, `prompts` of the world of `seed`."""

    prompts: int = 1024
    seed: int = 1


def measure(output: Path, settings: Measurement, report: LogMetrics) -> dict[str, float]:
    """What the target built in `output` draws with the options that were chosen there; the share
    of every attribute read right, for comparison with `WANTED`.
    """
    record: Any = read_json(output / "sampling" / RECORD)
    chosen = record["metrics"]
    sampling = Sampling(chosen["guidance"], chosen["temperature"], int(chosen["top_k"]))
    start = time.perf_counter()
    read = Bundle(output).read(world_prompts(settings.prompts, seed=settings.seed), sampling)
    report(read | {"seconds": time.perf_counter() - start}, settings.prompts)
    return read
