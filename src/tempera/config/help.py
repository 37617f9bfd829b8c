"""The text of `--help`: how to call a script, its options with their values and comments, those of
the chosen groups, and what can be chosen.
"""

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tempera.config.compose import written
from tempera.config.search import DIRECTORIES
from tempera.runtime.installation import SCRIPTS, command

INTERNAL = (
    *("model", "tokens", "decoding", "pipeline", "free_parameter", "neighbours"),
    *("measured_with", "choices", "overrides", "directory", "hydra"),
)
"""Nodes that are made of other options."""
HIDDEN = ("hydra/", "family/", "paths/", "experiment/")
"""Where configurations lie whose options are not a user's, or stand elsewhere too."""
COLUMN = 32
"""Where comments begin."""


def usage(config_name: str) -> str:
    """`${usage:NAME}`: the text of `--help` of a script, with the options of the command line."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    arguments = [*DIRECTORIES.get().searchpath, *given]
    loader = DIRECTORIES.get().loader()
    cfg = DIRECTORIES.get().load(config_name, list(given))
    defaults = loader.compute_defaults_list(config_name, arguments, RunMode.RUN).defaults
    sections: dict[str, list[str]] = {"": []}
    shown = set[str]()
    head = ""
    for default in defaults:
        path = str(default.config_path)
        if path.startswith(HIDDEN):
            continue
        text = _text(loader.get_sources(), path)
        if path == config_name:
            head = _head(text)
        group, _, choice = path.rpartition("/")
        title = f"{group}={choice}: {_head(text)}" if group else ""
        lines = sections.setdefault(title, [])
        for name, comment in _options(text, default):
            if name not in shown and _is_option(cfg, name):
                shown.add(name)
                lines.append(_line(cfg, name, comment))
    parts = [head, "", "Options (name=value):", *sections.pop("")]
    for title, lines in sections.items():
        if lines:
            parts += ["", textwrap.fill(title, 100), *lines]
    parts += ["", "Groups (group=choice; some choices add options of their own):"]
    for group in sorted(map(str, cfg.hydra.runtime.choices)):
        choices = loader.get_group_options(group, overrides=list(DIRECTORIES.get().searchpath))
        if len(choices) > 1 and "/" not in group:
            parts.append(f"  {group}={', '.join(choices)}")
    return "\n".join(parts).replace("$", "$$")  # Hydra fills in a template


def _head(text: str) -> str:
    """The comment with which a configuration begins: how to call a script, or what a choice is."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = "\n".join(line[2:] for line in lines if not line.startswith("# @package"))
    for name, script in SCRIPTS.items():
        head = head.replace(f"python {script}", command(name))
    return head


def _text(sources: Sequence[ConfigSource], path: str) -> str:
    """A configuration's file; empty for one that is no file."""
    for source in sources:
        file = Path(str(source.path)) / f"{path}.yaml"
        if source.scheme() == "file" and file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def _options(text: str, default: ResultDefault) -> Iterator[tuple[str, str]]:
    """The dotted names of a file's options, with their comments."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    prefix = f"{default.package}." if default.package else ""
    if isinstance(root, yaml.MappingNode):
        yield from _commented(root, text.splitlines(), prefix)


def _commented(
    mapping: yaml.MappingNode, lines: Sequence[str], prefix: str
) -> Iterator[tuple[str, str]]:
    for key, value in mapping.value:
        name = f"{prefix}{key.value}"
        if name in ("defaults", *INTERNAL) or key.value == "_target_":
            continue
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _commented(value, lines, f"{name}.")
        else:
            yield name, _comment(key, value, lines)


def _comment(key: yaml.Node, value: yaml.Node, lines: Sequence[str]) -> str:
    """The comment above a value, behind it, and further down behind it."""
    column = key.start_mark.column
    above: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line[column:].startswith("#") or line[:column].strip():
            break
        above.insert(0, line)
    if len(above) == key.start_mark.line:
        above = []  # the file's head
    last = value.end_mark.line
    behind = [lines[last][value.end_mark.column :]]
    for line in lines[last + 1 :]:
        if not line.lstrip().startswith("#") or len(line) - len(line.lstrip()) <= column:
            break
        behind.append(line)
    return " ".join(line.strip().lstrip("# ") for line in (*above, *behind)).strip()


def _is_option(cfg: DictConfig, name: str) -> bool:
    """Whether a user sets a value by this name: it is there, and not made of another option."""
    group, _, key = name.rpartition(".")
    node: object = OmegaConf.select(cfg, group, throw_on_missing=False) if group else cfg
    if not isinstance(node, DictConfig) or key not in node:
        return False
    raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]
    return not (isinstance(raw, str) and re.fullmatch(r"\$\{(\w+|hydra[:.].*)\}", raw))


def _line(cfg: DictConfig, name: str, comment: str) -> str:
    """An option with its value and comment."""
    value = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
    if OmegaConf.is_missing(cfg, name):
        value = "???"
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    option = f"  {written(name, value)}"
    if not comment:
        return option
    first = option.ljust(COLUMN) + ("" if len(option) < COLUMN else " ")
    return textwrap.fill(
        f"{first}# {comment}", 100, subsequent_indent=" " * COLUMN + "# ", break_long_words=False
    )


OmegaConf.register_new_resolver("usage", usage, replace=True)
