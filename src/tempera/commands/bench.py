"""`tempera-bench`: the time of a round and its parts, without a data set."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import from_options, parsed
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import BenchmarkColumn, BenchmarkPlan, Spread, measure
from tempera.evaluation.latency import PARTS
from tempera.reporting.tables import Output, show
from tempera.runtime.files import write_json


def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, write bench.json and return its content."""
    parsed(cfg.tracking)
    rule, continuous = build.build_rule(cfg), not build.is_discrete(cfg)
    if continuous and "gamma" not in cfg.decoding:
        raise TemperaError(
            "a benchmark of continuous tokens times rounds of draft and verification: choose "
            "method=cspd, cspd_published or cspd_exact."
        )
    plan = from_options(cfg, BenchmarkPlan)
    target: Any = build.build_fast_target(cfg)
    console = Output()
    with console.status("timing") as status:
        method = build.build_method(cfg, target, rule)
        report = measure(target, method, plan, lambda part: status.update(f"timing: {part}"))
    # the dtype of the weights, which differs from the target's for float16 on a CPU
    dtype = build.parse_dtype(cfg.dtype, target.device)
    report = replace(report, dtype=str(dtype).removeprefix("torch."))
    made_of = {"weights": cfg.model.get("weights"), "draft": cfg.drafter.get("path")}
    random = [what for what, path in made_of.items() if path == "random"]
    title = cfg.model.name + (f" (random {' and '.join(random)})" if random else "")
    title += f" · {report.device} · {report.dtype}{' · compiled' if report.compiled else ''}"
    if report.bandwidth is not None and report.weights is not None:
        title += f" · {report.bandwidth / 1e9:.1f} GB/s · weights {report.weights / 1e9:.2f} GB"
    columns = {f"batch {one.batch_size}": rows(one, report.steps) for one in report.columns}
    named = pd.DataFrame(columns).rename_axis("ms: median (quartiles)").reset_index()
    show(named, title, console)
    result = {"model": cfg.model.name, "made_of": made_of, **asdict(report)}
    place = Path(str(cfg.directory))
    write_json(place / "bench.json", result)
    build.track(cfg, place, "bench", _medians(report), named, [place / "bench.json"])
    return result


def _medians(report: Any) -> dict[str, float]:
    """Seconds of a round and its parts, by batch size."""
    return {
        f"batch_{column.batch_size}/{name}/{part}": spread.median
        for column in report.columns
        for name, parts in (("ar", column.ar), ("method", column.method))
        for part, spread in parts.items()
    }


def rows(column: BenchmarkColumn, steps: int) -> dict[str, str]:
    """A column of the table by the names of its rows: milliseconds, or what follows from them."""
    own, ar = column.method, column.ar["round"]
    ratio = ar.median / own["target"].median
    cells = {f"round: {part}": _spread(own[part]) for part in PARTS}
    cells |= {
        f"round: one of {steps} draft steps": milliseconds(own["draft"].median / steps),
        "round of the method": _spread(own["round"]),
        "round of AR": _spread(ar),
        "speed-up ÷ accepted length": f"{column.ratio:.2f} of at most {ratio:.2f}",
        "accepted length that breaks even": f"{1 / column.ratio:.2f}",
        "memory at the peak, GiB": f"{column.memory / 2**30:.2f}",
        "images/s of AR": f"{column.images:.3g}",
    }
    if column.limit is not None:
        times = ar.median / column.limit
        return cells | {
            "bandwidth limit of AR": f"{milliseconds(column.limit)}; AR takes {times:.2f}×"
        }
    return cells | {
        "accepted length": f"{own['accepted_length'].median:.2f}",
        "speed-up of whole images": f"{column.ar['whole'].median / own['whole'].median:.2f}×",
    }


def milliseconds(time: float) -> str:
    """A time to three digits."""
    return f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def _spread(times: Spread) -> str:
    median, low, high = map(milliseconds, (times.median, times.low, times.high))
    return f"{median} ({low} … {high})"
