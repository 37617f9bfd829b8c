"""Runs a function of a configuration as a command: Hydra composes the configuration, and one
handler tells every mistake of the user in one sentence.
"""

import logging
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.config.compose import check_added, check_choices, check_local, pasted, quoted
from tempera.config.messages import causes, sentence, text_of
from tempera.config.old_names import check_names
from tempera.config.search import DIRECTORIES, Directories
from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import started_as_main
from tempera.runtime.files import remove_hydras
from tempera.runtime.installation import installed_version
from tempera.runtime.terminal import take_all_text

log = logging.getLogger("tempera")

PACKAGE = Path(__file__).parent.parent
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
UNREAD = 141
"""Exit status when nobody reads standard output any more, as in shells after `| head`."""
AGAIN = "interrupted; run the command again"
LITERAL = ("prompt", "baseline")
"""Options whose text is taken as it is typed, commas and quotes included."""
SEVERAL = r"(\w+)=(?:.*,|(?:choice|glob)\()"
"""An argument with several values: `method=ar,eagle`, `method=glob(cool*)`."""
STARTS_AGAIN = ("report", "score", "export", "bench", "gpu_check")
"""Scripts that start over after an interruption."""


@dataclass(frozen=True)
class Failed:
    """What a job of a sweep returns that failed. sentence: what was wrong."""

    sentence: str


def run(config_name: str, main: Callable[[DictConfig], object]) -> None:
    """Run the command line in `sys.argv` with `conf/<config_name>.yaml`.

    A mistake of the user prints `error: <sentence>` and exits with status 1, a bug says where to
    report it, Ctrl-C how to go on (`INTERRUPTED`). HYDRA_FULL_ERROR=1 shows every traceback.

    Args:
        config_name: of the primary configuration, without `.yaml`.
        main: called with the composed and checked configuration.
    """
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # of joblib after Ctrl-C
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and does not print and exit itself
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"tempera {installed_version()}")
            return
        directories = Directories.of(sys.argv[1:])
        directories.use()
        arguments = _read(sys.argv[1:], directories.main)
        check_choices(config_name, arguments)
        sys.argv[1:] = for_each_choice(config_name, arguments)
        if not started_as_main():
            sys.argv.append("hydra/job_logging=disabled")  # the main process writes the run's log
        start = hydra.main(
            version_base="1.3", config_path=str(directories.main), config_name=config_name
        )(Job(config_name, main, directories, full))
        try:
            start()
        except SystemExit:  # of --help: what it printed is still in the buffer
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt as interruption:
        _exit(INTERRUPTED, str(interruption) or AGAIN)
    except Exception as problem:
        if full and full != "0":
            raise
        _exit_with(problem, config_name)
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


@dataclass(frozen=True)
class Job:
    """What Hydra calls for a run, or for each point of a sweep, which may be in another process: it
    is pickled there.

    Attributes:
        config_name, main: see `run`.
        directories: of the command line.
        full: HYDRA_FULL_ERROR of the user.
    """

    config_name: str
    main: Callable[[DictConfig], object]
    directories: Directories
    full: str | None

    def __call__(self, cfg: DictConfig) -> object:
        """Check the options, and call `main`."""
        self.directories.use()
        take_all_text()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request to the hub
        try:
            check_added(self.config_name, list(HydraConfig.get().overrides.task))
            check_names(self.config_name, cfg)
            check_local(cfg)
            _check_sweep(HydraConfig.get())
            if cfg.get("device") == "auto" and started_as_main():
                from tempera.runtime.processor import tell_device

                tell_device()
            result = self.main(cfg)
            if cfg.get("dry_run"):
                _remove_unused(Path(HydraConfig.get().runtime.output_dir))
            return result
        except Exception as problem:
            return _failed(problem, self.config_name, self.full)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_how_to_resume(self.config_name)) from None


def _failed(problem: Exception, config_name: str, full: str | None) -> Failed:
    """Tell a problem of a run and exit; return one of a point of a sweep, whose others go on."""
    said = sentence(problem, config_name, sys.argv[1:])
    is_stopped = isinstance(problem, BrokenPipeError) or _is_interruption(problem)
    if isinstance(problem, TemperaError):
        _remove_unused(Path(HydraConfig.get().runtime.output_dir))
    if said is None and not is_stopped:
        log.error("a bug", exc_info=problem)  # into the run's log file
    if full:
        raise problem
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        _exit_with(problem, config_name, _how_to_resume(config_name))
    sweeper = str(HydraConfig.get().sweeper.get("_target_"))
    if is_stopped or not sweeper.endswith(".CaseSweeper"):
        raise problem  # Hydra's own sweeper stops at the first job that fails
    return Failed(said or _bug(problem))


