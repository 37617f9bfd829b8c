"""Time a round and its parts without a data set; the options are in conf/bench.yaml."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from tempera import config
from tempera.atomic import write_json
from tempera.errors import TemperaError
from tempera.evaluation import bench
from tempera.evaluation.painter import Method


@config.script("bench")
def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, and write bench.json."""
    if cfg.get("tokens", "discrete") != "discrete":
        raise TemperaError("eval/bench.py times rounds of discrete tokens; eval/run.py times a method of continuous ones.")
    plan = config.instantiate(cfg.plan)
    target = config.build_target(cfg)
    drafter = config.build_drafter(cfg, target)
    method = Method(drafter, config.build_rule(cfg, drafter.depth))
    console = Console()
    with console.status("timing") as status:
        report = bench.measure(target, method, plan, lambda part: status.update(f"timing: {part}"))
    title = f"{cfg.model.name} · {report.device} · {report.dtype} · batch {report.batch_size}"
    shown = Table("part", "ms (median)", "quartiles", title=title)
    for line in bench.table(report):
        shown.add_row(*line)
    console.print(shown)
    console.print("speed-up at an accepted length: " + ", ".join(f"{length:g} → {gain:.2f}×" for length, gain in report.speedups.items()))
    console.print(f"memory: {report.memory / 2**30:.2f} GiB at the peak")
    write_json(Path(cfg.directory) / "bench.json", report.as_dict())
    return report.as_dict()


if __name__ == "__main__":
    main()
