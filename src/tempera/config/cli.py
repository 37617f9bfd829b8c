"""Scripts: a function of a configuration becomes a command whose mistakes read as one sentence."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.config.compose import check_optional_choices, quoted
from tempera.config.messages import sentence
from tempera.runtime.installation import conf_directory

T = TypeVar("T")


def script(config_name: str) -> Callable[[Callable[[DictConfig], T]], Callable[..., T | None]]:
    """Make `main(cfg)` a Hydra script on `conf/<config_name>.yaml`; see
    `tempera.runtime.installation.conf_directory`.

    From the command line every mistake of the user becomes `error: <sentence>` on standard error
    and exit status 1; other exceptions keep their traceback, and HYDRA_FULL_ERROR=1 shows all of
    them. `prompt=` is taken literally, commas and quotes included. Called with a `cfg`, as tests
    and notebooks do, the script is the plain function: it returns its metrics and raises
    `TemperaError`.
    """

    def decorate(main: Callable[[DictConfig], T]) -> Callable[..., T | None]:
        conf = conf_directory()

        @functools.wraps(main)
        def job(cfg: DictConfig) -> T:
            try:
                return main(cfg)
            except Exception as problem:
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    raise  # the launcher says which point of the sweep it was
                _tell(problem, conf, config_name)
                raise

        run = hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)(job)

        @functools.wraps(main)
        def entry(cfg: DictConfig | None = None) -> T | None:
            if cfg is not None:
                return main(cfg)
            sys.argv[1:] = [literal_prompt(argument) for argument in sys.argv[1:]]
            with _hydra_raises():
                try:
                    check_optional_choices(conf, config_name, sys.argv[1:])
                    run()
                except Exception as problem:
                    _tell(problem, conf, config_name)
                    raise
            return None

        return entry

    return decorate


def literal_prompt(argument: str) -> str:
    """Quote the value of `prompt=...` for Hydra's grammar, unless it is quoted already or null;
    other arguments stay as they are.
    """
    key, separator, value = argument.partition("=")
    if (
        key.lstrip("+") != "prompt"
        or not separator
        or value == "null"
        or re.fullmatch(r"(['\"]).*\1", value, re.DOTALL)
    ):
        return argument
    return f"{key}={quoted(value)}"


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let exceptions leave `hydra.main` instead of being printed by it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]


def _tell(problem: Exception, conf: Path, config_name: str) -> None:
    """Print the problem as one sentence and exit with status 1, where it is the user's."""
    if told := sentence(problem, conf, config_name, sys.argv[1:]):
        print(f"error: {told}", file=sys.stderr)
        sys.exit(1)
