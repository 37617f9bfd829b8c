"""The table of metrics, which lies in metrics.yaml. The console, report.md, results.csv, the Pareto
plots, the paper tables and the W&B table are all derived from its entries.

A new metric is one entry there and the function that computes it: a score of each picture or a
distance between sets of pictures (`tempera.metrics.evaluators.Networks`), or a number from the
records of decoding (`tempera.metrics.acceptance`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from tempera.errors import TemperaError

Section = Literal["acceptance", "divergence", "speed", "quality"]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown, and where.

    Args:
        key: its name in metrics.json, results.csv and W&B.
        title: its name in tables and figures.
        unit: unit or explanation, for the console.
        format: format of its values.
        higher_is_better: which way quality improves, shown as an arrow; None for acceptance, speed
            and descriptive metrics.
        section: the kind of metric; reports show acceptance and speed first, then quality, then
            divergence from the target's distribution.
        in_report: whether report.md has a column for it; the console, results.csv and W&B show
            every metric.
        in_pareto: its axis in the Pareto plots: `gain` for x, `quality` for y.
        paired: whether reports compare it with a baseline prompt by prompt.
        scores: columns of results.parquet whose mean over prompts is the metric, empty cells
            excluded; `key` by default.
        per_token: divide a prompt's value by its number of tokens.
        weight: column that weights the prompts' values; equal weights by default.
        fewest: images below which reports do not show it, because it would be mostly bias or
            chance.
        imported: it was computed elsewhere and read from a file (`tempera.metrics.scores`).
        of_set: its column holds pseudo-values of the whole set of images, so runs are compared only
            if they have the same prompts.
    """

    key: str
    title: str
    unit: str = ""
    format: str = ".3f"
    higher_is_better: bool | None = None
    section: Section = "quality"
    in_report: bool = False
    in_pareto: Literal["gain", "quality"] | None = None
    paired: bool = False
    scores: tuple[str, ...] = ()
    per_token: bool = False
    weight: str = ""
    of_set: bool = False
    fewest: int = 0
    imported: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of results.parquet that the metric is computed from."""
        return self.scores or (self.key,)

    @property
    def heading(self) -> str:
        """The title with an arrow that points to better quality."""
        if self.higher_is_better is None:
            return self.title
        return f"{self.title} {'↑' if self.higher_is_better else '↓'}"


def _read(path: Path) -> tuple[Metric, ...]:
    rows: Any = OmegaConf.to_container(OmegaConf.load(path))
    return tuple(Metric(**{**row, "scores": tuple(row.get("scores", ()))}) for row in rows)


METRICS = _read(Path(__file__).with_name("metrics.yaml"))
"""The table, in the order of the console and of results.csv."""


def entry(key: str, higher_is_better: bool | None = None) -> Metric:
    """The entry of a score, made for one that the table lacks."""
    for metric in METRICS:
        if metric.key == key:
            return metric
    return Metric(
        key,
        key,
        format=".4g",
        higher_is_better=higher_is_better,
        in_report=True,
        paired=True,
        imported=True,
    )


def find(key: str) -> Metric:
    """The metric with this key.

    Raises:
        TemperaError: the table has no such metric.
    """
    for metric in METRICS:
        if metric.key == key:
            return metric
    raise TemperaError(f"there is no metric `{key}`: add an entry to tempera/metrics/metrics.yaml.")


def report_order(metrics: Iterable[Metric] = METRICS) -> list[Metric]:
    """Metrics in the order of the report's columns and panels; by default all of the table."""
    sections: tuple[Section, ...] = ("acceptance", "speed", "quality", "divergence")
    return sorted(metrics, key=lambda metric: sections.index(metric.section))
