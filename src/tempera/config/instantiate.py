"""From a `_target_` node of conf/ to an object: its values are checked against the types in the
target's signature by pydantic, and a mistake is told by the name of the option.
"""

import copy
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tempera.config import resolvers  # noqa: F401  conf/ needs them
from tempera.errors import TemperaError, shortened


def instantiate(node: Any, /, **extra: Any) -> Any:
    """Call the `_target_` of a node with the node's values, converted to the types of the target's
    annotations, and with the objects in `extra`, which never enter the configuration. Nested
    `_target_` nodes are built first; lists and mappings become plain Python.

    Raises:
        TemperaError: a value does not fit its annotation, an argument is unknown or missing, or
            the target raises one; it names the option.
    """
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        raise TemperaError(
            f"'{shortened(str(node))}' stands where several options belong: give them one by one, "
            "as in speed.prompts=4"
        )
    check(node, extra)
    try:
        make = hydra.utils.instantiate(_converted(node), _partial_=True, _convert_="all")
        return functools.partial(make, **extra) if node.get("_partial_") else make(**extra)
    except InstantiationException as problem:
        cause = problem.__cause__
        if isinstance(cause, TemperaError):
            key = re.search(r"^full_key: (\S+)$", str(problem), re.MULTILINE)
            inner = OmegaConf.select(node._get_root(), key[1]) if key else node
            raise _by_option(cause, inner) from None
        raise
    except TemperaError as problem:
        raise _by_option(problem, node) from None


def _by_option(problem: TemperaError, node: Any) -> TemperaError:
    """The error, with the option in place of the target's argument that it names."""
    if problem.option is not None and OmegaConf.is_dict(node) and problem.option in node:
        problem.option = option_of(node, problem.option)
    return problem


def check(node: Any, extra: Mapping[str, Any] | None = None) -> None:
    """Raise TemperaError unless the node's values fit the signature of its `_target_`, and no
    argument is unknown, or missing beside `extra`. Nested nodes are checked too.
    """
    extra = extra or {}
    parameters = inspect.signature(_located(node)).parameters
    given = [str(key) for key in node if not str(key).startswith("_")]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key in [*given, *extra]:
        if key not in parameters and not open_ended:
            near = difflib.get_close_matches(key, parameters, n=1)
            meant = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(parameters)}"
            option = option_of(node, key)
            raise TemperaError(
                f"{node['_target_']} has no option `{option}`: {meant}", option=option
            )
    for name in parameters:
        if needs(node, name) and name not in extra and not node.get("_partial_"):
            option = option_of(node, name)
            raise TemperaError(
                f"{node['_target_']} needs `{option}`: give it a value", option=option
            )
    for key in given:
        for inner in _nested(node[key]):
            check(inner)
    check_values(node)


def check_values(node: Any) -> None:
    """Raise TemperaError unless the node's own values fit the annotations of its `_target_`."""
    hints = _hints(_located(node))
    for key in node:
        if key in hints and not list(_nested(node[key])):
            check_value(node, str(key), node[key], hints[str(key)])


def check_value(node: Any, key: str, value: Any, hint: Any) -> Any:
    """A node's value, checked; see `fitting`."""
    return fitting(value, hint, option_of(node, key))


def fitting(value: Any, hint: Any, option: str) -> Any:
    """A value of conf/ as an annotation wants it: `"2"` as a number, a list as a tuple. A value is
    as it is where pydantic cannot check the annotation, such as a Protocol.

    Raises:
        TemperaError: it does not fit. NaN, infinity and true do not fit a number.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if (adapter := _adapter(hint)) is None:
        return value
    try:
        fit = adapter.validate_python(value)
        if isinstance(value, bool | int | float) and isinstance(value, bool) != isinstance(
            fit, bool
        ):
            reason = (
                "it must be true or false" if isinstance(fit, bool) else "it must be no boolean"
            )
        else:
            return fit
    except ValidationError as problem:
        reason = " or ".join(dict.fromkeys(map(_reason, problem.errors())))
    except OverflowError:
        reason = "it is too large"
    shown = "null" if value is None else shortened(str(value))
    raise TemperaError(f"`{option}={shown}` is not possible: {reason}", option=option)


def _reason(error: Any) -> str:
    """Pydantic's words for a wrong value, and the place in a list."""
    place = "".join(f"[{part}] " for part in error["loc"] if isinstance(part, int))
    return place + str(error["msg"]).replace("Input should be", "it must be")


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Checks values of an annotation; None if pydantic does not know it."""
    config = ConfigDict(
        arbitrary_types_allowed=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )
    if getattr(hint, "_is_protocol", False):
        return None
    try:
        return TypeAdapter(hint, config=config)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError):
        return None


def from_options(cfg: DictConfig, target: str, /, **extra: Any) -> Any:
    """Call `target` with `extra` and the top-level options named like its arguments, with the
    checks of `instantiate`.
    """
    node = OmegaConf.create({"_target_": target})
    for name in inspect.signature(_located(node)).parameters:
        if name in cfg and name not in extra:
            node[name] = f"${{{name}}}"
    node._set_parent(cfg)
    return instantiate(node, **extra)


def accepted(node: DictConfig, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered objects that fit an argument of the node's target which the node does not set."""
    return {name: one for name, one in offered.items() if takes(node, name) and name not in node}


def needs(node: DictConfig, name: str) -> bool:
    """Whether the node's target has an argument of this name without a default, which the node does
    not set.
    """
    parameter = inspect.signature(_located(node)).parameters.get(name)
    return (
        parameter is not None
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in node
    )


def takes(node: DictConfig, name: str) -> bool:
    """Whether the node's target has an argument of this name."""
    return name in inspect.signature(_located(node)).parameters


def option_of(node: Any, key: str) -> str:
    """The user's name for a value: the option that it interpolates, or its own path in the
    configuration.
    """
    raw: Any = OmegaConf.to_container(node, resolve=False)
    raw = raw.get(key) if isinstance(raw, dict) else None
    match = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
    return match[1] if match else str(node._get_full_key(key))


def _converted(node: DictConfig) -> DictConfig:
    """A copy of a checked node with its scalars converted to the annotated types."""
    node = copy.deepcopy(node)
    hints = _hints(_located(node))
    with flag_override(node, ["struct", "readonly"], False):
        for key in node:
            value = node[key]
            if isinstance(value, DictConfig) and "_target_" in value:
                node[key] = _converted(value)
            elif key in hints and not OmegaConf.is_config(value):
                fit = check_value(node, str(key), value, hints[str(key)])
                if type(fit) is not type(value) and (type(value) is not int or fit != value):
                    node[key] = fit  # 2 stays 2, "2" becomes 2.0
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


def _located(node: Any) -> Callable[..., Any]:
    """What the `_target_` of a node names."""
    target, option = node["_target_"], str(node._get_full_key("_target_"))
    shown = f"`{option}={shortened(str(target))}`"
    try:
        call = hydra.utils.get_object(target)
    except Exception as problem:
        reason = shortened(str(problem.__cause__ or problem))
        raise TemperaError(f"{shown} cannot be imported ({reason})", option=option) from problem
    if not callable(call):
        raise TemperaError(f"{shown} is not a class or a function", option=option)
    located: Callable[..., Any] = call
    return located


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call, include_extras=True)
    except NameError:
        return {}
