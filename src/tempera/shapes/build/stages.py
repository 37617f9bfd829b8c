"""Building the shapes model, stage by stage, into one directory; each stage leaves a record of how
it was trained.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tempera.continuous.mar import read_mar
from tempera.decoding.probabilities import Sampling
from tempera.image_tokenizers.kl import KLModel, read_kl
from tempera.runtime.files import read_json, write_text
from tempera.runtime.network_directory import CONFIG, WEIGHTS, write_network
from tempera.shapes.build import kl, mar, mar_draft
from tempera.shapes.build.evaluators import EvaluatorTraining, train_classifier, train_clip
from tempera.shapes.build.looks import Looks
from tempera.shapes.build.record import LogMetrics, StageRun
from tempera.shapes.build.target import (
    HALF_TARGET,
    TINY_TARGET,
    TargetModel,
    TargetTraining,
    train_target,
)
from tempera.shapes.build.tokenizer import TokenizerTraining, train_tokenizer
from tempera.shapes.clip import TINY_CLIP
from tempera.shapes.networks import load_tokenizer, target_config
from tempera.targets.llamagen import LlamaGenConfig, to_official

log = logging.getLogger(__name__)

SAMPLING = Sampling(guidance=2.0, temperature=1.0, top_k=32)
"""Of the pictures that are looked at while the target trains."""
LOOKED_AT = 48
"""How many these are."""


def build_tokenizer(output: Path, settings: TokenizerTraining, report: LogMetrics) -> None:
    """Train the VQ tokenizer into `output`/tokenizer; continues where it was stopped."""
    with StageRun(output, "tokenizer", settings, report) as record:
        model, record.metrics = train_tokenizer(settings, record.run, report=record.report)
        save_network(model.state_dict(), asdict(model.config), output / "tokenizer")


def build_target(output: Path, settings: TargetTraining, report: LogMetrics) -> None:
    """Train the target and its text encoder into `output`/target and `output`/text_encoder;
    continues where it was stopped.
    """
    with StageRun(output, "target", settings, report, beside=("text_encoder",)) as record:
        model, record.metrics = _train_target(output, record, settings, TINY_TARGET)
        _save_target(model, output / "target", output / "text_encoder")


def build_independent(output: Path, settings: TargetTraining, report: LogMetrics) -> None:
    """Train a half-size target with a text encoder of its own, the draft of `drafter=independent`,
    into `output`/independent.
    """
    directory = output / "independent"
    with StageRun(output, "independent", settings, report) as record:
        model, record.metrics = _train_target(output, record, settings, HALF_TARGET)
        _save_target(model, directory, directory / "text_encoder")


def _train_target(
    output: Path, record: StageRun, settings: TargetTraining, config: LlamaGenConfig
) -> tuple[TargetModel, dict[str, float]]:
    """Train with a look at pictures every ten minutes, read by the classifier where that is
    built.
    """
    tokenizer = load_tokenizer(output / "tokenizer")
    look = Looks(record.run / "looks", tokenizer, output / "classifier", SAMPLING, count=LOOKED_AT)
    model, metrics = train_target(settings, tokenizer, record.run, config, record.report, look)
    return model, metrics | {
        f"look_{name}": value for name, value in look.write(model, settings.steps).items()
    }


def _save_target(model: TargetModel, network_directory: Path, text_directory: Path) -> None:
    network = model.network
    save_network(
        to_official(network.state_dict(), network.config.num_attention_heads),
        target_config(network),
        network_directory,
    )
    save_network(model.text.state_dict(), model.text.config, text_directory)


def build_classifier(output: Path, settings: EvaluatorTraining, report: LogMetrics) -> None:
    """Train the attribute classifier into `output`/classifier."""
    with StageRun(output, "classifier", settings, report) as record:
        model, record.metrics = train_classifier(
            settings, load_tokenizer(output / "tokenizer"), record.run, record.report
        )
        save_network(model.state_dict(), {"width": model.width}, output / "classifier")


def build_clip(output: Path, settings: EvaluatorTraining, report: LogMetrics) -> None:
    """Train the tiny CLIP into `output`/clip, in open_clip's layout."""
    with StageRun(output, "clip", settings, report) as record:
        model, record.metrics = train_clip(
            settings, load_tokenizer(output / "tokenizer"), record.run, record.report
        )
        save_network(model.state_dict(), TINY_CLIP, output / "clip", prefix="open_clip_")


def build_kl(output: Path, settings: kl.KLTraining, report: LogMetrics) -> None:
    """Train the continuous tokenizer into `output`/kl."""
    with StageRun(output, "kl", settings, report) as record:
        start = load_tokenizer(output / "tokenizer") if settings.start else None
        model, record.metrics = kl.train_kl(settings, record.run, kl.TINY_KL, start, record.report)
        save_network(model.state_dict(), asdict(model.config), output / "kl")


