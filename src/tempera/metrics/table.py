"""The table of metrics. The console, report.md, results.csv, the Pareto plots, the paper tables and
the W&B report are all derived from its entries.

A new metric is one entry here and the function that computes it: a score of each picture or a
distance between sets of pictures (`tempera.metrics.evaluators.Networks`), or a number from the
records of decoding (`tempera.metrics.acceptance`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tempera.errors import TemperaError

Section = Literal["acceptance", "divergence", "speed", "quality"]
BATCHES = (8, 32, 128, 256)
"""Batch sizes above 1 at which a speed-up can be measured."""


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
        in_pareto: its axis in the Pareto plots: `gain` for x; `quality` for y of pareto.png, `more`
            for y of pareto_more.png.
        paired: whether reports compare it with a baseline prompt by prompt.
        scores: columns of results.parquet whose mean over prompts is the metric, empty cells
            excluded; `key` by default.
        per_token: divide a prompt's value by its number of tokens.
        weight: column that weights the prompts' values; equal weights by default.
        macro: average the columns' means, rather than all their entries.
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
    in_pareto: Literal["gain", "quality", "more"] | None = None
    paired: bool = False
    scores: tuple[str, ...] = ()
    per_token: bool = False
    weight: str = ""
    macro: bool = False
    of_set: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of results.parquet that the metric is computed from."""
        return self.scores or (self.key,)

    @property
    def heading(self) -> str:
        """The title with an arrow that points to better quality."""
        arrow = {None: "", True: " ↑", False: " ↓"}[self.higher_is_better]
        return self.title + arrow

    def of_prompt(self, row: Mapping[str, Any]) -> tuple[float, float] | None:
        """A prompt's value and weight, from its row of results.parquet; None if it has no value."""
        known = [row[name] for name in self.columns if row.get(name) is not None]
        if not known:
            return None
        value = float(sum(known)) / len(known)
        weight = float(row[self.weight]) if self.weight else 1.0
        return (value / len(row["tokens"]) if self.per_token else value), weight


def _speedup_at(batch: int) -> Metric:
    return Metric(
        f"speedup_{batch}",
        f"speed-up at batch {batch}",
        "seconds per image, paired with AR",
        ".2f",
        section="speed",
        in_report=True,
    )


def _accuracy(
    name: str,
    *attributes: str,
    unit: str = "",
    in_report: bool = False,
    in_pareto: Literal["quality"] | None = None,
    paired: bool = False,
) -> Metric:
    """The share of the attributes named in the prompts that the pictures show."""
    return Metric(
        f"{name}_accuracy",
        f"{name} accuracy",
        unit,
        ".3f",
        higher_is_better=True,
        in_report=in_report,
        in_pareto=in_pareto,
        paired=paired,
        scores=attributes,
    )


def _preference(key: str, title: str, form: str) -> Metric:
    """A network's estimate of human preference."""
    return Metric(
        key,
        title,
        "",
        form,
        higher_is_better=True,
        in_report=True,
        in_pareto="more",
        paired=True,
    )


_TASKS = {
    "single_object": "one object",
    "two_object": "two objects",
    "counting": "counting",
    "colors": "colours",
    "position": "position",
    "color_attr": "colours of two objects",
}
_SHAPE, _COLOUR = ("shape1", "shape2"), ("colour1", "colour2")

