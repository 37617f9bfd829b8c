"""Composes configurations in Python from options, with the command line's checks and messages."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from tempera.config import resolvers  # noqa: F401  conf/ needs them
from tempera.config.messages import sentence
from tempera.config.nodes import plain
from tempera.config.old_names import check_names
from tempera.config.search import DIRECTORIES
from tempera.errors import TemperaError, shown

SEVERAL = {"torchmetrics"}
"""Groups that take a list of choices: each adds options under its own name."""
WORDS = {"null", "true", "false", "yes", "no", "on", "off", "inf", "nan"}
"""Words that Hydra does not read as text unless they are quoted."""


def composed(config_name: str, arguments: Sequence[str], directory: Path | str = ".") -> DictConfig:
    """Compose `conf/<config_name>.yaml` with options `name=value`, and with what Hydra would add to
    a run in a directory: the directory, unless it is an option, the choice in each group and the
    arguments.

    Raises:
        TemperaError: an option is wrong; the message is that of the command line.
    """
    with in_one_sentence(config_name, arguments):
        check_choices(config_name, arguments)
        cfg = DIRECTORIES.get().load(config_name, arguments)
        choices = plain(cfg.hydra.runtime.choices)
        facts = {"directory": str(directory), "choices": choices, "overrides": list(arguments)}
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        given = {option_name(argument) for argument in arguments}
        for name, value in facts.items():
            if name in cfg and name not in given:
                OmegaConf.update(cfg, name, value, merge=False)
        check_added(config_name, arguments)
        check_names(config_name, cfg)
        check_local(cfg)
    return cfg


def check_choices(config_name: str, arguments: Sequence[str]) -> None:
    """Raise TemperaError for a list of choices in a group of which a run has one: Hydra would mix
    them, and forget that a choice was made.
    """
    lists = [argument for argument in arguments if re.match(r"\+*\w+=\[", argument)]
    if not lists:
        return
    groups = set(DIRECTORIES.get().load(config_name, []).hydra.runtime.choices) - SEVERAL
    for argument in lists:
        name = option_name(argument)
        if name in groups:
            raise TemperaError(
                f"a run takes one {name}, but {argument} is a list: give {name}=CHOICE, or -m "
                f"{name}=A,B for one run of each"
            )


def check_added(config_name: str, arguments: Sequence[str]) -> None:
    """Raise TemperaError for an option of other choices that `+` or `++` adds: nothing reads it."""
    directories = DIRECTORIES.get()
    added = {}
    for argument in arguments:
        name = option_name(argument)
        is_new = argument.startswith("+") and name not in directories.groups()
        if is_new and "." not in name and directories.owners(name):  # else its signature checks it
            added[name] = argument
    if not added:
        return
    others = [argument for argument in arguments if argument not in added.values()]
    cfg = directories.load(config_name, others)
    for name, argument in added.items():
        if name not in cfg:
            raise TemperaError(
                f"`{name}` has no effect with these options: leave out {argument}, or choose a "
                "method that uses it",
                option=name,
            )


def check_local(cfg: DictConfig) -> None:
    """Raise TemperaError for a file of this machine whose options are below `local`, where nothing
    reads them.
    """
    if "local" in cfg:
        raise TemperaError(
            "local/default.yaml sets nothing: begin it with the line `# @package _global_`"
        )


def typed(cfg: DictConfig) -> list[str]:
    """The options of the command line; none where a configuration was composed without one."""
    given = OmegaConf.select(cfg, "overrides", throw_on_resolution_failure=False)
    return list(given or ())


def given(cfg: DictConfig) -> dict[str, Any]:
    """What the command line and its experiment set: the choices by group, and the values by option,
    in the configuration's order.
    """
    choices = cfg.choices
    names = {option_name(argument) for argument in typed(cfg)}
    if choices.get("experiment"):
        names |= DIRECTORIES.get().sets(f"experiment/{choices.experiment}")
    found: dict[str, Any] = {}
    for top in map(str, cfg):
        for name in sorted(name for name in names if name.partition(".")[0] == top):
            value = choices.get(name) or OmegaConf.select(cfg, name)
            found[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def option_name(argument: str) -> str:
    """The name in an argument `name=value`, `+name=value` or `~name`."""
    return argument.partition("=")[0].lstrip("+~")


@contextmanager
def in_one_sentence(config_name: str, arguments: Sequence[str]) -> Iterator[None]:
    """Turn exceptions for which the command line would print a sentence into a TemperaError with
    this sentence. A TemperaError of the library is not changed.
    """
    try:
        yield
    except TemperaError:
        raise
    except Exception as problem:
        if said := sentence(problem, config_name, arguments):
            raise TemperaError(said) from problem
        raise


def written(name: str, value: object) -> str:
    """The option `name=value` in Hydra's grammar; strings are taken literally."""
    return f"{name}={_written(value)}"


def pasted(name: str, value: object) -> str:
    """The option `name=value`, quoted for a shell."""
    return shlex.quote(written(name, value))


def _written(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Integral():
            return repr(int(value))  # numpy's too
        case Real():
            return repr(float(value))
        case str() | Path():
            return str(value) if _is_plain(str(value)) else quoted(str(value))
        case dict():
            return "{" + ",".join(f"{key}:{_written(inner)}" for key, inner in value.items()) + "}"
        case list() | tuple() | range():
            return "[" + ",".join(map(_written, value)) + "]"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return _written(str(value).removeprefix("torch."))
    raise TemperaError(
        f"{shown(value)} cannot be an option: give a number, a text, true or false, None, or a list"
    )


def _is_plain(text: str) -> bool:
    """Whether Hydra reads the text literally without quotes."""
    return bool(re.fullmatch(r"(?:[A-Za-z_]|\.{0,2}/)[\w./-]*", text)) and text.lower() not in WORDS


def quoted(text: str) -> str:
    """Quote a text so that Hydra's grammar reads it literally, including commas, quotes and
    interpolations.
    """
    text = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)  # OmegaConf's escapes
    text = re.sub(r"(\\*)(\"|$)", lambda match: match[1] * 2 + match[2].replace('"', '\\"'), text)
    return f'"{text}"'