def _exit_with(problem: Exception, config_name: str, interrupted: str = AGAIN) -> NoReturn:
    """Tell a problem in one sentence and exit; if it comes from Ctrl-C, say how to go on."""
    if isinstance(problem, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush
        sys.exit(UNREAD)
    if _is_interruption(problem):
        _exit(INTERRUPTED, interrupted)
    said = sentence(problem, config_name, sys.argv[1:]) or _bug(problem)
    print(f"error: {said}", file=sys.stderr)
    sys.exit(1)


def _bug(problem: Exception) -> str:
    """What to say about an exception that is not the user's mistake."""
    what = f"{type(problem).__name__}: {shortened(text_of(problem), most=300)}"
    traceback = "the traceback that is in the run's log file and that HYDRA_FULL_ERROR=1 shows"
    if place := _place_outside(problem):
        return f"{what} (in {place}, which is not tempera's; see {traceback})"
    return f"{what} (a bug in tempera: please report it, with {traceback})"


def _place_outside(problem: Exception) -> str | None:
    """The last place of a traceback, below tempera's first, that belongs neither to tempera nor to
    what is installed: a part of the user's own, which raised the exception or called what did.
    """
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    last, is_below = None, False
    for frame, line in walk_tb(problem.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            is_below = True
        elif is_below and file.is_file() and not any(map(file.is_relative_to, installed)):
            last = f"{frame.f_code.co_qualname} of {file.name}, line {line}"
    return last


def _exit(status: int, message: str) -> NoReturn:
    """Exit with a message of the main process."""
    if started_as_main():
        print(message, file=sys.stderr)
    sys.exit(status)


def _check_sweep(hydra_cfg: HydraConf) -> None:
    """Raise TemperaError for a preset of several cases without -m, unless it is for one of them,
    which has a method.
    """
    has_method = any(option.startswith("method=") for option in hydra_cfg.overrides.task)
    cases = hydra_cfg.sweeper.get("cases") or hydra_cfg.sweeper.get("table")
    if hydra_cfg.mode == RunMode.RUN and cases and not has_method:
        raise TemperaError("this preset is a sweep over several cases: add -m, or give method=")


def _remove_unused(directory: Path) -> None:
    """Remove the directory of a run that was refused, or was not for real, if it holds nothing but
    what Hydra wrote.
    """
    if not (directory / ".hydra").is_dir():
        return
    written = directory / f"{HydraConfig.get().job.name}.log"
    others = [file for file in directory.iterdir() if file.name != ".hydra"]
    if all(file == written and file.stat().st_size == 0 for file in others):
        written.unlink(missing_ok=True)
        remove_hydras(directory)


def _read(arguments: Sequence[str], main: Path) -> list[str]:
    """The command line as Hydra takes it: the texts of `prompt=` and `baseline=` quoted, and
    `--config-path`, beside which Hydra would look for itself, in full.

    Raises:
        TemperaError: an option is written as a flag.
    """
    flags, unknown = get_args_parser().parse_known_args(list(arguments))
    if unknown:
        raise TemperaError(
            f"cannot read {shortened(unknown[0])}: write options as name=value without dashes, "
            "after all flags"
        )
    given = flags.config_path
    words = {given: str(main), f"--config-path={given}": f"--config-path={main}"}
    return [words.get(argument, literal(argument)) for argument in arguments]


def literal(argument: str) -> str:
    """Quote the value of `prompt=` and `baseline=` for Hydra's grammar, unless it is quoted or
    null, and a path or a word whose signs the grammar lacks, such as `runs/a (2)` or `bücher`.
    Return other arguments unchanged.
    """
    name, _, value = argument.partition("=")
    whole = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|null"
    is_literal = name in LITERAL and not re.fullmatch(whole, value, re.DOTALL)
    is_single = not re.search(r"[][,{}$'\"\\]", value)
    is_text = is_single and ("/" in value or not value.isascii())
    if is_literal or (is_text and not _is_readable(argument)):
        return f"{name}={quoted(value)}"
    return argument


def _is_readable(argument: str) -> bool:
    """Whether Hydra's grammar reads an argument."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def for_each_choice(config_name: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a sweep; of several choices in a group, such as methods, an option that
    choices add, such as `gamma=2`, becomes a sweep of one value. Hydra applies other options before
    it chooses, and the first choice may not have them. Options that the script has anyway stay.
    """
    directories = DIRECTORIES.get()
    swept = {found[1] for one in arguments if (found := re.match(SEVERAL, one))}
    if swept.isdisjoint(directories.groups()):
        return list(arguments)
    fixed = directories.groups() | directories.sets(config_name)
    changed = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        is_single = re.fullmatch(r"[A-Za-z_][\w.]*=[^,()]*", argument)
        is_of_choice = is_single and name not in fixed and directories.adds(name)
        changed.append(f"{name}=choice({value})" if is_of_choice else argument)
    return changed


def _how_to_resume(config_name: str) -> str:
    """Which command goes on after Ctrl-C."""
    hydra = HydraConfig.get()
    if config_name in STARTS_AGAIN:
        return AGAIN
    sweeping = hydra.mode == RunMode.MULTIRUN
    option = "hydra.sweep.dir" if sweeping else "hydra.run.dir"
    return goes_on(option, str(hydra.sweep.dir if sweeping else hydra.runtime.output_dir))


def goes_on(option: str, directory: str) -> str:
    """Which command goes on in a directory, which `option` names."""
    return f"interrupted; to resume: {command_line(sys.argv[1:], option, directory)}"


def command_line(arguments: Sequence[str], option: str, directory: str) -> str:
    """This script with arguments, as one can paste it, in a directory that `option` names."""
    others = [argument for argument in arguments if not argument.startswith(f"{option}=")]
    script = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    return f"{shlex.join([*script, *others])} {pasted(option, directory)}"


def _is_interruption(problem: BaseException) -> bool:
    """Whether an exception came from Ctrl-C: libraries that are interrupted may raise others."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in causes(problem))
