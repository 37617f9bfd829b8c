"""Checked instantiation: compares the values of a `_target_` node with its target's signature.

Also registers the resolvers that conf/ uses: `package`, `unique`, `beside`, `at`,
`unless_random`, `jobs`, `ceil`, `usage` and `each`.
"""

import copy
import functools
import inspect
import itertools
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import hydra
from hydra.errors import InstantiationException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import ConfigValueError, ValidationError

from tempera.config import families  # noqa: F401  its resolver
from tempera.errors import MissingWeights, TemperaError, shortened
from tempera.runtime.installation import SCRIPTS, command, conf_directory

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}

EXACT = 1 << 53
"""Whole numbers below it stay as they are where a number is wanted; PyTorch takes no huge ones."""

NUMBERS: dict[Any, Any] = {Sequence[int]: list[int], Sequence[float]: list[float]}
"""Annotations that OmegaConf does not know, and the same in those that it knows."""

OmegaConf.register_new_resolver(
    "package", lambda path: str(Path(__file__).resolve().parent.parent / path), replace=True
)
"""`${package:PATH}` in conf/: a file or directory that ships inside the package."""

OmegaConf.register_new_resolver(
    "unique", lambda: secrets.token_hex(2), replace=True, use_cache=True
)
"""`${unique:}` in conf/: four random letters and digits, to tell runs of the same second apart."""

OmegaConf.register_new_resolver(
    "beside",
    lambda weights: str(Path(weights).parent) if Path(str(weights)).is_file() else weights,
    replace=True,
)
"""`${beside:WEIGHTS}` in conf/: the directory of a file; a directory, a hub id or `random` is
returned unchanged.
"""


def at(weights: str, revision: str | None) -> str:
    """`${at:WEIGHTS,REVISION}` in conf/: the weights at a commit, branch or tag of their hub
    repository; without one they are as they are.

    Raises:
        TemperaError: the weights are no repository, or name a revision themselves.
    """
    if revision is None:
        return weights
    if weights == "random" or Path(weights).expanduser().exists() or "@" in weights:
        raise TemperaError(
            f"`revision={shortened(str(revision))}` is of a hub repository, and weights={weights} "
            "is none or names one itself: leave revision= out, or give weights=owner/name"
        )
    return f"{weights}@{revision}"


OmegaConf.register_new_resolver("at", at, replace=True)

OmegaConf.register_new_resolver(
    "unless_random", lambda weights, other: "random" if weights == "random" else other, replace=True
)
"""`${unless_random:WEIGHTS,OTHER}` in conf/: `random` if WEIGHTS is `random`, otherwise OTHER, for
parts of a model that need no weights if the network is untrained.
"""


def jobs(device: str) -> int:
    """`${jobs:DEVICE}` in conf/: how many jobs of a sweep run side by side: one per core on a CPU,
    one on a GPU.
    """
    if str(device) != "cpu":
        import torch

        if torch.cuda.is_available():
            return 1
    import joblib

    cores: int = joblib.cpu_count()
    return cores


OmegaConf.register_new_resolver("jobs", jobs, replace=True)

OmegaConf.register_new_resolver(
    "ceil",
    lambda value: (
        math.ceil(value) if isinstance(value, int | float) and math.isfinite(value) else value
    ),
    replace=True,
)
"""`${ceil:NUMBER}` in conf/: the number rounded up; other values are returned unchanged."""