METRICS: tuple[Metric, ...] = (
    Metric(
        "accepted_length",
        "accepted length",
        "tokens per round; AR has 1.00",
        ".2f",
        section="acceptance",
        in_report=True,
        in_pareto="gain",
        paired=True,
        weight="rounds",
    ),
    Metric("tau", "τ", "accepted draft tokens per round", ".2f", section="acceptance"),
    Metric(
        "acceptance_rate",
        "α",
        "accepted ÷ tested draft tokens",
        section="acceptance",
        in_report=True,
    ),
    Metric(
        "target_passes",
        "passes of the target",
        "per image",
        ".1f",
        section="acceptance",
        in_report=True,
    ),
    Metric(
        "proximity",
        "proximity set",
        "codes in LANTERN's A, first draft",
        ".1f",
        section="acceptance",
    ),
    Metric("residual_trials", "residual trials", "per image", ".1f", section="acceptance"),
    Metric(
        "trials_per_rejection",
        "residual trials per rejection",
        "",
        ".2f",
        section="acceptance",
        in_report=True,
    ),
    Metric(
        "residual_failures",
        "residual failures",
        "per image; the target draws instead",
        ".2f",
        section="acceptance",
    ),
    Metric("tv", "TV(p, q)", "draft against target", section="divergence"),
    Metric(
        "tv_bound",
        "TV bound",
        "summed over an image",
        ".2f",
        higher_is_better=False,
        section="divergence",
        in_pareto="more",
        paired=True,
    ),
    Metric(
        "kl_per_token",
        "KL bound per token",
        "nats, emitted distribution against target",
        ".4f",
        higher_is_better=False,
        section="divergence",
        in_report=True,
        in_pareto="quality",
        paired=True,
    ),
    Metric(
        "logprob_per_token",
        "log-probability per token",
        "nats, under the target",
        section="divergence",
        paired=True,
        scores=("logprob",),
        per_token=True,
    ),
    Metric(
        "logprob_deviation",
        "deviation of log-probability",
        "nats, over all tokens",
        section="divergence",
    ),
    Metric(
        "top1", "target's top-1", "mean probability of the likeliest token", section="divergence"
    ),
    Metric("top10", "target's top-10", "mean mass of the ten likeliest", section="divergence"),
    Metric("entropy", "target's entropy", "nats", ".2f", section="divergence"),
    Metric("throughput", "throughput", "tokens per second, in batches", ".0f", section="speed"),
    Metric("latency_ar", "latency, AR", "seconds per image, batch 1", section="speed"),
    Metric("latency", "latency", "seconds per image, batch 1", section="speed"),
    Metric(
        "speedup",
        "speed-up",
        "batch 1, paired with AR",
        ".2f",
        section="speed",
        in_report=True,
        in_pareto="gain",
    ),
    *map(_speedup_at, BATCHES),
    Metric(
        "efficiency",
        "speed-up ÷ accepted length",
        "1 is the limit",
        ".2f",
        section="speed",
        in_report=True,
    ),
    Metric(
        "fid",
        "FID",
        "",
        ".2f",
        higher_is_better=False,
        in_report=True,
        in_pareto="quality",
        paired=True,
        of_set=True,
    ),
    Metric(
        "kid",
        "KID",
        "",
        ".4f",
        higher_is_better=False,
        in_report=True,
        in_pareto="more",
        paired=True,
        of_set=True,
    ),
    Metric(
        "precision",
        "precision",
        "",
        ".3f",
        higher_is_better=True,
        in_report=True,
        in_pareto="more",
        paired=True,
    ),
    Metric("recall", "recall", "", ".3f", True, in_report=True, in_pareto="more"),
    Metric(
        "inception_score",
        "inception score",
        "",
        ".2f",
        higher_is_better=True,
        in_report=True,
        in_pareto="more",
    ),
    Metric("precision_vgg", "precision, VGG", "", ".3f", True, in_report=True, paired=True),
    Metric("recall_vgg", "recall, VGG", "", ".3f", True, in_report=True),
    Metric(
        "clip_score",
        "CLIP score",
        "cosine",
        ".4f",
        higher_is_better=True,
        in_report=True,
        in_pareto="quality",
        paired=True,
    ),
    _preference("hpsv2", "HPSv2.1", ".2f"),
    _preference("image_reward", "ImageReward", ".4f"),
    _preference("pick_score", "PickScore", ".2f"),
    _preference("aesthetic", "aesthetic score", ".3f"),
    Metric(
        "geneval",
        "GenEval",
        "mean of its six tasks",
        ".3f",
        higher_is_better=True,
        in_report=True,
        in_pareto="more",
        scores=tuple(f"geneval_{task}" for task in _TASKS),
        macro=True,
    ),
    *(
        Metric(f"geneval_{task}", f"GenEval, {title}", "", ".3f", higher_is_better=True)
        for task, title in _TASKS.items()
    ),
    _accuracy(
        "attribute",
        *_SHAPE,
        *_COLOUR,
        "background",
        unit="shape, colour, background",
        in_report=True,
        in_pareto="quality",
        paired=True,
    ),
    _accuracy("shape", *_SHAPE, paired=True),
    _accuracy("colour", *_COLOUR, paired=True),
    _accuracy("background", "background", paired=True),
    _accuracy("size", "size1", "size2"),
    _accuracy("relation", "relation"),
    _accuracy("pattern", "pattern"),
)
"""All metrics, in the order of the console and of results.csv."""


def find(key: str) -> Metric:
    """The metric with this key.

    Raises:
        TemperaError: the table has no such metric.
    """
    found = next((metric for metric in METRICS if metric.key == key), None)
    if found is None:
        raise TemperaError(
            f"there is no metric `{key}`: add an entry to METRICS in tempera/metrics/table.py."
        )
    return found


def report_order() -> list[Metric]:
    """All metrics, in the order of the report's columns and panels."""
    sections: tuple[Section, ...] = ("acceptance", "speed", "quality", "divergence")
    return sorted(METRICS, key=lambda metric: sections.index(metric.section))
