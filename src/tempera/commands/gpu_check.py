"""`tempera-gpu-check`: do compiled rounds emit the tokens of eager ones on this device? Nothing is
downloaded.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import cast

import torch
from omegaconf import DictConfig
from torch import Tensor

from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method
from tempera.runtime.files import write_json
from tempera.runtime.processor import name_of, parse_device
from tempera.targets.transformer import TransformerTarget

SHIPPED = "shapes"
"""The model whose weights are there."""
TINY = (
    "++model.network.sizes.hidden_size=64",
    "++model.network.sizes.intermediate_size=96",
    "++model.network.sizes.num_hidden_layers=2",
    "++model.network.sizes.num_attention_heads=2",
    "++model.network.sizes.num_key_value_heads=1",
    "weights=random",
    "temperature=0.05",  # random weights hardly prefer any token: rounding would tell
)
SIZES = {
    "lumina": ("image_size=64",),
    "emu3": ("image_size=32",),
    "janus_pro_1b": ("+model.spec.image_size=64",),
}
"""Options of layouts whose images have a size."""
PROMPTS = ["3", "7"]
"""Texts, and classes."""
AGREE = 0.9
"""Share of the tokens that must be equal: one that rounding changes, changes all that follow."""


@dataclass
class Found:
    """What the checks found so far; gpu.json holds it, and is written after each of them.

    Attributes:
        device: its name.
        file: gpu.json.
        same_tokens: by model and method, the share of equal tokens.
        errors: by model and method, why there is none.
        result: `unfinished`, and at the end `passed` or `failed`.
    """

    device: str
    file: Path
    same_tokens: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    result: str = "unfinished"

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Say what is done in the block, and how it ended. An exception costs this check alone."""
        print(f"{name} … ", end="", flush=True)
        begun = time.monotonic()
        try:
            yield
        except Exception as problem:
            first = next(iter(str(problem).strip().splitlines()), "")
            self.errors[name] = f"{type(problem).__name__}: {first}"
        share = self.same_tokens.get(name)
        told = self.errors.get(name, "ready" if share is None else f"{share:.0%} equal")
        print(f"{told} ({time.monotonic() - begun:.0f} s)", flush=True)
        self.write()

    def write(self) -> None:
        """Write gpu.json."""
        write_json(self.file, {**asdict(self), "file": self.file.name})

    def finish(self) -> None:
        """Tell whether the checks passed.

        Raises:
            TemperaError: they did not.
        """
        wrong = [name for name, share in self.same_tokens.items() if share < AGREE]
        self.result = "failed" if wrong or self.errors else "passed"
        self.write()
        checks = f"{len(self.same_tokens)} checks of compiled rounds on {self.device}"
        if self.result == "passed":
            print(f"passed: {checks}")
            return
        reasons = [f"compiled and eager rounds emit different tokens with {name}" for name in wrong]
        reasons += [f"{name} fails with {why}" for name, why in self.errors.items()]
        raise TemperaError(
            f"failed: {checks}: {'; '.join(reasons)}: this is a bug in tempera or PyTorch; please "
            f"report it and attach {self.file}"
        )


def main(cfg: DictConfig) -> None:
    """Check each method on each model, print what is done, and write gpu.json."""
    methods = {name: cfg.methods if name == SHIPPED else cfg.of_layouts for name in cfg.models}
    count = sum(map(len, methods.values()))
    if not count:
        raise TemperaError("there is nothing to check: give models= and methods=")
    if cfg.dry_run:
        _tell(cfg.device, methods)
        return
    found = Found(name_of(parse_device(cfg.device)), Path(str(cfg.directory)) / "gpu.json")
    found.write()
    print(f"{count} checks on {found.device}; each compiles the rounds of a method")
    for model, of_model in methods.items():
        compare(found, cfg.device, model, of_model)
    found.finish()


def compare(found: Found, device: str, model: str, methods: Sequence[str]) -> None:
    """By method, the share of tokens that eager and compiled rounds of a model both emit."""
    options = _options(device, model)
    targets: list[TransformerTarget] = []
    with found.check(model):
        plain = Parts.of(composed("bench", [*options, "method=ar"]))
        targets = [plain.discrete_target() for _ in range(2)]
        for target in targets:
            target.pack()
        targets[1].compile()
    for method in methods if targets else ():
        name = f"{model} {method}"
        with found.check(name):
            parts = Parts.of(composed("bench", [*options, *f"method={method}".split()]))
            eager, compiled = (tokens(parts, target) for target in targets)
            found.same_tokens[name] = float((eager == compiled).double().mean())


def _options(device: str, model: str) -> list[str]:
    """Those by which a model is checked."""
    options = [f"device={device}", f"model={model}", "dtype=float32", "top_k=10"]
    return options if model == SHIPPED else [*options, *TINY, *SIZES.get(model, ())]


def _tell(device: str, methods: Mapping[str, Sequence[str]]) -> None:
    """Print what is checked of each model.

    Raises:
        TemperaError: a model or method is none.
    """
    for model, of_model in methods.items():
        for method in of_model:
            options = [*_options(device, model), "dry_run=true", *f"method={method}".split()]
            Parts.of(composed("bench", options))
        checks = "1 check" if len(of_model) == 1 else f"{len(of_model)} checks"
        print(f"to do: {checks} of model={model}: {', '.join(of_model)}")
    print("to download: nothing")
    print("time: half a minute to over a minute per check on an H200, longer on a CPU")


def tokens(parts: Parts, target: TransformerTarget) -> Tensor:
    """The tokens of two batches [2B, N]; if compiled, the second one replays the first's graphs."""
    with redirect_stdout(StringIO()):  # which says of each draft that it is random
        method = cast(Method, parts.method(target, parts.rule()))
    batches = []
    for seed in range(2):
        streams = RandomStreams(seed, PROMPTS, target.device)
        batches.append(method.decode(target, streams, PROMPTS).tokens.cpu())
    return torch.cat(batches)
