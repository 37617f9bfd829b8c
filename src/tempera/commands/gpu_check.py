"""`tempera-gpu-check`: does this device decode right, and how fast? Nothing is downloaded."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor

from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.config.tracking import Tracking
from tempera.decoding.interfaces import JointRule, Rule
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import BenchmarkPlan, measure, room
from tempera.evaluation.latency import name_of
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method
from tempera.runtime.files import write_json, write_text
from tempera.runtime.processor import parse_device
from tempera.targets.transformer import TransformerTarget

METHODS = (
    "ar",
    "parallel depth=3",
    "block depth=3",
    "coolsd depth=3",
    "uniform_rsd depth=3",
    "optimal_rsd depth=3",
    "eagle tree=chain depth=3",
    "medusa depth=3",
    "lantern k=5 tree=chain depth=3",
    "lanternpp k=5 tree=chain depth=3",
    "jacobi window=6",
    "sjd window=6",
    "gsd k=5 window=6",
    "scd window=6",
)
SHIPPED_METHODS = (
    "eagle tree=mc_sim_7b_63",
    "eagle2",
    "parallel tree=mc_sim_7b_63",
    "sjd_pac window=12 branches=2",
    "independent depth=3",
)
"""Random networks often draft tokens that are nearly equally likely, whose order in a tree rounding
may change: trees, and what needs a smaller model, are checked on the shipped model alone.
"""
TINY = (
    "++model.network.sizes.hidden_size=64",
    "++model.network.sizes.intermediate_size=96",
    "++model.network.sizes.num_hidden_layers=2",
    "++model.network.sizes.num_attention_heads=2",
    "++model.network.sizes.num_key_value_heads=1",
    "weights=random",
    "temperature=0.05",  # random weights hardly prefer any token: rounding would tell
)
FAMILIES = {  # the shipped model is a LlamaGen, and Anole's network is that of Lumina
    "shapes": (),
    "lumina": (*TINY, "image_size=64"),
    "emu3": (*TINY, "image_size=32"),
    "janus_pro_1b": (*TINY, "+model.spec.image_size=64"),
}
ROUNDS = {
    "chain": "eagle tree=chain",
    "tree": "eagle tree=mc_sim_7b_63",
    "window": "sjd window=32",
}
"""What is timed, beside plain autoregression."""
PROMPTS = ["3", "7"]
"""Texts, and classes."""
AGREE = 0.9
"""Share of the tokens that must be equal: one that rounding changes, changes all that follow."""
FORMATS = {
    "batch": ".0f",
    "AR, ms": ".4g",
    "ms": ".4g",
    "AR's limit, ms": ".4g",
    "breaks even at": ".3g",
    "AR's operators": ".0f",
    "operators": ".0f",
    "AR's kernels": ".0f",
    "kernels": ".0f",
    "AR's graph replays": ".0f",
    "graph replays": ".0f",
    "GiB": ".3g",
}


@dataclass
class Found:
    """What a check found so far; gpu.json holds it.

    Attributes:
        device: its name.
        same_tokens: by family and method, the share of equal tokens.
        rounds: the timed rounds.
        errors: by the name of what failed, why.
        left_out: what there was no time for.
        result: `unfinished`, and at the end `passed` or `failed`.
    """

    device: str
    same_tokens: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    result: str = "unfinished"

    @property
    def wrong(self) -> list[str]:
        """The checks whose tokens differ."""
        return [name for name, share in self.same_tokens.items() if share < AGREE]


class Check:
    """A check as far as it is: one thing after the other, of which none stops the next, and after
    each of which gpu.json is written.

    Args:
        device: its name.
        directory: where the files go.
        minutes: after so many nothing more begins.
    """

    def __init__(self, device: str, directory: Path, minutes: float) -> None:
        self.found = Found(device)
        self.directory = directory
        self.file = directory / "gpu.json"
        self.minutes = minutes
        self._end = time.monotonic() + 60 * minutes

    def allows(self, name: str) -> bool:
        """Whether there is time left; else the name is kept."""
        if time.monotonic() < self._end:
            print(name, flush=True)
            return True
        self.found.left_out.append(name)
        return False

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Do one thing in the block. An exception costs this thing alone."""
        try:
            yield
        except torch.OutOfMemoryError:
            print(f"{name}: does not fit into the memory")
        except Exception as problem:
            first = next(iter(str(problem).strip().splitlines()), "")
            self.found.errors[name] = f"{type(problem).__name__}: {first}"
            print(f"{name}: {self.found.errors[name]}")
        self.write()

    def write(self) -> None:
        """Write gpu.json."""
        write_json(self.file, asdict(self.found))

    def finish(self) -> None:
        """Print and write the table and whether the checks passed.

        Raises:
            TemperaError: they did not.
        """
        found = self.found
        found.result = "failed" if found.wrong or found.errors else "passed"
        self.write()
        table = as_table(found.rounds)
        write_text(self.directory / "gpu.md", table)
        print(table)
        if found.left_out:
            print(f"left out after {self.minutes:g} minutes: {', '.join(found.left_out)}")
        checks = f"{len(found.same_tokens)} checks of compiled rounds on {found.device}"
        if found.result == "passed":
            print(f"passed: {checks}")
            return
        reasons = [f"other tokens than eager rounds with {name}" for name in found.wrong]
        reasons += [f"{name} ends in {why}" for name, why in found.errors.items()]
        raise TemperaError(
            f"failed: {checks}: {'; '.join(reasons)}: this is a fault of tempera or of PyTorch; "
            f"report it with {self.file}"
        )


