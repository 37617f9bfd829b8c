"""Turn a function of a configuration into a command that reports the user's mistakes in one
sentence.
"""

import functools
import logging
import os
import re
import select
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
from tempera.config.compose import composed_run, pasted, quoted
from tempera.config.effects import check_effects
from tempera.config.messages import sentence
from tempera.config.tuned import is_auto, with_tuned
from tempera.errors import TemperaError
from tempera.runtime.distributed import started_as_main
from tempera.runtime.installation import conf_directory

T = TypeVar("T")


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
UNREAD = 141
"""Exit status when nobody reads standard output any more, as in shells after `| head`."""
AGAIN = "interrupted; run the command again"
STARTS_AGAIN = ("report", "bench", "calibrate")
"""Scripts that store no intermediate results and start over after an interruption."""
LITERAL = ("prompt", "baseline")
"""Options whose values are taken literally, including commas and quotes."""


def script(
    config_name: str, positional: str | None = None
) -> Callable[[Callable[[DictConfig], T]], Callable[..., T | None]]:
    """Decorator: make `main(cfg)` a Hydra script with the configuration `conf/<config_name>.yaml`
    (`tempera.runtime.installation.conf_directory`).

    On the command line, a mistake of the user prints `error: <sentence>` and exits with status 1;
    Ctrl-C prints a sentence too (`INTERRUPTED`). Other exceptions keep their traceback, and
    HYDRA_FULL_ERROR=1 shows all tracebacks. Called with a `cfg`, as in tests and notebooks, the
    script is the plain function: it returns its result and raises `TemperaError`.

    Args:
        config_name: name of the configuration, without `.yaml`.
        positional: list option of positional arguments: with `runs`, `DIR DIR` is `runs=[DIR,DIR]`.
    """

    def decorate(main: Callable[[DictConfig], T]) -> Callable[..., T | None]:
        """Wrap `main` as a script."""
        conf = conf_directory()

        @functools.wraps(main)
        def job(cfg: DictConfig) -> T:
            """Run `main` inside Hydra: once, or for one point of a sweep."""
            _hide_requests()
            try:
                arguments = list(HydraConfig.get().overrides.task)
                _check(cfg, conf, config_name, arguments)
                return main(_without_auto(cfg, config_name, arguments))
            except KeyboardInterrupt:
                _exit_interrupted(_how_to_resume(config_name))
            except Exception as problem:
                if HydraConfig.get().mode == RunMode.MULTIRUN and not _is_interruption(problem):
                    raise  # the launcher names the point of the sweep
                _exit_if_mistake(problem, conf, config_name, _how_to_resume(config_name))
                raise

        run = hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)(job)

        @functools.wraps(main)
        def entry(cfg: DictConfig | None = None) -> T | None:
            """Call `main(cfg)`; without `cfg`, run the command line and return None."""
            if cfg is not None:
                return main(cfg)
            arguments = [literal(argument) for argument in sys.argv[1:]]
            sys.argv[1:] = arguments if positional is None else named(arguments, positional)
            with _hydra_raises():
                try:
                    check_arguments(conf, config_name, sys.argv[1:])
                    run()
                    sys.stdout.flush()
                except KeyboardInterrupt:
                    _exit_interrupted(AGAIN)
                except Exception as problem:
                    _exit_if_mistake(problem, conf, config_name)
                    raise
            return None

        return entry

    return decorate


def _check(cfg: DictConfig, conf: Path, config_name: str, arguments: Sequence[str]) -> None:
    """Check options against each other. Outside of a sweep, refuse what has no effect on a run by
    itself, and say that an experiment is a sweep.

    Raises:
        TemperaError: an option has the wrong kind or no effect, or `launcher=` starts nothing.
    """
    check_shape(cfg, conf, config_name, arguments)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    check_effects(cfg, config_name, arguments)
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group == "launcher" and choice != "local":
            raise TemperaError(
                f"`{argument}` has no effect without -m: it starts the runs of a sweep, and one "
                "run is a sweep of one with -m"
            )
        if group == "experiment" and choice and started_as_main():
            print(f"{argument} is a sweep, and this is one run of it: -m makes all its runs")


def _hide_requests() -> None:
    """Leave out the lines that the hub's library logs for each request."""
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)


def _without_auto(cfg: DictConfig, config_name: str, arguments: Sequence[str]) -> DictConfig:
    """The configuration with the options that `method=auto` stands for, which are printed."""
    if not is_auto(cfg):
        return cfg
    found = composed_run(config_name, arguments, str(cfg.get("directory", "")))
    options = with_tuned(cfg, [])
    print(f"method=auto is {' '.join(options)}")
    return found


def literal(argument: str) -> str:
    """Quote the value of a `LITERAL` option for Hydra's grammar, unless it is already quoted or
    null. Return other arguments unchanged.
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
    """Collect positional arguments into a list `option=[…]`. Positional are names of existing files
    and directories, and arguments without `=`.
    """
    places = [
        argument
        for argument in arguments
        if not argument.startswith("-") and ("=" not in argument or _exists(argument))
    ]
    others = [argument for argument in arguments if argument not in places]
    return [*others, f"{option}=[{','.join(map(quoted, places))}]"] if places else others


def _exists(place: str) -> bool:
    """Whether there is such a file or directory; text may be too long for a name."""
    try:
        return Path(place).exists()
    except OSError:
        return False


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Make `hydra.main` raise exceptions instead of printing them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]


def _how_to_resume(config_name: str) -> str:
    """The message after Ctrl-C: whether the same command resumes, and the directory option to add
    if each start would create a new directory.
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
    return f"interrupted; the same command with {pasted(option, place)} goes on"


def _is_interruption(problem: BaseException | None) -> bool:
    """Whether an exception came from Ctrl-C: libraries that are interrupted may raise others."""
    met: set[int] = set()  # an error can be among its own causes
    while problem is not None and id(problem) not in met:
        if isinstance(problem, KeyboardInterrupt):
            return True
        met.add(id(problem))
        problem = problem.__cause__ or problem.__context__
    return False


def _is_unread() -> bool:
    """Whether standard output is a pipe that nobody reads; the rest of it is dropped then."""
    output = sys.stdout.fileno()
    pipe = select.poll()
    pipe.register(output, 0)  # errors are always told
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _exit_interrupted(message: str) -> NoReturn:
    """Exit with the status of Ctrl-C; the main process of a run prints a message."""
    if started_as_main():
        print(message, file=sys.stderr)
    sys.exit(INTERRUPTED)


def _exit_if_mistake(
    problem: Exception, conf: Path, config_name: str, interrupted: str = AGAIN
) -> None:
    """If the problem is a mistake of the user, print it as one sentence and exit with status 1; if
    it comes from Ctrl-C, or Ctrl-C comes now, exit with that message. Exit quietly if nobody reads
    standard output any more.
    """
    if isinstance(problem, BrokenPipeError) and _is_unread():
        sys.exit(UNREAD)
    if _is_interruption(problem):
        _exit_interrupted(interrupted)
    try:
        message = sentence(problem, conf, config_name, sys.argv[1:])
    except KeyboardInterrupt:
        _exit_interrupted(interrupted)
    if message:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)
