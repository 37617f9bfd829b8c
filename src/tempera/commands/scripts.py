"""Entry points of the commands `tempera-…` and of the scripts in `eval/` and `train_draft/`.

Each imports its module only when it runs, after composing its configuration, so a wrong option is
reported before torch is imported.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import tempera.config.instantiate  # noqa: F401  the resolvers of conf/
from tempera.config.cli import script


@script("eval")
def evaluate(cfg: DictConfig) -> dict[str, float]:
    """`tempera-eval`: generate images, and measure acceptance, speed and quality."""
    from tempera.config.build import check_compile, check_method

    check_method(cfg)
    check_compile(cfg)
    from tempera.commands.evaluate import main

    return main(cfg)


@script("report", positional="runs")
def report(cfg: DictConfig) -> list[Path]:
    """`tempera-report`: compare runs."""
    from tempera.commands.report import main

    return main(cfg)


@script("bench")
def bench(cfg: DictConfig) -> dict[str, Any]:
    """`tempera-bench`: time a round and its parts."""
    from tempera.config.build import check_method

    check_method(cfg)
    from tempera.commands.bench import main

    return main(cfg)


@script("calibrate")
def calibrate(cfg: DictConfig) -> dict[str, float]:
    """`tempera-calibrate`: measure a draft for `schedule=calibrated`."""
    from tempera.config.build import check_method

    check_method(cfg)
    from tempera.commands.calibrate import main

    return main(cfg)


@script("tune")
def tune(cfg: DictConfig) -> dict[str, Any]:
    """`tempera-tune`: find the fastest setting within a budget."""
    from tempera.commands.tune import main

    return main(cfg)


@script("train_draft")
def train(cfg: DictConfig) -> dict[str, Any]:
    """`tempera-train`: train the EAGLE draft of a model."""
    from tempera.config.build import check_training

    check_training(cfg)
    from tempera.commands.train import main

    return main(cfg)


@script("prepare")
def prepare(cfg: DictConfig) -> dict[str, int]:
    """`tempera-prepare`: encode captions and images to shards of codes."""
    from tempera.commands.prepare import main

    return main(cfg)


@script("build_shapes")
def build(cfg: DictConfig) -> None:
    """`tempera-build`: train the networks of the shipped model."""
    from tempera.commands.build_shapes import main

    main(cfg)