def main(cfg: DictConfig) -> None:
    """Time, check, print a table, and write gpu.json and gpu.md."""
    tracking = Tracking.of(cfg, "gpu_check")
    directory = Path(str(cfg.directory))
    check = Check(name_of(parse_device(cfg.device)), directory, cfg.minutes)
    check.write()
    for model in cfg.real:
        time_rounds(check, cfg, model)
    for family in cfg.families:
        compare_tokens(check, cfg.device, family)
    try:
        check.finish()
    finally:
        found = check.found
        values: dict[str, Any] = {"device": found.device, "result": found.result}
        values |= {f"same_tokens/{name}": share for name, share in found.same_tokens.items()}
        tracking.record(directory, values, files=[check.file, directory / "gpu.md"])


def compare_tokens(check: Check, device: str, family: str) -> None:
    """By family and method, the share of tokens that eager and compiled rounds both emit."""
    options = [f"device={device}", f"model={family}", *FAMILIES.get(family, TINY)]
    options += ["dtype=float32", "top_k=10"]
    targets: list[TransformerTarget] = []
    with check.one(family):
        plain = Parts.of(composed("bench", [*options, "method=ar"]))
        targets = [plain.discrete_target() for _ in range(2)]
        for target in targets:
            target.pack()
        targets[1].compile()
    if not targets:
        return
    for method in METHODS + (SHIPPED_METHODS if family == "shapes" else ()):
        name = f"{family} {method}"
        if not check.allows(name):
            continue
        with check.one(name):
            parts = Parts.of(composed("bench", [*options, *f"method={method}".split()]))
            rule = cast(Rule | JointRule, parts.rule())
            eager, compiled = (tokens(parts, target, rule) for target in targets)
            check.found.same_tokens[name] = float((eager == compiled).double().mean())


def tokens(parts: Parts, target: TransformerTarget, rule: Rule | JointRule) -> Tensor:
    """The tokens of two batches [2B, N]; if compiled, the second one replays the first's graphs."""
    with redirect_stdout(StringIO()):  # which says of each draft that it is random
        drafter = parts.drafter(target)
    batches = []
    for seed in range(2):
        streams = RandomStreams(seed, PROMPTS, target.device)
        batches.append(decode(target, drafter, rule, streams, PROMPTS).tokens.cpu())
    return torch.cat(batches)


def time_rounds(check: Check, cfg: DictConfig, model: str) -> None:
    """A model's rows of the table, without numbers where the memory is too small."""
    options = [f"model={model}", "weights=random", f"device={cfg.device}", f"compile={cfg.compile}"]
    target: TransformerTarget | None = None
    for name, method in ROUNDS.items():
        for size in cfg.batch_sizes:
            title = f"{model}, {name}, batch {size}"
            if not check.allows(title):
                continue
            row: dict[str, Any] = {"model": model, "round": name, "batch": size}
            check.found.rounds.append(row)
            with check.one(title):
                chosen = Parts.of(composed("bench", [*options, *f"method={method}".split()]))
                target = target or cast(TransformerTarget, chosen.fast_target())
                row |= timed(target, chosen, BenchmarkPlan([size], cfg.repeats))


def timed(target: TransformerTarget, parts: Parts, plan: BenchmarkPlan) -> dict[str, Any]:
    """Milliseconds of a round, and what it gives the device to do."""
    method = cast(Method, parts.method(target, parts.rule()))
    (column,) = measure(target, method, plan).columns
    prompts = PROMPTS[:1] * column.batch_size
    longest = room(method.drafter.depth)
    row = {
        "AR, ms": column.ar["round"].median,
        "ms": column.method["round"].median,
        "AR's limit, ms": column.limit,
        "breaks even at": 1 / column.ratio,
    }
    with target.encoded(prompts):
        for prefix, timed_method in (("AR's ", method.plain), ("", method)):
            counts = asdict(launches(target, timed_method, prompts, longest))
            row |= {prefix + name.replace("_", " "): count for name, count in counts.items()}
    return row | {"GiB": column.memory / 2**30}


def as_table(rounds: Sequence[dict[str, Any]]) -> str:
    """The timed rounds in Markdown: what at least one of them has, with dashes in the others."""
    names = [name for name in FORMATS if any(row.get(name) is not None for row in rounds)]
    lines = [["model, round", *names], ["---"] * (1 + len(names))]
    for row in rounds:
        numbers = [(row.get(name), FORMATS[name]) for name in names]
        shown = ["–" if value is None else format(value, form) for value, form in numbers]
        lines.append([f"{row['model']}, {row['round']}", *shown])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
