"""`tempera-gpu-check`: does this GPU decode right, and how fast? On tiny layouts compiled rounds
must emit the tokens of eager ones; then rounds of real sizes are timed. Weights are random or
shipped, so nothing is downloaded.
"""

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from tempera.commands.bench import milliseconds
from tempera.config import build
from tempera.config.compose import composed
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import BenchmarkPlan, measure
from tempera.evaluation.latency import name_of
from tempera.runtime.files import replacing, write_json

PROMPTS = ["3", "7"]
SHIPPED = "shapes"
AGREE = 0.9
"""Least share of equal tokens: rounding may change a draw near a boundary, and all that follow it.
"""


def main(cfg: DictConfig) -> dict[str, Any]:
    """Check, time, print a table, write gpu.json and gpu.md and return the content of gpu.json.

    Raises:
        TemperaError: a method's compiled rounds emit other tokens than its eager ones.
    """
    directory, console = Path(str(cfg.directory)), Console()
    device = build.parse_device(cfg.device)
    same, rounds = dict[str, float](), list[dict[str, Any]]()
    with console.status("checking") as status:
        for family in cfg.families:
            status.update(f"checking: {family}")
            tiny = [] if family == SHIPPED else [*cfg.sizes, *cfg.layouts[family]]
            methods = [*cfg.methods, *(cfg.shipped if family == SHIPPED else [])]
            shares = _same_tokens([f"model={family}", f"device={device}", *tiny], methods)
            same |= {f"{family} {method}": share for method, share in shares.items()}
        for model in cfg.real:
            status.update(f"timing: {model}")
            rounds += _timed(cfg, model)
    result = {"device": name_of(device), "same_tokens": same, "rounds": rounds}
    write_json(directory / "gpu.json", result)
    with replacing(directory / "gpu.md") as temporary:
        temporary.write_text(table(rounds), encoding="utf-8")
    console.print(f"{result['device']}: {len(same)} checks\n{table(rounds)}")
    if wrong := [name for name, share in same.items() if share < AGREE]:
        raise TemperaError(
            f"compiled rounds emit other tokens than eager ones with {'; '.join(wrong)}: this is a "
            f"fault of tempera or of PyTorch; report it with {directory / 'gpu.json'}"
        )
    return result


def _same_tokens(options: list[str], methods: Sequence[str]) -> dict[str, float]:
    """By method, the share of tokens that are equal with eager and with compiled rounds."""
    found, rules = list[dict[str, torch.Tensor]](), dict[str, Any]()
    for compiled in (False, True):
        given = [*options, "dtype=float32", "top_k=10"]
        target: Any = build.build_target(composed("bench", [*given, "method=ar"]))
        target.pack()
        if compiled:
            target.compile()
        tokens = {}
        for method in methods:
            cfg = composed("bench", [*given, *method.split()])
            with redirect_stdout(StringIO()):  # which says of each draft that it is random
                drafter = build.build_drafter(cfg, target)
            if method not in rules:  # LANTERN's takes long to make
                rules[method] = build.build_rule(cfg)
            batches = []
            for seed in range(2):  # the second replays the graphs of the first
                streams = RandomStreams(seed, PROMPTS, target.device)
                batches.append(
                    decode(target, drafter, rules[method], streams, PROMPTS).tokens.cpu()
                )
            tokens[method] = torch.cat(batches)
        found.append(tokens)
    eager, others = found
    return {name: float((eager[name] == others[name]).float().mean()) for name in methods}


def _timed(cfg: DictConfig, model: str) -> list[dict[str, Any]]:
    """The rows of the table that are a model's: rounds of AR and of each method at each batch size,
    in milliseconds; without numbers where the memory is too small.
    """
    options = [f"model={model}", "weights=random", f"device={cfg.device}", f"compile={cfg.compile}"]
    target: Any = build.build_fast_target(composed("bench", [*options, "method=eagle"]))
    rows = []
    for name, method in cfg.rounds.items():
        chosen = composed("bench", [*options, *method.split()])
        decoding = build.build_method(chosen, target, build.build_rule(chosen))
        for batch_size in cfg.batch_sizes:
            row = {"model": model, "batch": batch_size, "round": name}
            try:
                report = measure(target, decoding, BenchmarkPlan([batch_size], cfg.repeats))
            except torch.OutOfMemoryError:
                rows.append(row)
                continue
            (column,) = report.columns
            row |= {
                "ar_ms": column.ar["round"].median,
                "ms": column.method["round"].median,
                "limit_ms": column.limit,
                "break_even": 1 / column.ratio,
                "peak_gib": column.memory / 2**30,
            }
            rows.append(row)
    return rows


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """The timed rounds as a Markdown table."""
    lines = [
        "| model | batch | round | AR, ms | ms | AR's limit, ms | breaks even at | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rounds:
        named = [row["model"], str(row["batch"]), row["round"]]
        times = [milliseconds(row[name]) for name in ("ar_ms", "ms", "limit_ms") if name in row]
        others = [f"{row[name]:.2f}" for name in ("break_even", "peak_gib") if name in row]
        cells = [*named, *(times + others or ["out of memory", *4 * ["–"]])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
