"""The types and ranges of each script's own options, the ones at the top of conf/<script>.yaml;
their defaults stand there alone. Options of a group are checked by the objects that they make.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from tempera.config.instantiate import fitting
from tempera.errors import TemperaError

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Prompts = Annotated[int, Field(ge=1, le=10**7)]
"""A number of prompts, which are held in memory."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Computed:
    """Of every script that runs networks."""

    seed: Seed
    device: str
    dtype: DType
    weights: str = ""  # of most models


class Generate(Computed):
    """conf/generate.yaml."""

    compile: bool
    batch_size: Positive | Literal["auto"]
    truncate: bool
    diagnostics: bool


class Eval(Generate):
    """conf/eval.yaml."""

    prompt: str | None
    limit: Prompts | None
    offset: Count
    replays: Count
    expected_length: float | None
    against: str | None
    matching: dict[str, Any]
    speed: dict[str, Any]
    verbose: bool
    dry_run: bool


class Calibrate(Computed):
    """conf/calibrate.yaml."""

    batch_size: Positive
    truncate: bool
    limit: Prompts | None
    offset: Count
    statistics: Path


class GpuCheck:
    """conf/gpu_check.yaml."""

    device: str
    families: list[str]
    real: list[str]
    compile: bool
    batch_sizes: list[Positive]
    repeats: Positive
    minutes: Annotated[float, Field(ge=0)]


class Tune(Computed):
    """conf/tune.yaml."""

    budget: str
    batch_size: Positive
    depths: list[int]
    trees: list[str]
    prices: list[float]
    deltas: list[float]
    compile: bool
    truncate: bool
    limit: Prompts | None
    offset: Count
    runs: Positive
    images: Positive
    timed: Positive


class Train(Computed):
    """conf/train_draft.yaml; `tempera.training.recipe.Recipe` holds the ranges of the others."""

    mixed_precision: Literal["no", "bf16", "auto"]
    start: str | None
    steps: Positive | None
    epochs: Annotated[float, Field(gt=0)] | None
    gradient_accumulation: Positive
    limit: Positive | None
    truncate: bool
    dry_run: bool


class Prepare(Computed):
    """conf/prepare.yaml."""

    shard_size: Positive
    batch_size: Positive
    limit: Positive | None
    max_broken: Count
    dry_run: bool
    truncate: bool


class Report:
    """conf/report.yaml."""

    runs: str | int | list[str]
    output: Path
    baseline: str | None
    publish: bool
    project: str
    entity: str | None


KINDS: dict[str, type] = {
    "generate": Generate,
    "eval": Eval,
    "bench": Computed,
    "calibrate": Calibrate,
    "gpu_check": GpuCheck,
    "tune": Tune,
    "train_draft": Train,
    "prepare": Prepare,
    "report": Report,
}
"""By script, the types of its options."""


def check_options(cfg: DictConfig, config_name: str) -> None:
    """Check a script's own options, and convert their scalars in place: `"7"` becomes 7.

    Raises:
        TemperaError: an option has no value, or one that does not fit its type.
    """
    kinds: Any = KINDS.get(config_name, object)
    for name, hint in get_type_hints(kinds, include_extras=True).items():
        if name not in cfg:
            if hasattr(kinds, name):
                continue
            raise TemperaError(f"`{name}` needs a value: give {name}=VALUE", option=name)
        fit = fitting(value := cfg[name], hint, name)
        if type(fit) is not type(value) and isinstance(fit, bool | int | float | str):
            OmegaConf.update(cfg, name, fit)
