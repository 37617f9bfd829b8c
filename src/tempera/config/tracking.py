"""`tracking`: what a run sends to its tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tempera.config.compose import option_name
from tempera.config.instantiate import Part, part
from tempera.runtime.tracking import Tracker

if TYPE_CHECKING:
    import pandas as pd


UNTRACKED = ("tracking", "directory", "choices", "overrides")
"""Options that no tracker records."""


@dataclass(frozen=True)
class Tracking:
    """The tracker of a run, whose options are checked, before it starts.

    Attributes:
        tracker: makes it.
        job_type: `eval`, `train_draft` and so on.
        config: the whole resolved configuration.
        group: the experiment, or else the model.
        tags: the choices in Hydra's groups, the other options on the command line, and the
            directory of a sweep.
        name: what tells a job of a sweep from the others: its own options; None outside of sweeps.
    """

    tracker: Part[Tracker]
    job_type: str
    config: Mapping[str, Any]
    group: str
    tags: Sequence[str]
    name: str | None = None

    @classmethod
    def of(
        cls,
        cfg: DictConfig,
        job_type: str,
        choices: Mapping[str, str | None] | None = None,
        overrides: Sequence[str] | None = None,
    ) -> "Tracking":
        """That of a configuration.

        Args:
            cfg: the composed configuration.
            job_type: `eval`, `train_draft` and so on.
            choices, overrides: the choice in each group, and the command line; None asks Hydra.
        """
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        if choices is None:
            choices = hydra.runtime.choices if hydra else {}
        if overrides is None:
            overrides = list(hydra.overrides.task) if hydra else []
        group = choices.get("experiment") or OmegaConf.select(cfg, "model.name") or job_type
        tags = [
            f"{name}={choice}" for name, choice in choices.items() if "/" not in name and choice
        ]
        tags += [one.lstrip("+") for one in overrides if option_name(one) not in choices]
        name = None
        if hydra and hydra.mode == RunMode.MULTIRUN:
            tags.append(f"sweep={Path(hydra.sweep.dir).name}")
            name = " ".join(overrides)
        return cls(part(cfg.tracking), job_type, tracked(cfg), group, tags, name)

    def start(
        self, directory: Path, notes: Mapping[str, Any] | None = None, name: str | None = None
    ) -> Tracker:
        """Start the tracker of a run directory; it records `notes` with the configuration.

        Args:
            name: of the run in the tracker; by default its options in a sweep, else its directory.
        """
        return self.tracker.make(
            directory=directory,
            job_type=self.job_type,
            group=self.group,
            tags=self.tags,
            name=name or self.name,
            config={**self.config, **(notes or {})},
        )

    def record(
        self,
        directory: Path,
        values: Mapping[str, Any],
        table: "pd.DataFrame | None" = None,
        files: Sequence[Path] = (),
    ) -> None:
        """Send what a command found, once it is done: what it measures is not disturbed.

        Args:
            directory: the run directory.
            values: numbers and texts of its summary.
            table: what it prints.
            files: what it wrote, kept as an artifact.
        """
        with self.start(directory) as tracker:
            tracker.summary(values)
            if table is not None:
                rows = table.astype(str).to_numpy().tolist()
                tracker.table(self.job_type, [*map(str, table)], rows)
            if files:
                tracker.artifact(f"{self.job_type}-{directory.name}", self.job_type, files)


def tracked(cfg: DictConfig) -> dict[str, Any]:
    """The options that a tracker records, in plain Python, with interpolations resolved."""
    options: dict[str, Any] = {}
    for name in map(str, cfg):
        if name not in UNTRACKED and not OmegaConf.is_missing(cfg, name):
            value = cfg[name]
            is_node = OmegaConf.is_config(value)
            options[name] = OmegaConf.to_container(value, resolve=True) if is_node else value
    return options
