"""`tempera-gpu-check`: does this device decode right, and how fast? Nothing is downloaded."""

import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from tempera.config import build
from tempera.config.compose import composed
from tempera.decoding.interfaces import JointRule, Rule
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import BenchmarkPlan, measure
from tempera.evaluation.latency import name_of
from tempera.evaluation.launches import launches
from tempera.reporting.tables import Section, markdown, show, table, texts
from tempera.runtime.files import write_json, write_text

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


def main(cfg: DictConfig) -> dict[str, Any]:
    """Time, check, print a table, write gpu.json and gpu.md and return the content of gpu.json."""
    deadline = Deadline(60 * cfg.minutes)
    rounds = [row for model in cfg.real for row in timed_rounds(cfg, model, deadline)]
    shares: dict[str, float] = {}
    for family in cfg.families:
        print(f"checking {family}", flush=True)
        shares |= same_tokens(cfg.device, family, deadline)
    section = as_table(rounds)
    result = {
        "device": name_of(build.parse_device(cfg.device)),
        "same_tokens": shares,
        "rounds": rounds,
        "left_out": deadline.left_out,
    }
    directory = Path(str(cfg.directory))
    write_json(directory / "gpu.json", result)
    write_text(directory / "gpu.md", markdown(texts(section)) + "\n")
    show(texts(section), section.title)
    print(f"{result['device']}: {len(shares)} checks of compiled rounds")
    if deadline.left_out:
        print(f"left out after {cfg.minutes:g} minutes: {', '.join(deadline.left_out)}")
    values = {f"same_tokens/{name}": share for name, share in shares.items()}
    files = [directory / "gpu.json", directory / "gpu.md"]
    build.track(
        cfg, directory, "gpu_check", {"device": result["device"], **values}, texts(section), files
    )
    wrong = [name for name, share in shares.items() if share < AGREE]
    if wrong:
        raise TemperaError(
            f"compiled rounds emit other tokens than eager ones with {'; '.join(wrong)}: this is a "
            f"fault of tempera or of PyTorch; report it with {directory / 'gpu.json'}"
        )
    return result


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
    plain = composed("bench", [*options, "method=ar"])
    eager: Any = build.build_target(plain)
    eager.pack()
    compiled: Any = build.build_target(plain)
    compiled.pack()
    compiled.compile()
    shares = {}
    for method in METHODS + (SHIPPED_METHODS if family == "shapes" else ()):
        if not deadline.allows(f"{family} {method}"):
            continue
        cfg = composed("bench", [*options, *f"method={method}".split()])
        rule = build.build_rule(cfg)
        same = tokens(cfg, eager, rule) == tokens(cfg, compiled, rule)
        shares[f"{family} {method}"] = float(same.double().mean())
    return shares


def tokens(cfg: DictConfig, target: Any, rule: Rule | JointRule) -> Tensor:
    """The tokens of two batches [2B, N]; if compiled, the second one replays the first's graphs."""
    with redirect_stdout(StringIO()):  # which says of each draft that it is random
        drafter = build.build_drafter(cfg, target)
    batches = []
    for seed in range(2):
        streams = RandomStreams(seed, PROMPTS, target.device)
        batches.append(decode(target, drafter, rule, streams, PROMPTS).tokens.cpu())
    return torch.cat(batches)


def timed_rounds(cfg: DictConfig, model: str, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """A model's rows of the table, without numbers where the memory is too small."""
    options = [f"model={model}", "weights=random", f"device={cfg.device}", f"compile={cfg.compile}"]
    target: Any = None
    for name, method in ROUNDS.items():
        chosen = composed("bench", [*options, *f"method={method}".split()])
        for size in cfg.batch_sizes:
            title = f"{model}, {name}, batch {size}"
            if not deadline.allows(title):
                continue
            print(f"timing {title}", flush=True)
            row = {"model": model, "round": name, "batch": size}
            try:
                target = target or build.build_fast_target(chosen)
                row |= timed(target, chosen, BenchmarkPlan([size], cfg.repeats))
            except torch.OutOfMemoryError:
                print("does not fit into the memory")
            yield row


def timed(target: Any, cfg: DictConfig, plan: BenchmarkPlan) -> dict[str, Any]:
    """Milliseconds of a round, and what it gives the device to do."""
    method = build.build_method(cfg, target, build.build_rule(cfg))
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
