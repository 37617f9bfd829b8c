"""The recipe of the shipped model: the settings of its stages, and what each writes."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shapes_recipe import evaluators, kl, mar, mar_draft, target
from shapes_recipe.evaluators import EvaluatorTraining
from shapes_recipe.kl import KLTraining
from shapes_recipe.mar import MARTraining
from shapes_recipe.mar_draft import MARDistillation
from shapes_recipe.stage import is_built, log, record, write_half
from shapes_recipe.target import TargetTraining
from tempera.commands import train
from tempera.config.compose import composed, written
from tempera.continuous.mar import read_mar
from tempera.errors import TemperaError
from tempera.image_tokenizers.kl import read_kl
from tempera.runtime.files import read_json
from tempera.runtime.network_directory import CONFIG, WEIGHTS
from tempera.targets.llamagen import LlamaGenConfig
from tempera.training.trainer import DRAFT

Metrics = dict[str, float]


@dataclass
class DraftTraining:
    """How a draft is trained: as `train_draft/main.py model=shapes` trains it.

    Attributes:
        steps: of training; one of the parallel draft costs four of EAGLE's.
        options: more of that command's, as `name=value`.
    """

    steps: int = 150
    options: list[str] = field(
        default_factory=lambda: [
            "train_data._target_=shapes_recipe.mixed.mixed_codes",
            "+train_data.limit=512",
            "training.mixed_precision=bf16",
        ]
    )
    seed: int = 0


def _parallel() -> DraftTraining:
    """How the parallel draft is trained."""
    return DraftTraining(140, ["draft=parallel", *DraftTraining().options])


def _medusa() -> DraftTraining:
    """How the Medusa draft is trained."""
    return DraftTraining(300, ["draft=medusa", "loss=acceptance", *DraftTraining().options])


def _dflash() -> DraftTraining:
    """How the DFlash draft is trained."""
    return DraftTraining(140, ["draft=dflash", *DraftTraining().options])


@dataclass
class Recipe:
    """The options of `train_draft/build_shapes.py`.

    Attributes:
        stages: what to build, in this order; a stage that is built with its settings is skipped. A
            stage reads what earlier ones wrote, and resumes where it was stopped.
        output: where weights, records and checkpoints go.
        threads: threads that torch uses; null leaves the choice to torch.
    """

    stages: list[str] = field(default_factory=lambda: list(STAGES))
    output: str = "outputs/build_shapes"
    threads: int | None = None
    classifier: EvaluatorTraining = field(default_factory=EvaluatorTraining)
    target: TargetTraining = field(default_factory=TargetTraining)
    independent: TargetTraining = field(default_factory=lambda: TargetTraining(steps=1000))
    draft: DraftTraining = field(default_factory=DraftTraining)
    parallel: DraftTraining = field(default_factory=_parallel)
    medusa: DraftTraining = field(default_factory=_medusa)
    dflash: DraftTraining = field(default_factory=_dflash)
    clip: EvaluatorTraining = field(
        default_factory=lambda: EvaluatorTraining(steps=1500, batch_size=128, lr=1e-3)
    )
    kl_decoder: KLTraining = field(default_factory=KLTraining)
    mar: MARTraining = field(default_factory=MARTraining)
    mar_draft: MARDistillation = field(default_factory=MARDistillation)


def build(recipe: Recipe) -> None:
    """Run the chosen stages in order; each writes its weights and its record into `output`.

    Raises:
        TemperaError: there is no such stage, or what an earlier one writes is missing.
    """
    unknown = [stage for stage in recipe.stages if stage not in STAGES]
    if unknown:
        raise TemperaError(
            f"stages= has no stage {', '.join(unknown)}; choose among {', '.join(STAGES)}"
        )
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    output = Path(recipe.output)
    for stage in recipe.stages:
        settings = getattr(recipe, stage)
        run = output / f"{stage}_run"
        if is_built(output / stage, settings):
            log.info("%s is built", stage)
            continue
        run.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        metrics = STAGES[stage](output, settings, run)
        record(output / stage, settings, metrics, began)


def build_classifier(output: Path, settings: EvaluatorTraining, run: Path) -> Metrics:
    """The classifier of attributes."""
    model, metrics = evaluators.train_classifier(settings, run)
    write_half(output / "classifier", model, {"width": model.width})
    return metrics


def build_clip(output: Path, settings: EvaluatorTraining, run: Path) -> Metrics:
    """The tiny CLIP, in open_clip's layout."""
    model, metrics = evaluators.train_clip(settings, run)
    write_half(output / "clip", model, evaluators.TINY_CLIP, prefix="open_clip_")
    return metrics


