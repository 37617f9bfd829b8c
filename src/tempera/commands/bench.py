"""`tempera-bench`: the time of a round and its parts, without a data set."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.errors import TemperaError
from tempera.evaluation import benchmark
from tempera.runtime.files import write_json


def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, write bench.json and return its content."""
    rule, continuous = build.build_rule(cfg), not build.is_discrete(cfg)
    if continuous and "gamma" not in cfg.decoding:
        raise TemperaError(
            "a benchmark of continuous tokens times rounds of draft and verification: choose "
            "method=cspd, cspd_published or cspd_exact."
        )
    plan = instantiate(cfg.plan)
    target: Any = build.build_target(cfg)
    if not continuous:
        target.pack()
    console = Console()
    with console.status("timing") as status:
        report = benchmark.measure(
            target,
            lambda: build.build_method(cfg, target, rule),
            plan,
            lambda part: status.update(f"timing: {part}"),
        )
    # the dtype of the weights, which differs from the target's for float16 on a CPU
    dtype = build.parse_dtype(cfg.dtype, target.device)
    report = replace(report, dtype=str(dtype).removeprefix("torch."))
    made_of = {"weights": cfg.model.get("weights"), "draft": cfg.drafter.get("path")}
    random = [what for what, path in made_of.items() if path == "random"]
    title = cfg.model.name + (f" (random {' and '.join(random)})" if random else "")
    title += f" · {report.device} · {report.dtype}"
    if report.bandwidth is not None and report.weights is not None:
        title += f" · {report.bandwidth / 1e9:.1f} GB/s · weights {report.weights / 1e9:.2f} GB"
    headings = [column.title for column in report.columns]
    table = Table("ms: median (quartiles)", *headings, title=title)
    for row in benchmark.table(report):
        table.add_row(*row)
    console.print(table)
    result = {"model": cfg.model.name, "made_of": made_of, **report.as_dict()}
    write_json(Path(str(cfg.directory)) / "bench.json", result)
    return result