def usage(config_name: str) -> str:
    """`${usage:NAME}` in conf/, for `--help`: the comment at the top of conf/NAME.yaml, with the
    commands as they were started.
    """
    lines = (conf_directory() / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = "".join(f"{line.removeprefix('#').strip()}\n" for line in comment)
    for name, script in SCRIPTS.items():
        text = text.replace(f"python {script}", command(name))
    return text


OmegaConf.register_new_resolver("usage", usage, replace=True)

OmegaConf.register_new_resolver("each", lambda values: ",".join(map(str, values)), replace=True)
"""`${each:LIST}` in conf/: the values of a list as a sweep takes them, `3.5,4.0`."""


def instantiate(node: Any, /, **extra: Any) -> Any:
    """Call the `_target_` of a node with the node's values, converted to the types of the target's
    annotations, and with the objects in `extra`, which never enter the configuration.

    Nested `_target_` nodes are built first; lists and mappings become plain Python. Raises
    TemperaError, which names the option, if a value does not match the target's annotation, if an
    argument is unknown or missing, or if the target itself raises one.
    """
    check(node, extra)
    try:
        make = hydra.utils.instantiate(_converted(node), _partial_=True, _convert_="all")
        return functools.partial(make, **extra) if node.get("_partial_") else make(**extra)
    except InstantiationException as problem:
        cause = problem.__cause__
        if isinstance(cause, TemperaError):
            raise _with_option(cause, _inner(node, problem)) from None
        raise
    except MissingWeights as problem:
        raise _with_option(problem, node) from None


def _inner(node: Any, problem: InstantiationException) -> Any:
    """The nested node whose target raised; Hydra names its key in the message."""
    key = re.search(r"^full_key: (\S+)$", str(problem), re.MULTILINE)
    return OmegaConf.select(node._get_root(), key[1]) if key else node


def _with_option(problem: TemperaError, node: Any) -> TemperaError:
    """The error with the command line's option in place of the target's argument."""
    if isinstance(problem, MissingWeights) and problem.argument in (node or ()):
        problem.argument = _option(node, problem.argument)
    return problem


def check(node: Any, extra: Mapping[str, Any] | None = None) -> None:
    """Raise TemperaError unless the node's values and `extra` match the signature of its
    `_target_`. Nested nodes are checked too.
    """
    given = [str(key) for key in node if not str(key).startswith("_")]
    call = _locate(node)
    parameters = inspect.signature(call).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in [*given, *(extra or {})]:
        if key not in parameters and not open_ended:
            raise TemperaError(
                f"there is no option `{_option(node, key)}`, since {node['_target_']} has no "
                f"argument `{key}`; it takes {', '.join(parameters) or 'none'}"
            )
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if (
            not optional
            and name not in given
            and name not in (extra or {})
            and not node.get("_partial_")
        ):
            raise TemperaError(
                f"{node['_target_']} needs `{name}`; set {_option(node, name)} in conf/ or on "
                "the command line"
            )
    for key in given:
        for inner in _nested(node[key]):
            check(inner)
    check_values(node)


def check_target(node: DictConfig, key: str) -> None:
    """Raise TemperaError unless an option of the node names a class or a function."""
    _locate(node, key)


def check_values(node: Any) -> None:
    """Raise TemperaError unless the node's own values match the annotations of its `_target_`.
    Missing arguments are ignored.
    """
    hints = _hints(_locate(node))
    for key in node:
        if key in hints and not list(_nested(node[key])):
            check_value(node, str(key), node[key], hints[str(key)])


def from_options(cfg: DictConfig, target: str, /, **extra: Any) -> Any:
    """Call `target` with `extra` and the top-level options named like its arguments, with the
    checks of `instantiate`.
    """
    return instantiate(_of_options(cfg, target, extra), **extra)


def check_options(cfg: DictConfig, target: str) -> None:
    """Raise TemperaError unless the top-level options named like `target`'s arguments match their
    annotations.
    """
    check_values(_of_options(cfg, target, {}))


def _of_options(cfg: DictConfig, target: str, extra: Mapping[str, Any]) -> DictConfig:
    """A node for `target` with the top-level options that are its arguments, but for `extra`."""
    names = [
        name
        for name in inspect.signature(_locate(OmegaConf.create({"_target_": target}))).parameters
        if name in cfg and name not in extra
    ]
    node = OmegaConf.create({"_target_": target, **{name: f"${{{name}}}" for name in names}})
    node._set_parent(cfg)
    return node


def accepted(node: DictConfig, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered objects that fit an argument of the node's target which the node does not set."""
    parameters = inspect.signature(_locate(node)).parameters
    return {
        name: thing for name, thing in offered.items() if name in parameters and name not in node
    }


def needs(node: DictConfig, name: str) -> bool:
    """Whether the node's target has an argument of this name without a default, which the node does
    not set.
    """
    parameter = inspect.signature(_locate(node)).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty and name not in node


def takes(node: DictConfig, name: str) -> bool:
    """Whether the node's target has an argument of this name."""
    return name in inspect.signature(_locate(node)).parameters


def check_value(node: Any, key: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the annotated type, for instance an integer to text. With an annotation
    that OmegaConf does not know, return it unchanged.

    Raises:
        TemperaError: OmegaConf cannot convert it, or it is NaN or infinite.
    """
    option, hint = _option(node, key), NUMBERS.get(hint, hint)
    shown = "null" if value is None else shortened(str(value))
    wrong = TemperaError(f"`{option}={shown}` is not possible; it must be {_in_words(hint)}")
    if (choices := _choices(hint)) is not None:
        if not any(value is known or value == known for known in choices):
            raise wrong
        return value
    endless = isinstance(value, float) and not math.isfinite(value)
    if (endless and _is_number(hint)) or (hint is bool and type(value) in (int, float)):
        raise wrong
    listed = OmegaConf.is_list(value) or isinstance(value, list)
    if listed and _is_list_of_scalars(hint) and any(map(_is_container, value)):
        raise wrong  # OmegaConf would let it pass
    try:
        schema = OmegaConf.structured(
            make_dataclass("Argument", [(key, hint, field(default=MISSING))])
        )
    except (ConfigValueError, ValidationError):
        return value
    try:
        return OmegaConf.select(OmegaConf.merge(schema, {key: value}), key)
    except (ValidationError, OverflowError):
        raise wrong from None


def _choices(hint: Any) -> tuple[Any, ...] | None:
    """The values of a `Literal`, and None if it may be None."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint)
    if len(parts) == 2 and parts[1] is type(None) and get_origin(parts[0]) is Literal:
        return *get_args(parts[0]), None
    return None


def _is_list_of_scalars(hint: Any) -> bool:
    return get_origin(hint) is list and get_args(hint)[0] in (int, float, str, bool)


def _is_container(value: Any) -> bool:
    return OmegaConf.is_config(value) or isinstance(value, list | dict)


def _is_number(hint: Any) -> bool:
    return hint in (int, float) or any(_is_number(part) for part in get_args(hint))


def _converted(node: DictConfig) -> DictConfig:
    """A copy of a checked node with its values converted to the annotated types."""
    node = copy.deepcopy(node)
    hints = _hints(_locate(node))
    with flag_override(node, ["struct", "readonly"], False):
        for key in node:
            inner = list(_nested(node[key]))
            value = node[key]
            if not inner and key in hints and not OmegaConf.is_config(value):
                converted = check_value(node, str(key), value, hints[str(key)])
                exact = isinstance(value, int) and abs(value) < EXACT
                whole = exact and isinstance(converted, float)
                if type(converted) is not type(value) and not whole:  # 2 stays 2, "2" becomes 2.0
                    node[key] = converted
            elif isinstance(value, DictConfig) and "_target_" in value:
                node[key] = _converted(value)
    return node


def _nested(value: Any) -> Iterator[Any]:
    """All outermost `_target_` nodes inside a value."""
    if isinstance(value, DictConfig) and "_target_" in value:
        yield value
    elif isinstance(value, DictConfig):
        for key in value:
            yield from _nested(value[key])
    elif isinstance(value, ListConfig):
        for item in value:
            yield from _nested(item)


def _option(node: Any, key: str) -> str:
    """The user's name for this value: the option that it interpolates, or its own path in the
    configuration.
    """
    raw = node._get_node(key) if isinstance(node, DictConfig) else None
    written = raw._value() if raw is not None else None
    match = re.fullmatch(r"\$\{([\w.]+)\}", written) if isinstance(written, str) else None
    return match[1] if match else str(node._get_full_key(key))


def _locate(node: Any, key: str = "_target_") -> Callable[..., Any]:
    """What the option `key` of a node names."""
    target = node[key]
    option = f"`{node._get_full_key(key)}={shortened(str(target))}`"
    if not isinstance(target, str):
        raise TemperaError(f"{option} is not possible; it must name a class or a function")
    try:
        call = hydra.utils.get_object(target)
    except Exception as problem:
        reason = shortened(str(problem.__cause__ or problem))
        raise TemperaError(f"{option} cannot be imported ({reason})") from problem
    if not callable(call):
        raise TemperaError(f"{option} is not a class or a function")
    located: Callable[..., Any] = call
    return located


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call)
    except NameError:
        return {}


def _in_words(hint: Any) -> str:
    """An annotation in words."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, type(int | str)):
        return " or ".join(map(_in_words, inner))
    if origin in (list, tuple, set) or hint in (list, tuple):
        return "a list"
    return WORDS.get(hint) or str(getattr(origin or hint, "__name__", hint))
