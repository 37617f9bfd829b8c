"""Does this GPU decode right, and how fast? On tiny layouts compiled rounds must emit the tokens of
eager ones; then real sizes are timed. Nothing is downloaded. Options: conf/gpu_check.yaml.
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from tempera.config import build
from tempera.config.cli import run
from tempera.config.compose import composed
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import BenchmarkPlan, measure
from tempera.evaluation.latency import name_of
from tempera.reporting.tables import markdown
from tempera.runtime.files import write_json, write_text

METHODS = ["parallel", "block", "coolsd", "uniform_rsd", "optimal_rsd", "eagle tree=chain"]
METHODS += ["medusa drafter.path=random", "lantern k=5 tree=chain", "lanternpp k=5 tree=chain"]
METHODS = ["ar", *(f"{method} depth=3" for method in METHODS)]
METHODS += [f"{name} window=6" for name in ("jacobi", "sjd", "gsd k=5", "scd")]
# Random networks often draft tokens that are nearly equally likely, whose order in a tree rounding
# may change: trees, and what needs a smaller model, are checked on the shipped model alone.
SHIPPED = ["eagle tree=mc_sim_7b_63", "eagle2", "parallel tree=mc_sim_7b_63"]
SHIPPED += ["sjd_pac window=12 branches=2", "independent depth=3"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TINY = [f"++model.network.sizes.{name}={size}" for name, size in SIZES.items()]
TINY += ["weights=random", "temperature=0.05"]  # they hardly prefer any token: rounding would tell
FAMILIES = {  # the shipped model is a LlamaGen, and Anole's network is that of Lumina
    "shapes": [],
    "lumina": [*TINY, "image_size=64"],
    "emu3": [*TINY, "image_size=32"],
    "janus_pro_1b": [*TINY, "+model.spec.image_size=64"],
}
ROUNDS = {"chain": "eagle tree=chain", "tree": "eagle tree=mc_sim_7b_63", "window": "sjd window=32"}
PROMPTS = ["3", "7"]  # texts, and classes
AGREE = 0.9  # of the tokens at least: one that rounding changes, changes all that follow


def main(cfg: DictConfig) -> dict[str, Any]:
    """Check, time, print a table, write gpu.json and gpu.md and return the content of gpu.json."""
    same, rounds = dict[str, float](), list[dict[str, Any]]()
    for family in cfg.families:
        print(f"checking {family}")
        options = [f"model={family}", f"device={cfg.device}", *FAMILIES.get(family, TINY)]
        methods, rules = METHODS + (SHIPPED if family == "shapes" else []), dict[str, Any]()
        eager, compiled = (tokens(options, methods, rules, steps) for steps in (False, True))
        for name in methods:
            same[f"{family} {name}"] = float((eager[name] == compiled[name]).double().mean())
    for model in cfg.real:
        print(f"timing {model}")
        rounds += timed(cfg, model)
    device, place = name_of(build.parse_device(cfg.device)), Path(str(cfg.directory))
    result = {"device": device, "same_tokens": same, "rounds": rounds}
    write_json(place / "gpu.json", result)
    write_text(place / "gpu.md", shown := table(rounds))
    print(f"{device}: {len(same)} checks\n{shown}")
    if wrong := [name for name, share in same.items() if share < AGREE]:
        raise TemperaError(
            f"compiled rounds emit other tokens than eager ones with {'; '.join(wrong)}: this is a "
            f"fault of tempera or of PyTorch; report it with {place / 'gpu.json'}"
        )
    return result


def tokens(options: list[str], methods: list[str], rules: dict[str, Any], compiled: bool) -> Any:
    """By method, the tokens of two batches; the second one replays the graphs of the first."""
    options, found = [*options, "dtype=float32", "top_k=10"], dict[str, torch.Tensor]()
    target: Any = build.build_target(composed("bench", [*options, "method=ar"]))
    target.pack()
    if compiled:
        target.compile()
    for method in methods:
        cfg = composed("bench", [*options, *f"method={method}".split()])
        with redirect_stdout(StringIO()):  # which says of each draft that it is random
            drafter = build.build_drafter(cfg, target)
        if method not in rules:  # LANTERN's takes long to make
            rules[method] = build.build_rule(cfg)
        streams = [RandomStreams(seed, PROMPTS, target.device) for seed in range(2)]
        outputs = [decode(target, drafter, rules[method], one, PROMPTS) for one in streams]
        found[method] = torch.cat([one.tokens for one in outputs]).cpu()
    return found


def timed(cfg: DictConfig, model: str) -> list[dict[str, Any]]:
    """A model's rows of the table, without numbers where the memory is too small."""
    options = [f"model={model}", "weights=random", f"device={cfg.device}", f"compile={cfg.compile}"]
    target: Any = build.build_fast_target(composed("bench", [*options, "method=eagle"]))
    rows = []
    for name, method in ROUNDS.items():
        chosen = composed("bench", [*options, *f"method={method}".split()])
        decoding = build.build_method(chosen, target, build.build_rule(chosen))
        for size in cfg.batch_sizes:
            rows.append(row := {"model": model, "batch": size, "round": name})
            try:
                (column,) = measure(target, decoding, BenchmarkPlan([size], cfg.repeats)).columns
            except torch.OutOfMemoryError:
                continue
            row |= {"AR, ms": column.ar["round"].median, "ms": column.method["round"].median}
            row |= {"AR's limit, ms": column.limit, "breaks even at": 1 / column.ratio}
            row["GiB"] = column.memory / 2**30
    return rows


def table(rounds: list[dict[str, Any]]) -> str:
    """The timed rounds as Markdown, with dashes where the memory is too small."""
    shown = pd.DataFrame(rounds).map(lambda one: f"{one:.4g}" if type(one) is float else str(one))
    return markdown(shown.replace("nan", "–")) + "\n"


if __name__ == "__main__":
    run("gpu_check", main)
