"""`tempera-bench`: the time of a round and its parts, without a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from tempera.commands.bfloat16 import tell_bfloat16
from tempera.commands.costs import CAPTION, dry_decoding
from tempera.config.instantiate import from_options, product
from tempera.config.parts import Parts
from tempera.config.tracking import Tracking
from tempera.decoding.timing import PARTS
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import (
    BenchmarkColumn,
    BenchmarkPlan,
    BenchmarkReport,
    Spread,
    measure,
    room,
)
from tempera.evaluation.launches import Kernel, Launches, launches
from tempera.evaluation.pipeline import Method
from tempera.reporting.tables import Cell, Output, Section, show, table, texts, transposed
from tempera.runtime.files import write_json

MILLISECONDS = ".4g"
FORMATS = {
    "speed-up ÷ accepted length": ".2f",
    "the same, if drafting took no time": ".2f",
    "break-even accepted length": ".2f",
    "peak memory, GiB": ".2f",
    "images/s of AR": ".3g",
    "AR ÷ its limit": ".2f",
    "accepted length": ".2f",
    "speed-up of whole images": ".2f",
    **{
        f"{what} in a round{of}": ".0f"
        for what in ("operators", "kernels", "graph replays")
        for of in (" of AR", "")
    },
}
"""Of what is no time."""


def main(cfg: DictConfig) -> None:
    """Measure, print a table and write bench.json."""
    plan = read_options(cfg)
    tracking = Tracking.of(cfg, "bench")
    parts = Parts.of(cfg)
    if plan.kernels and parts.placement.device.type != "cuda":
        raise TemperaError(
            f"kernels=true needs a GPU, but the device is {parts.placement.device}: give "
            "kernels=false, or run this on a machine with a GPU",
            option="kernels",
        )
    rule = parts.rule()
    if cfg.dry_run:
        sizes = ", ".join(map(str, plan.batch_sizes))
        work = f"time rounds in images of {{tokens}} tokens, {sizes} at a time"
        dry_decoding(parts, [CAPTION] * max(plan.batch_sizes), work, pictures=False)
        return
    target = parts.fast_target()
    console = Output()
    with console.status("timing") as status:
        method = parts.method(target, rule)
        report = measure(target, method, plan, lambda part: status.update(f"timing: {part}"))
        tell_bfloat16(parts.placement, target, method)
        status.update("counting the kernels of a round")
        discrete = cast(Method, method) if parts.is_discrete else None
        counts = [_launches(target, discrete, size) for size in plan.batch_sizes]
    # that of the weights differs from the target's for float16 on a CPU
    report = replace(report, dtype=parts.placement.dtype_name)
    made_of = {"weights": cfg.model.get("weights"), "draft": parts.draft}
    section = as_table(report, parts.model, made_of, counts)
    shown = transposed(section)
    show(shown, section.title, console)
    if plan.kernels:
        for size, by_round in zip(plan.batch_sizes, counts, strict=True):
            for of, counted in by_round.items():
                title = f"kernels in a round{of or ' of the method'} · batch {size}"
                show(texts(kernel_table(title, counted.by_name)), title, console)
    directory = Path(str(cfg.directory))
    file = directory / "bench.json"
    launched = [{name: asdict(each) for name, each in one.items()} for one in counts]
    content = {"model": parts.model, "made_of": made_of, **asdict(report)}
    content["launches"] = launched
    write_json(file, content)
    tracking.record(directory, _medians(report), shown, [file])


def read_options(cfg: DictConfig) -> BenchmarkPlan:
    """What this command reads itself; a sweep reads it of all jobs before the first begins.

    Raises:
        TemperaError: also for a method without rounds to time.
    """
    plan = from_options(cfg, BenchmarkPlan)
    is_discrete = cfg.model.get("tokens", "discrete") == "discrete"
    if not is_discrete and "gamma" not in cfg.decoding:
        raise TemperaError(
            "a benchmark of continuous tokens times rounds of draft and verification: choose "
            "method=cspd or cspd_exact.",
            option="method",
        )
    if is_discrete and product(cfg.drafter) is NoDraft:
        raise TemperaError(
            "a benchmark times rounds of draft and verification against plain autoregression: "
            "choose another method, such as method=eagle.",
            option="method",
        )
    if plan.kernels and not is_discrete:
        raise TemperaError(
            "kernels=true is only for models with discrete tokens: give kernels=false",
            option="kernels",
        )
    return plan


def _launches(target: Any, method: Method | None, batch_size: int) -> dict[str, Launches]:
    """What rounds of AR and of the method launch; nothing for continuous tokens."""
    if method is None:
        return {}
    prompts = ["0"] * batch_size
    longest = room(method.drafter.depth)
    with target.encoded(prompts):
        return {
            " of AR": launches(target, method.plain, prompts, longest),
            "": launches(target, method, prompts, longest),
        }


def kernel_table(title: str, kernels: Sequence[Kernel]) -> Section:
    """The kernels of a round, a row each."""
    columns: dict[str, list[Cell]] = {
        "in a round": [{"value": kernel.count} for kernel in kernels],
        "ms": [{"value": kernel.milliseconds} for kernel in kernels],
        "share, %": [{"value": 100 * kernel.share} for kernel in kernels],
    }
    numbers = table([kernel.name for kernel in kernels], columns, "kernel")
    return Section(title, numbers, dict(zip(columns, (".4g", MILLISECONDS, ".1f"), strict=True)))


def _medians(report: BenchmarkReport) -> dict[str, float]:
    """Seconds of a round and its parts, by batch size."""
    return {
        f"batch_{column.batch_size}/{name}/{part}": spread.median
        for column in report.columns
        for name, parts in (("ar", column.ar), ("method", column.method))
        for part, spread in parts.items()
    }


def as_table(
    report: BenchmarkReport,
    model: str,
    made_of: Mapping[str, str | None],
    counts: Sequence[Mapping[str, Launches]],
) -> Section:
    """What was measured, a row for each batch size.

    Args:
        report: the timings.
        model: its name.
        made_of: what network and draft are read from, or `random`.
        counts: by batch size, what a round launches.
    """
    random = [name for name, path in made_of.items() if path == "random"]
    title = model + (f" (random {' and '.join(random)})" if random else "")
    title += f" · {report.device} · {report.dtype}"
    if report.compiled:
        title += " · compiled"
    if report.bandwidth is not None and report.weights is not None:
        title += f" · {report.bandwidth / 1e9:.1f} GB/s · weights {report.weights / 1e9:.2f} GB"
    rows = [
        cells(column, report.steps) | _counted(launched)
        for column, launched in zip(report.columns, counts, strict=True)
    ]
    columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
    names = [f"batch {column.batch_size}" for column in report.columns]
    numbers = table(names, columns, "ms: median (quartiles)")
    return Section(title, numbers, dict.fromkeys(columns, MILLISECONDS) | FORMATS)


def cells(column: BenchmarkColumn, steps: int) -> dict[str, Cell]:
    """A row of the table: milliseconds, or what follows from them."""
    own = column.method
    ar = column.ar["round"]
    found = {f"round: {part}": _spread(own[part]) for part in PARTS}
    found |= {
        f"round: one of {steps} draft steps": {"value": own["draft"].median / steps},
        "round of the method": _spread(own["round"]),
        "round of AR": _spread(ar),
        "speed-up ÷ accepted length": {"value": column.ratio},
        "the same, if drafting took no time": {"value": ar.median / own["target"].median},
        "break-even accepted length": {"value": 1 / column.ratio},
        "peak memory, GiB": {"value": column.memory / 2**30},
        "images/s of AR": {"value": column.images},
    }
    if column.limit is not None:
        return found | {
            "bandwidth limit of AR": {"value": column.limit},
            "AR ÷ its limit": {"value": ar.median / column.limit},
        }
    return found | {
        "accepted length": {"value": own["accepted_length"].median},
        "speed-up of whole images": {"value": column.ar["whole"].median / own["whole"].median},
    }


def _counted(launched: Mapping[str, Launches]) -> dict[str, Cell]:
    """What rounds launch, as far as the device tells it."""
    return {
        f"{name.replace('_', ' ')} in a round{of}": {"value": count}
        for name in ("operators", "kernels", "graph_replays")
        for of, counts in launched.items()
        if (count := getattr(counts, name)) is not None
    }


def _spread(times: Spread) -> Cell:
    return {"value": times.median, "low": times.low, "high": times.high}
