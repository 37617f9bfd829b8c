"""`tempera-bench`: the time of a round and its parts, without a data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tempera.config import build
from tempera.config.compose import composed, written
from tempera.config.instantiate import check_value, instantiate
from tempera.errors import TemperaError
from tempera.evaluation import benchmark, continuous_benchmark
from tempera.evaluation.benchmark_table import (
    HEADINGS,
    BenchmarkJob,
    BenchmarkTable,
    measure_rows,
    places,
)
from tempera.evaluation.pipeline import Method
from tempera.runtime.files import write_json, write_text
from tempera.runtime.installation import command

SHARED = (
    "seed",
    "device",
    "dtype",
    "batch_sizes",
    "compile",
    "repeats",
    "trees",
    "bandwidth",
)
"""Options of a table that hold for all its jobs."""
OF_TABLES = (*SHARED, "preset", "jobs", "minutes", "directory", "launcher")
"""Top-level options that have an effect on a table; the others belong to its jobs."""
OF_DISCRETE = ("trees", "bandwidth", "compile")
"""Options that have no effect on rounds of continuous tokens."""


def main(cfg: DictConfig) -> dict[str, Any]:
    """Measure, print a table, write bench.json and return its content. The jobs of a preset make
    one table, which is also written to bench.md.
    """
    return _one(cfg) if cfg.get("jobs") is None else _table(cfg)


def _one(cfg: DictConfig) -> dict[str, Any]:
    """Time one method, with a column for each batch size."""
    build.check_method(cfg)
    if _is_continuous(cfg):
        return _continuous(cfg)
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
    _check_overrides(
        cfg, lambda name: name not in OF_DISCRETE, "on continuous tokens: leave it out"
    )
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


def _table(cfg: DictConfig) -> dict[str, Any]:
    """Time the methods of all jobs, with a row for each method, batch size and kind of steps."""
    _check_overrides(
        cfg,
        lambda name: name in OF_TABLES,
        "on a table, whose jobs name their models and methods: leave it out, or give jobs=[…]",
    )
    device = _device(cfg)
    plan = instantiate(cfg.plan)
    minutes = cfg.get("minutes")
    check_value(cfg, "minutes", minutes, float | None)
    shared = [written(name, _plain(cfg[name])) for name in SHARED]
    jobs = [_job(node, shared) for node in _jobs(cfg)]
    speed = benchmark.bandwidth(device) if plan.bandwidth is None else 1e9 * plan.bandwidth
    name, dtype = benchmark.name_of(device), _dtype(cfg, device)
    machine = f"{name}, {dtype}, {speed / 1e9:.0f} GB/s, {date.today()}"
    table, directory = BenchmarkTable(machine, []), Path(str(cfg.directory))
    with _progress() as shown:
        task = shown.add_task("", total=sum(len(places(job, plan)) for job in jobs))
        for row in measure_rows(
            jobs, plan, speed, minutes, lambda part: shown.update(task, description=part)
        ):
            table.rows.append(row)
            _write(table, directory)  # after each row: an interruption loses one
            shown.advance(task)
    _print(table)
    print(f"the table: {directory / 'bench.md'}")
    return table.as_dict()


def _write(table: BenchmarkTable, directory: Path) -> None:
    write_json(directory / "bench.json", table.as_dict())
    write_text(directory / "bench.md", table.markdown())


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        speed_estimate_period=3600,
    )


def _print(table: BenchmarkTable) -> None:
    shown = Table(title=table.machine)
    for heading in HEADINGS:
        shown.add_column(heading, overflow="fold")
    for line in table.cells():
        shown.add_row(*line)
    Console().print(shown)


def _check(cfg: DictConfig) -> None:
    """Raise TemperaError for a job that a table cannot hold, before weights are read."""
    build.check_method(cfg)
    if _is_continuous(cfg):
        raise TemperaError(
            "a table of several models holds rounds of discrete tokens only: time a method for "
            f"continuous tokens by itself, with `{command('bench')} model={cfg.model.name}`."
        )


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


def _check_overrides(cfg: DictConfig, matters: Callable[[str], bool], where: str) -> None:
    """Raise TemperaError for an option that has no effect there."""
    overrides = OmegaConf.select(cfg, "overrides", throw_on_resolution_failure=False) or []
    for override in overrides:
        name = str(override).lstrip("+~").partition("=")[0].split(".")[0].split("@")[0]
        if not matters(name):
            raise TemperaError(f"`{override}` has no effect {where}.")


def _device(cfg: DictConfig) -> torch.device:
    """The table's device; raises TemperaError if it is a GPU and there is none."""
    if str(cfg.device).startswith("cuda") and not torch.cuda.is_available():
        raise TemperaError(
            "this table is for a GPU, and PyTorch finds none here: run it on a machine with an "
            "NVIDIA GPU, or take preset=cpu, which times the shipped model."
        )
    return build.parse_device(cfg.device)


def _jobs(cfg: DictConfig) -> list[dict[str, Any]]:
    """The jobs as plain values."""
    jobs = _plain(cfg.jobs)
    for job in jobs if isinstance(jobs, list) else [jobs]:
        match job:
            case {"target": str(), "methods": [str(), *_]} if len(job) == 2:
                continue
        raise TemperaError(
            f"`{job}` is no job of a table: write {{target: options, methods: [options, …]}}, as "
            "conf/preset/cpu.yaml does."
        )
    return list(jobs)


def _job(node: Mapping[str, Any], shared: list[str]) -> BenchmarkJob:
    """Compose a job's configurations, one for each method, and check them."""
    target = node["target"].split()
    choices = {
        method.replace("method=", ""): composed("bench", [*target, *method.split(), *shared])
        for method in node["methods"]
    }
    for cfg in choices.values():
        _check(cfg)
    first = next(iter(choices.values()))
    return BenchmarkJob(
        f"{first.model.name}{_random({'weights': first.model.get('weights')})}",
        partial(_target, first),
        {name: partial(_method, cfg) for name, cfg in choices.items()},
    )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
