"""`tempera-gpu-check`: does this device decode right, and how fast? Nothing is downloaded."""

import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
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
from tempera.evaluation.benchmark import BenchmarkPlan, measure
from tempera.evaluation.latency import name_of
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method
from tempera.reporting.tables import Section, markdown, show, table, texts
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


@dataclass(frozen=True)
class Found:
    """What a check found; gpu.json holds it.

    Attributes:
        device: its name.
        same_tokens: by family and method, the share of equal tokens.
        rounds: the timed rounds.
        left_out: what there was no time for.
    """

    device: str
    same_tokens: dict[str, float]
    rounds: list[dict[str, Any]]
    left_out: list[str]


def main(cfg: DictConfig) -> None:
    """Time, check, print a table, and write gpu.json and gpu.md."""
    tracking = Tracking.of(cfg, "gpu_check")
    directory = Path(str(cfg.directory))
    device = name_of(parse_device(cfg.device))
    deadline = Deadline(60 * cfg.minutes)
    rounds = [row for model in cfg.real for row in timed_rounds(cfg, model, deadline)]
    shares: dict[str, float] = {}
    for family in cfg.families:
        print(f"checking {family}", flush=True)
        shares |= same_tokens(cfg.device, family, deadline)
    _show(Found(device, shares, rounds, deadline.left_out), directory, tracking, cfg.minutes)
    wrong = [name for name, share in shares.items() if share < AGREE]
    if wrong:
        raise TemperaError(
            f"compiled rounds emit other tokens than eager ones with {'; '.join(wrong)}: this is a "
            f"fault of tempera or of PyTorch; report it with {directory / 'gpu.json'}"
        )


def _show(found: Found, directory: Path, tracking: Tracking, minutes: float) -> None:
    """Print and write what was found, and send it to the tracker."""
    section = as_table(found.rounds)
    shown = texts(section)
    write_json(directory / "gpu.json", asdict(found))
    write_text(directory / "gpu.md", markdown(shown) + "\n")
    show(shown, section.title)
    print(f"{found.device}: {len(found.same_tokens)} checks of compiled rounds")
    if found.left_out:
        print(f"left out after {minutes:g} minutes: {', '.join(found.left_out)}")
    values: dict[str, Any] = {"device": found.device}
    values |= {f"same_tokens/{name}": share for name, share in found.same_tokens.items()}
    tracking.record(directory, values, shown, [directory / "gpu.json", directory / "gpu.md"])


class Deadline:
    """After so many seconds nothing more begins; `left_out` names what did not."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether there is time left; else the name is kept."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(name)
        return False


def same_tokens(device: str, family: str, deadline: Deadline) -> dict[str, float]:
    """By family and method, the share of tokens that eager and compiled rounds both emit."""
    options = [f"device={device}", f"model={family}", *FAMILIES.get(family, TINY)]
    options += ["dtype=float32", "top_k=10"]
    plain = Parts.of(composed("bench", [*options, "method=ar"]))
    eager = plain.discrete_target()
    eager.pack()
    compiled = plain.discrete_target()
    compiled.pack()
    compiled.compile()
    shares = {}
    for method in METHODS + (SHIPPED_METHODS if family == "shapes" else ()):
        if not deadline.allows(f"{family} {method}"):
            continue
        parts = Parts.of(composed("bench", [*options, *f"method={method}".split()]))
        rule = cast(Rule | JointRule, parts.rule())
        same = tokens(parts, eager, rule) == tokens(parts, compiled, rule)
        shares[f"{family} {method}"] = float(same.double().mean())
    return shares


def tokens(parts: Parts, target: TransformerTarget, rule: Rule | JointRule) -> Tensor:
    """The tokens of two batches [2B, N]; if compiled, the second one replays the first's graphs."""
    with redirect_stdout(StringIO()):  # which says of each draft that it is random
        drafter = parts.drafter(target)
    batches = []
    for seed in range(2):
        streams = RandomStreams(seed, PROMPTS, target.device)
        batches.append(decode(target, drafter, rule, streams, PROMPTS).tokens.cpu())
    return torch.cat(batches)


def timed_rounds(cfg: DictConfig, model: str, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """A model's rows of the table, without numbers where the memory is too small."""
    options = [f"model={model}", "weights=random", f"device={cfg.device}", f"compile={cfg.compile}"]
    target: TransformerTarget | None = None
    for name, method in ROUNDS.items():
        chosen = Parts.of(composed("bench", [*options, *f"method={method}".split()]))
        for size in cfg.batch_sizes:
            title = f"{model}, {name}, batch {size}"
            if not deadline.allows(title):
                continue
            print(f"timing {title}", flush=True)
            row = {"model": model, "round": name, "batch": size}
            try:
                target = target or cast(TransformerTarget, chosen.fast_target())
                row |= timed(target, chosen, BenchmarkPlan([size], cfg.repeats))
            except torch.OutOfMemoryError:
                print("does not fit into the memory")
            yield row


def timed(target: TransformerTarget, parts: Parts, plan: BenchmarkPlan) -> dict[str, Any]:
    """Milliseconds of a round, and what it gives the device to do."""
    method = cast(Method, parts.method(target, parts.rule()))
    (column,) = measure(target, method, plan).columns
    prompts = PROMPTS[:1] * column.batch_size
    row = {
        "AR, ms": column.ar["round"].median,
        "ms": column.method["round"].median,
        "AR's limit, ms": column.limit,
        "breaks even at": 1 / column.ratio,
    }
    with target.encoded(prompts):
        for prefix, timed_method in (("AR's ", method.plain), ("", method)):
            counts = asdict(launches(target, timed_method, prompts))
            row |= {prefix + name.replace("_", " "): count for name, count in counts.items()}
    return row | {"GiB": column.memory / 2**30}


def as_table(rounds: Sequence[dict[str, Any]]) -> Section:
    """The timed rounds, with dashes where the memory is too small."""
    names = [f"{row['model']}, {row['round']}" for row in rounds]
    columns = {name: [{"value": row.get(name)} for row in rounds] for name in FORMATS}
    return Section("Rounds of real sizes", table(names, columns, "model, round"), FORMATS)
