"""Entry points of the commands `tempera-…` and of the scripts in `eval/` and `train_draft/`.

Called with a configuration, as in tests and notebooks, each is a plain function: it returns its
result and raises `TemperaError`. Each imports its module only when it runs: a wrong option is
reported before torch is imported, and Ctrl-C, or SIGTERM, is answered from the first moment.
"""

import gc
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from tempera.runtime.terminal import take_all_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig

CHECKED = {
    "eval": "asked",
    "score": "score",
    "export": "export",
    "train_draft": "train",
    "prepare": "prepare",
    "bench": "bench",
    "tune": "tune",
}
"""Modules whose `read_options(cfg)` raises TemperaError for a wrong option of their command, by the
command's configuration.
"""


def evaluate(cfg: "DictConfig | None" = None) -> object:
    """`tempera-eval`: generate images, and measure acceptance, speed and quality."""
    return _script("eval", "evaluate", cfg)


def score(cfg: "DictConfig | None" = None) -> object:
    """`tempera-score`: score pictures without the model that drew them."""
    return _script("score", "score", cfg)


def export(cfg: "DictConfig | None" = None) -> object:
    """`tempera-export`: lay pictures out as a benchmark's scorer expects them."""
    return _script("export", "export", cfg)


def report(cfg: "DictConfig | None" = None) -> object:
    """`tempera-report`: compare runs."""
    return _script("report", "report", cfg)


def bench(cfg: "DictConfig | None" = None) -> object:
    """`tempera-bench`: time a round and its parts."""
    return _script("bench", "bench", cfg)


def gpu_check(cfg: "DictConfig | None" = None) -> object:
    """`tempera-gpu-check`: check that a GPU decodes right."""
    return _script("gpu_check", "gpu_check", cfg)


def tune(cfg: "DictConfig | None" = None) -> object:
    """`tempera-tune`: find the fastest setting within a budget."""
    return _script("tune", "tune", cfg)


def train(cfg: "DictConfig | None" = None) -> object:
    """`tempera-train`: train the EAGLE draft of a model."""
    return _script("train_draft", "train", cfg)


def prepare(cfg: "DictConfig | None" = None) -> object:
    """`tempera-prepare`: encode captions and images to shards of codes."""
    return _script("prepare", "prepare", cfg)


def check(config_name: str, cfg: "DictConfig") -> None:
    """Raise TemperaError for an option that a command reads itself and that is not possible."""
    if module := CHECKED.get(config_name):
        import_module(f"tempera.commands.{module}").read_options(cfg)


def check_files(config_name: str, cfgs: "Sequence[DictConfig]") -> None:
    """Raise TemperaError for files that jobs of an evaluation would not get."""
    if config_name == "eval":
        from tempera.commands import evaluate

        evaluate.check_files(cfgs)


def _script(config_name: str, module: str, cfg: "DictConfig | None") -> object:
    """Call the module's `main(cfg)`; without `cfg`, run the command line and return None."""

    def main(cfg: "DictConfig") -> object:
        command = import_module(f"tempera.commands.{module}")
        if "torch" not in sys.modules:  # nobody can have set its modes
            return command.main(cfg)
        from tempera.runtime.torch_modes import usual_modes

        with usual_modes(grad=True):
            return command.main(cfg)

    def started(cfg: "DictConfig") -> object:
        import_module(f"tempera.commands.{module}")
        if not gc.isenabled():
            gc.freeze()  # what was imported stays
            gc.enable()
        return main(cfg)

    if cfg is not None:
        return main(cfg)
    gc.disable()  # until all is imported: it would look again and again through torch's modules
    take_all_text()
    if sys.flags.optimize > 1:
        sys.exit("error: python -OO drops the docstrings that transformers reads: use python -O")
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # of a scheduler, as Ctrl-C
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        from tempera.config.cli import run

        run(config_name, started)
    except KeyboardInterrupt:
        print("interrupted; run the command again", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.enable()
        gc.freeze()  # the process ends, and would look through all modules for what to free
    return None
