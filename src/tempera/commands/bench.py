"""`tempera-bench`: the time of a round and its parts, without a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.errors import TemperaError
from tempera.evaluation import benchmark, continuous_benchmark
from tempera.evaluation.pipeline import Method
from tempera.runtime.files import write_json


def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, write bench.json and return its content."""
    build.check_method(cfg)
    return _continuous(cfg) if _is_continuous(cfg) else _discrete(cfg)


def _discrete(cfg: DictConfig) -> dict[str, Any]:
    """Time one method, with a column for each batch size."""
    plan = instantiate(cfg.plan)
    target = _target(cfg)
    console = Console()
    with console.status("timing") as status:
        report = benchmark.measure(
            target,
            lambda: _method(cfg, target),
            plan,
            lambda part: status.update(f"timing: {part}"),
        )
    report = replace(report, dtype=_dtype(cfg, target.device))
    made_of = _made_of(cfg)
    title = f"{cfg.model.name}{_random(made_of)} · {report.device} · {report.dtype} · "
    title += f"{report.bandwidth / 1e9:.1f} GB/s · weights {report.weights / 1e9:.2f} GB"
    headings = [column.title for column in report.columns]
    console.print(_shown(title, headings, benchmark.table(report)))
    return _kept(cfg, made_of, report.as_dict())


def _continuous(cfg: DictConfig) -> dict[str, Any]:
    """Time one method for continuous tokens, with a column for each batch size."""
    if "gamma" not in cfg.decoding:
        raise TemperaError(
            "a benchmark of continuous tokens times rounds of draft and verification: choose "
            "method=cspd, cspd_published or cspd_exact."
        )
    plan = instantiate(cfg.plan)
    target: Any = build.build_target(cfg)
    method = build.build_method(cfg, target)
    console = Console()
    with console.status("timing") as status:
        report = continuous_benchmark.measure_continuous(
            target,
            method,
            plan.batch_sizes,
            plan.repeats,
            build.parse_device(cfg.device),
            lambda part: status.update(f"timing: {part}"),
        )
    report = replace(report, dtype=_dtype(cfg, build.parse_device(cfg.device)))
    made_of = {"weights": cfg.model.get("weights")}
    title = f"{cfg.model.name}{_random(made_of)} · {report.device} · {report.dtype}"
    headings = [f"batch {column.batch_size}" for column in report.columns]
    console.print(_shown(title, headings, continuous_benchmark.continuous_table(report)))
    return _kept(cfg, made_of, report.as_dict())


def _dtype(cfg: DictConfig, device: torch.device) -> str:
    """The dtype of the weights, which differs from the target's for float16 on a CPU."""
    return str(build.parse_dtype(cfg.dtype, device)).removeprefix("torch.")


def _shown(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Timings as a table, with a row for each line."""
    table = Table("ms: median (quartiles)", *headings, title=title)
    for line in lines:
        table.add_row(*line)
    return table


def _kept(cfg: DictConfig, made_of: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Write bench.json and return its content."""
    result = {"model": cfg.model.name, "made_of": made_of, **report}
    write_json(Path(str(cfg.directory)) / "bench.json", result)
    return result


def _is_continuous(cfg: DictConfig) -> bool:
    return bool(cfg.model.get("tokens", "discrete") != "discrete")


def _target(cfg: DictConfig) -> Any:
    target: Any = build.build_target(cfg)
    target.fuse()
    return target


def _method(cfg: DictConfig, target: Any) -> Method:
    drafter = build.build_drafter(cfg, target)
    return Method(drafter, build.build_rule(cfg, drafter.depth))


def _made_of(cfg: DictConfig) -> dict[str, Any]:
    return {"weights": cfg.model.get("weights"), "draft": cfg.drafter.get("path")}


def _random(made_of: Mapping[str, Any]) -> str:
    random = [what for what, path in made_of.items() if path == "random"]
    return f" (random {' and '.join(random)})" if random else ""
