"""Scripts: a function of a configuration becomes a command whose mistakes read as one sentence."""

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.config.arguments import check_arguments, check_shape
from tempera.config.compose import quoted, written
from tempera.config.messages import sentence
from tempera.runtime.installation import conf_directory

T = TypeVar("T")


INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
STARTS_AGAIN = ("report", "bench", "calibrate")
"""Scripts that keep nothing of what they have done so far."""
LITERAL = ("prompt", "baseline")
"""Options whose values are taken as they are, commas and quotes included."""


def script(
    config_name: str, positional: str | None = None
) -> Callable[[Callable[[DictConfig], T]], Callable[..., T | None]]:
    """Make `main(cfg)` a Hydra script on `conf/<config_name>.yaml`; see
    `tempera.runtime.installation.conf_directory`.

    From the command line every mistake of the user becomes `error: <sentence>` on standard error
    and exit status 1, and Ctrl-C a sentence and exit status 130; other exceptions keep their
    traceback, and HYDRA_FULL_ERROR=1 shows all of them. Options in `LITERAL` are taken literally,
    commas and quotes included. Called with a `cfg`, as tests and notebooks do, the script is the
    plain function: it returns its metrics and raises `TemperaError`.

    With `positional`, arguments that are no options are gathered in the list of that option: `DIR
    DIR` stands for `runs=[DIR,DIR]`.
    """

    def decorate(main: Callable[[DictConfig], T]) -> Callable[..., T | None]:
        conf = conf_directory()

        @functools.wraps(main)
        def job(cfg: DictConfig) -> T:
            try:
                check_shape(cfg, conf, config_name, HydraConfig.get().overrides.task)
                return main(cfg)
            except KeyboardInterrupt:
                _leave(_how_to_go_on(config_name))
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
            arguments = [literal(argument) for argument in sys.argv[1:]]
            sys.argv[1:] = arguments if positional is None else named(arguments, positional)
            with _hydra_raises():
                try:
                    check_arguments(conf, config_name, sys.argv[1:])
                    run()
                except KeyboardInterrupt:
                    _leave("interrupted; give the command again")
                except Exception as problem:
                    _tell(problem, conf, config_name)
                    raise
            return None

        return entry

    return decorate


def literal(argument: str) -> str:
    """Quote the value of an option in `LITERAL` for Hydra's grammar, unless it is quoted already or
    null; other arguments stay as they are.
    """
    key, separator, value = argument.partition("=")
    if (
        key.lstrip("+") not in LITERAL
        or not separator
        or value == "null"
        or re.fullmatch(r"(['\"]).*\1", value, re.DOTALL)
    ):
        return argument
    return f"{key}={quoted(value)}"


def named(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments with those that are no options gathered in a list, `option=[…]`: names of files
    and directories, and whatever holds no `=`.
    """
    places = [
        argument
        for argument in arguments
        if not argument.startswith("-") and ("=" not in argument or Path(argument).exists())
    ]
    others = [argument for argument in arguments if argument not in places]
    return [*others, f"{option}=[{','.join(map(quoted, places))}]"] if places else others


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


def _how_to_go_on(config_name: str) -> str:
    """What to say after Ctrl-C: whether the same command goes on, and in which directory where
    every start makes a new one.
    """
    if config_name in STARTS_AGAIN:
        return "interrupted; the same command starts again"
    hydra = HydraConfig.get()
    sweeping = hydra.mode == RunMode.MULTIRUN
    option = "hydra.sweep.dir" if sweeping else "hydra.run.dir"
    given = any(override.startswith(f"{option}=") for override in hydra.overrides.hydra)
    if config_name != "eval" or given:
        return "interrupted; the same command goes on"
    place = str(hydra.sweep.dir if sweeping else hydra.runtime.output_dir)
    return f"interrupted; the same command with {shlex.quote(written(option, place))} goes on"


def _leave(told: str) -> NoReturn:
    """Say so and exit as after Ctrl-C."""
    print(told, file=sys.stderr)
    sys.exit(INTERRUPTED)


def _tell(problem: Exception, conf: Path, config_name: str) -> None:
    """Print the problem as one sentence and exit with status 1, where it is the user's."""
    if told := sentence(problem, conf, config_name, sys.argv[1:]):
        print(f"error: {told}", file=sys.stderr)
        sys.exit(1)