def build_target(output: Path, settings: TargetTraining, run: Path) -> Metrics:
    """The target, and its text encoder in `output`/text_encoder."""
    return _train_target(output, settings, run, target.TINY_TARGET, "target", "text_encoder")


def build_independent(output: Path, settings: TargetTraining, run: Path) -> Metrics:
    """A half-size target with a text encoder of its own, the draft of `drafter=independent`."""
    place = "independent/text_encoder"
    return _train_target(output, settings, run, target.HALF_TARGET, "independent", place)


def _train_target(
    output: Path, settings: TargetTraining, run: Path, config: LlamaGenConfig, name: str, text: str
) -> Metrics:
    """A target in `output`/`name`, and its text encoder in `output`/`text`."""
    model, metrics = target.train_target(settings, run, config)
    write_half(output / name, model.network, asdict(model.network.config))
    write_half(output / text, model.text, model.text.config)
    return metrics


def build_draft(output: Path, settings: DraftTraining, run: Path, name: str = "draft") -> Metrics:
    """A draft, as the package trains it."""
    options = [written("weights", output.absolute()), written("directory", run)]
    options += [f"training.steps={settings.steps}", f"seed={settings.seed}", *settings.options]
    metrics = train.main(composed("train_draft", ["model=shapes", "tracking=none", *options]))
    shutil.copytree(run / DRAFT, output / name, dirs_exist_ok=True)
    write_half(output / name, load_file(run / DRAFT / WEIGHTS), read_json(run / DRAFT / CONFIG))
    best: Metrics = metrics["best"]
    return best


def build_kl(output: Path, settings: KLTraining, run: Path) -> Metrics:
    """The continuous tokenizer."""
    model = kl.train_kl(settings, run, kl.TINY_KL)
    model = kl.train_decoder(settings, run / "decoder", model)
    write_half(output / "kl_decoder", model, model.config)
    return kl.measure_kl(model, settings)


def build_mar(output: Path, settings: MARTraining, run: Path) -> Metrics:
    """The small MAR, cycle after cycle, each from the weights of the one before as they are kept,
    rounded.
    """
    network = mar.new_mar(mar.TINY_MAR, settings.seed)
    vq = read_kl(output / "kl_decoder")
    for number, cycle in enumerate(settings.cycles, 1):
        network = mar.train_mar(cycle, vq, run / f"cycle_{number}", network)
        write_half(output / "mar", network, network.config)
        network = read_mar(output / "mar")
    return mar.measure_mar(network, vq, cycle)


def build_mar_draft(output: Path, settings: MARDistillation, run: Path) -> Metrics:
    """The draft for the MAR."""
    teacher = read_mar(output / "mar")
    vq = read_kl(output / "kl_decoder")
    network = mar_draft.distil_mar(settings, vq, run, teacher, mar_draft.TINY_DRAFT)
    write_half(output / "mar_draft", network, network.config)
    return mar_draft.measure_draft(network, teacher, vq, settings)


STAGES: dict[str, Callable[[Path, Any, Path], Metrics]] = {
    "classifier": build_classifier,
    "target": build_target,
    "independent": build_independent,
    "draft": build_draft,
    "parallel": partial(build_draft, name="parallel"),
    "medusa": partial(build_draft, name="medusa"),
    "dflash": partial(build_draft, name="dflash"),
    "clip": build_clip,
    "kl_decoder": build_kl,
    "mar": build_mar,
    "mar_draft": build_mar_draft,
}
