"""Checks of the command line that are common to all scripts: it must not choose a missing entry of
a group, delete an option, or change an option's shape.
"""

import argparse
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf

from tempera.config.messages import belongs_elsewhere, unknown_option
from tempera.errors import TemperaError, shortened


def check_arguments(conf: Path, config_name: str, arguments: Sequence[str]) -> None:
    """Raise TemperaError for mistakes that Hydra ignores or does not report in one sentence: an
    unknown choice of a group of `conf/`, flags that it does not have, and text that no file can
    contain. With `--config-dir`, which may add choices, all choices pass.
    """
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise TemperaError(
                f"'{shortened(argument)}' is not UTF-8 text, or holds a NUL: write it again"
            )
        if re.match(r"[+~]*@", argument):
            raise TemperaError(f"'{shortened(argument)}' names no group: write group=choice")
        if re.match(r"[+~]*=", argument):
            raise TemperaError(f"'{shortened(argument)}' names no option: write option=value")
    if _flags(arguments).config_dir is None:
        for argument in arguments:
            if group := _group(conf, argument):
                _check_choices(conf, config_name, group, argument.partition("=")[2])
    _check_order(arguments)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags, such as `--cfg job`."""
    if not any(argument.startswith("-") for argument in arguments):
        return argparse.Namespace(config_dir=None)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as told:
        try:
            given = get_args_parser().parse_intermixed_args(list(arguments))
        except SystemExit as end:
            if not end.code:  # --version
                return argparse.Namespace(config_dir=None)
            reason = told.getvalue().rpartition("error: ")[2]
            raise TemperaError(f"{shortened(reason, 200)}; --hydra-help lists all flags") from None
    _check_flags(given)
    return given


def _check_order(arguments: Sequence[str]) -> None:
    """Raise TemperaError for flags between options, which Hydra cannot read."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            get_args_parser().parse_args(list(arguments))
        except SystemExit as end:
            if end.code:
                raise TemperaError(
                    "flags such as -m go before all options or after them, not between them"
                ) from None


def _check_flags(given: argparse.Namespace) -> None:
    """Raise TemperaError where Hydra has no sentence."""
    if given.experimental_rerun is not None:
        raise TemperaError(
            "--experimental-rerun reads a pickle, which can run code: give the run's own options"
        )
    if given.resolve and given.cfg is None and not given.help:
        raise TemperaError("--resolve goes with --cfg job: give both")
    shows = given.cfg is not None, given.info is not None
    if sum((given.run, given.multirun, given.shell_completion, *shows)) > 1:
        raise TemperaError(
            "--run, --multirun, --cfg, --info and --shell-completion exclude each other: give one"
        )
    shells = ("install=", "uninstall=", "query=")
    if given.shell_completion and not any(one.startswith(shells) for one in given.overrides):
        raise TemperaError("--shell-completion goes with install=bash, or another shell: give both")


def _group(conf: Path, argument: str) -> str | None:
    """The group of `conf/` that an argument chooses from, if any."""
    match = re.fullmatch(r"\+?([\w/]+)(@[\w.:]+)?=.*", argument, re.DOTALL)
    return match[1] if match and (conf / match[1]).is_dir() else None


def _check_choices(conf: Path, config_name: str, group: str, value: str) -> None:
    choices = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    if re.match(r"(choice|range|interval|glob|shuffle|sort|tag)\(", value):
        return  # a sweep over choices
    if value == "null" and group in _optional(conf, config_name):
        raise TemperaError(f"{group}=null is not possible; ~{group} removes it")
    several = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    for choice in several.split(","):
        if choice.strip().strip("'\"") not in choices:
            raise TemperaError(
                f"there is no {group}={shortened(choice)}; choose one of {', '.join(choices)}"
            )


def _optional(conf: Path, config_name: str) -> set[str]:
    """The groups that a script can do without."""
    script = OmegaConf.load(conf / f"{config_name}.yaml")
    defaults = OmegaConf.select(script, "defaults", default=[])
    entries = [
        (str(key), value)
        for entry in defaults
        if isinstance(entry, DictConfig)
        for key, value in OmegaConf.to_container(entry).items()  # type: ignore[union-attr]
    ]
    return {key.split()[-1] for key, value in entries if key.startswith("optional ")}


