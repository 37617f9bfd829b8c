"""`tempera-bench`: the time of a round and its parts, without a data set."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.errors import TemperaError
from tempera.evaluation import benchmark
from tempera.evaluation.pipeline import Method
from tempera.runtime.files import write_json
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, write bench.json and return its content."""
    if cfg.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"`{command('bench')}` times rounds of discrete tokens only; use `{command('eval')}` "
            "to time a method for continuous tokens."
        )
    plan = instantiate(cfg.plan)
    target: Any = build.build_target(cfg)
    target.fuse()

    def make_method() -> Method:
        drafter = build.build_drafter(cfg, target)
        return Method(drafter, build.build_rule(cfg, drafter.depth))

    console = Console()
    with console.status("timing") as status:
        report = benchmark.measure(
            target, make_method, plan, lambda part: status.update(f"timing: {part}")
        )
    made_of = {"weights": cfg.model.get("weights"), "draft": cfg.drafter.get("path")}
    random = [what for what, path in made_of.items() if path == "random"]
    weights = f" (random {' and '.join(random)})" if random else ""
    title = f"{cfg.model.name}{weights} · {report.device} · {report.dtype} · "
    shown = Table(
        "ms: median (quartiles)",
        *(column.title for column in report.columns),
        title=f"{title}{report.bandwidth / 1e9:.1f} GB/s · weights {report.weights / 1e9:.2f} GB",
    )
    for line in benchmark.table(report):
        shown.add_row(*line)
    console.print(shown)
    result = {"model": cfg.model.name, "made_of": made_of, **report.as_dict()}
    write_json(Path(str(cfg.directory)) / "bench.json", result)
    return result