def build_kl_decoder(output: Path, settings: kl.DecoderTraining, report: LogMetrics) -> None:
    """Train the decoder of `output`/kl further, into `output`/kl_decoder, which is the tokenizer
    that decodes.
    """
    with StageRun(output, "kl_decoder", settings, report) as record:
        model, record.metrics = kl.train_decoder(
            settings, record.run, read_kl(output / "kl"), record.report
        )
        save_network(model.state_dict(), asdict(model.config), output / "kl_decoder")


def build_mar(output: Path, settings: mar.MARTraining, report: LogMetrics) -> None:
    """Train the small MAR into `output`/mar, cycle after cycle; continues where it was stopped."""
    with StageRun(output, "mar", settings, report) as record:
        network = mar.new_mar(mar.TINY_MAR, settings.seed)
        for number, cycle in enumerate(settings.cycles, 1):
            directory = record.run / f"cycle_{number}"
            tokenizer, latents = _tokens(output, cycle)
            network = mar.train_mar(cycle, tokenizer, latents, directory, network, record.report)
            save_network(network.state_dict(), asdict(network.config), directory)
            network = read_mar(directory)  # as it is kept, rounded
        record.metrics = mar.measure_mar(network, tokenizer, cycle)
        save_network(network.state_dict(), asdict(network.config), output / "mar")


def build_mar_draft(output: Path, settings: mar_draft.MARDistillation, report: LogMetrics) -> None:
    """Train the draft for `output`/mar into `output`/mar_draft; continues where it was stopped."""
    with StageRun(output, "mar_draft", settings, report) as record:
        tokenizer, latents = _tokens(output, settings)
        target = read_mar(output / "mar")
        network = mar_draft.distil_mar(
            settings, tokenizer, latents, record.run, target, mar_draft.TINY_DRAFT, record.report
        )
        record.metrics = mar_draft.measure_draft(network, target, tokenizer, settings)
        save_network(network.state_dict(), asdict(network.config), output / "mar_draft")


def _tokens(output: Path, settings: mar.MARSettings) -> tuple[KLModel, mar.Latents]:
    """The continuous tokenizer, as it is kept, rounded, and the scenes that it encoded."""
    tokenizer = read_kl(output / "kl")
    return tokenizer, mar.kept_latents(settings, tokenizer, output / "kl_run")


def save_network(
    state: dict[str, Tensor], config: dict[str, Any], directory: Path, prefix: str = ""
) -> None:
    """Write <prefix>config.json and <prefix>model.safetensors, floats as float16, each file
    atomically.
    """
    half = {
        key: (value.half() if value.is_floating_point() else value).contiguous().clone()
        for key, value in state.items()
    }
    write_network(directory, half, config, prefix)


def round_network(directory: Path) -> None:
    """Round the weights in a directory to float16."""
    save_network(load_file(directory / WEIGHTS), read_json(directory / CONFIG), directory)


def write_readme(output: Path) -> None:
    """Write README.md beside the weights: what each network is, the commands, seeds, times and
    final metrics, from the stages' records.
    """
    lines = [
        "# The shapes model",
        "",
        "Trained by tempera on the world of `tempera.shapes.world`; nothing else went in. Weights",
        "are float16 safetensors, computed with in float32. One command makes them all, and",
        "resumes where it was stopped:",
        "",
        "    tempera-build output=src/tempera/shapes/weights",
        "",
        "and this builds one of them once more and compares its hashes:",
        "",
        "    tempera-build rebuild=kl output=src/tempera/shapes/weights",
        "",
        "Seconds are of the clock, whatever else the machine was doing.",
        "",
        "| network | parameters file | seed | steps | seconds | final metrics | machine |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(output.glob("*/training.json")):
        if path.parent.name.endswith("_run"):
            continue
        record = json.loads(path.read_text())
        size = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
        settings = record["settings"]
        cells = [
            path.parent.name,
            f"{size / 1e6:.1f} MB",
            settings["seed"],
            _steps(settings),
            round(record["seconds"]),
            metrics,
        ]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, record["machine"]]) + " |")
    lines += [
        "",
        "Every `training.json` holds its stage's command, commit, settings and hashes.",
        "",
    ]
    write_text(output / "README.md", "\n".join(lines))


def _steps(settings: dict[str, Any]) -> str:
    """`12000 + 5000` for two cycles."""
    if "steps" not in settings:
        return "–"
    cycles = [settings, *settings.get("further", ())]
    return " + ".join(str(cycle["steps"]) for cycle in cycles)
