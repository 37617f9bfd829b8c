"""`tempera-build`: train the networks of the shipped model on the procedural world: image
tokenizer, target with text encoder, its drafts, classifier, tiny CLIP and MAR.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig

from tempera.commands import train
from tempera.commands.costs import tell_slow_bfloat16
from tempera.config.compose import composed, written
from tempera.config.instantiate import check_value, instantiate
from tempera.errors import TemperaError
from tempera.shapes.build import stages
from tempera.shapes.build.record import LogMetrics, StageRun, is_built, kept_record, machine
from tempera.shapes.build.sampling import Measurement, SamplingChoice, choose_sampling, measure
from tempera.training.trainer import DRAFT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftTraining:
    """How a draft is trained: as `tempera-train model=shapes` trains it.

    Attributes:
        steps: of training.
        options: more of that command's, as `name=value`.
    """

    steps: int = 3000
    options: tuple[str, ...] = ()
    seed: int = 0


def build_draft(
    output: Path, settings: DraftTraining, report: LogMetrics, name: str = "draft"
) -> None:
    """Train a draft into `output`/`name`; continues where it was stopped."""
    with StageRun(output, name, settings, report) as record:
        options = [written("weights", output.absolute()), written("directory", record.run)]
        options += [f"steps={settings.steps}", f"seed={settings.seed}", *settings.options]
        metrics = train.main(composed("train_draft", ["model=shapes", "tracking=none", *options]))
        record.metrics = metrics["best"]
        shutil.copytree(record.run / DRAFT, record.directory, dirs_exist_ok=True)
        stages.round_network(record.directory)


def choose(output: Path, settings: SamplingChoice, report: LogMetrics) -> None:
    """Choose guidance, top-k and temperature, for conf/model/shapes.yaml."""
    with StageRun(output, "sampling", settings, report) as record:
        best = choose_sampling(output, settings, record.report)
        record.metrics = best
    options = " ".join(f"{name}={best[name]:g}" for name in ("guidance", "top_k", "temperature"))
    print(f"best: {options}, for conf/model/shapes.yaml")


def measured(output: Path, settings: Measurement, report: LogMetrics) -> None:
    """Measure the target with the chosen options."""
    with StageRun(output, "measured", settings, report) as record:
        record.metrics = measure(output, settings, record.report)


STAGES: dict[str, Callable[..., None]] = {
    "tokenizer": stages.build_tokenizer,
    "classifier": stages.build_classifier,
    "target": stages.build_target,
    "sampling": choose,
    "measured": measured,
    "independent": stages.build_independent,
    "draft": build_draft,
    "parallel": partial(build_draft, name="parallel"),
    "clip": stages.build_clip,
    "kl": stages.build_kl,
    "kl_decoder": stages.build_kl_decoder,
    "mar": stages.build_mar,
    "mar_draft": stages.build_mar_draft,
}


def rebuild(output: Path, stage: str, settings: Any, report: LogMetrics) -> None:
    """Build a stage of `output` once more, elsewhere and from what else is there, and compare the
    hashes of its weights with its record's. A record of another machine cannot be compared bit by
    bit: the stage is then built twice, and the two are compared.

    Raises:
        TemperaError: the hashes differ; the stage is not built, or with other settings.
    """
    record = kept_record(output / stage, settings)
    before, same_machine = record["sha256"], record["machine"] == machine()
    if not same_machine:
        before = _hashes_of_another(output, stage, settings, report)
    after = _hashes_of_another(output, stage, settings, report)
    differing = [name for name in before if before[name] != after[name]]
    if differing:
        raise TemperaError(
            f"{stage}, built again, differs from {'its record' if same_machine else 'itself'} in "
            f"{', '.join(differing)}: something that decides its weights is not in its settings."
        )
    made = "as its record says" if same_machine else f"twice alike; {record['machine']} made it"
    print(f"{stage} was built again, {made}: {', '.join(after.values())}")


def _hashes_of_another(
    output: Path, stage: str, settings: Any, report: LogMetrics
) -> dict[str, str]:
    """Of the weights of a stage that is built beside copies of all the others in `output`."""
    with TemporaryDirectory() as place:
        for path in sorted(output.iterdir()):
            if path.is_dir() and path.name != stage and not path.name.endswith("_run"):
                shutil.copytree(path, Path(place) / path.name)
        STAGES[stage](Path(place), settings, report)
        hashes: dict[str, str] = kept_record(Path(place) / stage, settings)["sha256"]
        return hashes


def main(cfg: DictConfig) -> None:
    """Run the chosen stages in order; each writes its weights and its record into `output`. Or
    build one of them again, and compare.
    """
    for name, kind in (("threads", int | None), ("output", Path)):
        check_value(cfg, name, cfg[name], kind)
    if cfg.threads is not None and not 1 <= cfg.threads <= 1024:
        raise TemperaError(f"threads={cfg.threads} is not possible: give 1 to 1024, or null")
    chosen = [cfg.rebuild] if cfg.rebuild else list(cfg.stages)
    unknown = [stage for stage in chosen if stage not in STAGES]
    if unknown:
        option = "rebuild" if cfg.rebuild else "stages"
        raise TemperaError(
            f"{option}= has no stage {', '.join(map(str, unknown))}; choose among "
            f"{', '.join(STAGES)}"
        )
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    output, settings = Path(str(cfg.output)), {stage: instantiate(cfg[stage]) for stage in chosen}
    for stage in chosen:
        _check(stage, settings[stage])
    for stage in chosen:

        def report(values: dict[str, float], step: int, stage: str = stage) -> None:
            log.info("%s %d: %s", stage, step, values)

        if cfg.rebuild:
            rebuild(output, stage, settings[stage], report)
        elif is_built(output / stage, settings[stage]):
            log.info("%s is built", stage)
        else:
            if getattr(settings[stage], "bf16", False):
                device = torch.device("cpu")
                tell_slow_bfloat16(f"{stage}.bf16=true", f"{stage}.bf16=false", device)
            STAGES[stage](output, settings[stage], report)
    if not cfg.rebuild:
        stages.write_readme(output)


AT_LEAST_1 = ("steps", "batch_size", "scenes", "part", "prompts", "repeats", "save_every")
SHARES = ("caption_dropout", "cfg_dropout", "calm", "decay", "blurred", "pairs", "ema", "shown")


def _check(stage: str, settings: Any) -> None:
    """Raise TemperaError for a number that no network can be trained with."""
    for name, value in asdict(settings).items():
        option = f"{stage}.{name}={value}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if value < 0:
            raise TemperaError(f"{option} is not possible: give 0 or more")
        small = name.endswith(AT_LEAST_1) and not name.endswith(("warmup_steps", "free_steps"))
        if small and value < 1:
            raise TemperaError(f"{option} is too small: give at least 1")
        if name in SHARES and value > 1:
            raise TemperaError(f"{option} is not a share: give a number from 0 to 1")
        if name.endswith("lr") and not value:
            raise TemperaError(f"{option} would train nothing: give a number above 0")