def check_shape(cfg: DictConfig, conf: Path, config_name: str, arguments: Sequence[str]) -> None:
    """Raise TemperaError if `cfg` lacks a top-level option, or if `arguments` changed an option's
    kind, for example from a list to a single value. Options that are null by default may be of any
    kind.
    """
    groups = [argument for argument in arguments if _group(conf, argument)]
    if len(groups) == len(arguments):
        return
    default = _composed(conf, config_name, groups)
    if default is None:
        return
    for key in default:
        if cfg._get_node(key, validate_access=False) is None:
            raise TemperaError(f"`{key!s}` cannot be removed: {_restoring(arguments, str(key))}")
    for argument in arguments:
        name = argument.partition("=")[0]
        added = name.startswith("+") and name[1:] not in default and "." not in name
        if added and argument not in groups and belongs_elsewhere(name[1:], conf):
            raise TemperaError(unknown_option(name[1:], conf, config_name, groups))
    _compare(cfg, default, default, "")


def _restoring(arguments: Sequence[str], key: str) -> str:
    """Advice on which argument to leave out to restore a deleted option: its own deletion, or that
    of the group that defines it.
    """
    deletions = [argument for argument in arguments if argument.startswith("~")]
    own = [argument for argument in deletions if argument[1:].partition("=")[0] == key]
    return f"leave out {', '.join(own or deletions) or f'~{key}'}"


def _composed(conf: Path, config_name: str, arguments: list[str]) -> DictConfig | None:
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            return compose(config_name, arguments)
    except HydraException:
        return None
    finally:
        GlobalHydra.instance().hydra = before


def _compare(cfg: Any, default: Any, root: DictConfig, prefix: str) -> None:
    for key in default:
        name = f"{prefix}{key!s}"
        ours, theirs = (
            cfg._get_node(key, validate_access=False),
            _resolved(default._get_node(key), root, name),
        )
        kind, wanted = _kind(ours), _kind(theirs)
        if kind == "open" or wanted in ("open", "null") or (kind, wanted) == ("null", "value"):
            continue
        shown = f"`{name}={_text(ours)}` is not possible"
        if wanted == "options" and kind != wanted:
            inner = next((str(inner) for inner in theirs if inner != "_target_"), "…")
            raise TemperaError(f"{shown}; it holds options, such as {name}.{inner}")
        if wanted == "options":
            if "_target_" in theirs and ours._get_node("_target_", validate_access=False) is None:
                raise TemperaError(f"{shown}; `{name}` needs its _target_")
            _compare(ours, theirs, root, f"{name}.")
        elif wanted == "list" and kind != wanted:
            raise TemperaError(f"{shown}; it must be a list, as in {name}=[a,b]")
        elif wanted == "value" and kind != wanted:
            raise TemperaError(f"{shown}; it must be a single value")


def _kind(node: Any) -> str:
    """The kind of an option; "open" if it is known only at run time."""
    if node is None or node._is_missing() or node._is_interpolation():
        return "open"
    if node._is_none():
        return "null"
    if isinstance(node, DictConfig):
        return "options"
    return "list" if isinstance(node, ListConfig) else "value"


def _resolved(node: Any, root: DictConfig, name: str) -> Any:
    """The target of an interpolation, if it is already known."""
    if node is None or not node._is_interpolation():
        return node
    try:
        value = OmegaConf.select(root, name)
    except Exception:  # Hydra's resolvers fail outside of a run
        value = ""
    return value if isinstance(value, DictConfig | ListConfig) else AnyNode(value)


def _text(node: Any) -> str:
    """A value in the form that the command line takes."""
    if isinstance(node, DictConfig | ListConfig):
        return shortened(str(OmegaConf.to_container(node) or "null"))
    value = node._value()
    return "null" if value is None else shortened(str(value))
