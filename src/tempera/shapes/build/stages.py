"""Building the shipped model, stage by stage, into one directory; each stage leaves a record of how
it was trained.
"""

import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempera.image_tokenizers import kl
from tempera.runtime.files import write_json, write_text
from tempera.runtime.network_directory import write_network
from tempera.shapes.build import mar
from tempera.shapes.build.evaluators import (
    EvaluatorTraining,
    LogMetrics,
    train_classifier,
    train_clip,
)
from tempera.shapes.build.target import HALF_TARGET, TargetModel, TargetTraining, train_target
from tempera.shapes.build.tokenizer import TokenizerTraining, train_tokenizer
from tempera.shapes.clip import TINY_CLIP
from tempera.shapes.networks import load_tokenizer, target_config
from tempera.targets.llamagen import to_official

log = logging.getLogger(__name__)


def build_tokenizer(output: Path, settings: TokenizerTraining, report: LogMetrics) -> None:
    """Train the VQ tokenizer into `output`/tokenizer."""
    with _recorded(output / "tokenizer", settings) as record:
        model, record.metrics = train_tokenizer(settings, report=report)
        save_network(model.state_dict(), asdict(model.config), output / "tokenizer")


def build_target(output: Path, settings: TargetTraining, report: LogMetrics) -> None:
    """Train the target and its text encoder into `output`/target and `output`/text_encoder;
    continues where it was stopped.
    """
    with _recorded(output / "target", settings) as record:
        model, record.metrics = train_target(
            settings, load_tokenizer(output / "tokenizer"), output / "target_run", report=report
        )
        _save_target(model, output / "target", output / "text_encoder")


def build_independent(output: Path, settings: TargetTraining, report: LogMetrics) -> None:
    """Train a half-size target with a text encoder of its own, the draft of `drafter=independent`,
    into `output`/independent.
    """
    directory = output / "independent"
    with _recorded(directory, settings) as record:
        tokenizer, run = load_tokenizer(output / "tokenizer"), output / "independent_run"
        model, record.metrics = train_target(settings, tokenizer, run, HALF_TARGET, report=report)
        _save_target(model, directory, directory / "text_encoder")


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
    with _recorded(output / "classifier", settings) as record:
        model, record.metrics = train_classifier(
            settings, load_tokenizer(output / "tokenizer"), report
        )
        save_network(model.state_dict(), {"width": model.width}, output / "classifier")


def build_clip(output: Path, settings: EvaluatorTraining, report: LogMetrics) -> None:
    """Train the tiny CLIP into `output`/clip, in open_clip's layout."""
    with _recorded(output / "clip", settings) as record:
        model, record.metrics = train_clip(settings, load_tokenizer(output / "tokenizer"), report)
        save_network(model.state_dict(), TINY_CLIP, output / "clip", prefix="open_clip_")


def build_mar(output: Path, settings: mar.MARTraining, report: LogMetrics) -> None:
    """Train the continuous tokenizer, the small MAR and its draft into `output`/kl, /mar and
    /mar_draft; continues where it was stopped.
    """
    if not _is_built(output / "kl", settings, mar.OF_TOKENIZER):
        with _recorded(output / "kl", replace(settings, steps=settings.tokenizer_steps)) as record:
            trained, record.metrics = mar.train_kl(settings, mar.TINY_KL, report)
            save_network(trained.state_dict(), asdict(trained.config), output / "kl")
    tokenizer = kl.read_kl(output / "kl")  # as it is kept, rounded
    latents = mar.kept_latents(settings, tokenizer, output / "kl_run" / "latents.safetensors")
    for name, steps, config in (
        ("mar", settings.steps, mar.TINY_MAR),
        ("mar_draft", settings.draft_steps, mar.TINY_DRAFT),
    ):
        with _recorded(output / name, replace(settings, steps=steps)) as record:
            network, record.metrics = mar.train_mar(
                settings, steps, tokenizer, latents, output / f"{name}_run", config, report
            )
            save_network(network.state_dict(), asdict(network.config), output / name)


def _is_built(directory: Path, settings: Any, names: Sequence[str]) -> bool:
    """Whether a stage left its record here, with the same settings of these names."""
    record = directory / "training.json"
    if not record.is_file():
        return False
    made = json.loads(record.read_text(encoding="utf-8"))["settings"]
    return all(made.get(name) == getattr(settings, name) for name in names)


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


class _recorded:
    """Time a stage and write training.json beside its weights when it succeeds."""

    def __init__(self, directory: Path, settings: Any) -> None:
        self.directory, self.settings, self.metrics = directory, settings, dict[str, float]()

    def __enter__(self) -> "_recorded":
        log.info("building %s", self.directory)
        self.start = time.perf_counter()
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if kind is None:
            seconds = round(time.perf_counter() - self.start)
            threads = torch.get_num_threads()
            machine = f"{platform.machine()}, {threads} threads, torch {torch.__version__}"
            record = {
                "settings": asdict(self.settings),
                "metrics": self.metrics,
                "seconds_of_last_run": seconds,
                "machine": machine,
            }
            write_json(self.directory / "training.json", record)
            log.info("built %s in %d s: %s", self.directory, seconds, self.metrics)


def write_readme(output: Path) -> None:
    """Write README.md beside the weights: what each network is, the commands, seeds, times and
    final metrics, from the stages' records.
    """
    lines = [
        "# The shipped model",
        "",
        "Trained by this repository's own scripts on the procedural world of "
        "`tempera.shapes.world`; nothing else went in. Weights are",
        "float16 safetensors, computed with in float32. To rebuild everything (about six hours "
        "on two CPU cores):",
        "",
        "    python train_draft/build_shapes.py output=src/tempera/shapes/weights",
        "    python train_draft/main.py model=shapes",
        "",
        "| network | parameters file | seed | steps | seconds | final metrics | machine |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(output.glob("*/training.json")):
        record = json.loads(path.read_text())
        size = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
        settings = record["settings"]
        cells = [
            path.parent.name,
            f"{size / 1e6:.1f} MB",
            settings["seed"],
            settings["steps"],
            record["seconds_of_last_run"],
            metrics,
        ]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, record["machine"]]) + " |")
    lines += ["", "Every `training.json` holds its stage's full settings.", ""]
    write_text(output / "README.md", "\n".join(lines))
