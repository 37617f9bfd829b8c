"""From a `_target_` node of conf/ to an object: its values are checked against the types in the
target's signature by pydantic, and a mistake is told by the name of the option.
"""

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tempera.config import resolvers  # noqa: F401  conf/ needs them
from tempera.errors import TemperaError, shortened

T = TypeVar("T")


def instantiate(node: Any, /, **extra: Any) -> Any:
    """Call the `_target_` of a node with the node's values, converted to the types of the target's
    annotations, and with the objects in `extra`, which never enter the configuration. Nested
    `_target_` nodes are built first; lists and mappings become plain Python. With `_partial_` a
    function that takes the other arguments is returned instead.

    Raises:
        TemperaError: a value does not fit its annotation, an argument is unknown or missing, or
            the target raises one; it names the option.
    """
    values = parsed(node, extra)
    if not node.get("_partial_"):
        for name in inspect.signature(_located(node)).parameters:
            if needs(node, name) and name not in extra:
                option = option_of(node, name)
                raise TemperaError(
                    f"{node['_target_']} needs `{option}`: give it a value", option=option
                )
    make = functools.partial(_located(node), **{key: _built(values[key]) for key in values})
    try:
        return functools.partial(make, **extra) if node.get("_partial_") else make(**extra)
    except TemperaError as problem:  # by the option in place of the argument
        if problem.option is not None and problem.option in node:
            problem.option = option_of(node, problem.option)
        raise


def parsed(node: Any, extra: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a node, as its `_target_` annotates them; nested nodes as they are. Called
    alone, it tells wrong values before the objects exist that the target also needs.

    Raises:
        TemperaError: see `instantiate`, but for missing arguments.
    """
    call = _located(node)
    given = [str(key) for key in node if not str(key).startswith("_")]
    parameters, hints = inspect.signature(call).parameters, _hints(call)
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key in [*given, *extra]:
        if key not in parameters and not open_ended:
            near = difflib.get_close_matches(key, parameters, n=1)
            meant = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(parameters)}"
            option = option_of(node, key)
            raise TemperaError(
                f"{node['_target_']} has no option `{option}`: {meant}", option=option
            )
    return {
        key: fitting(node[key], hints[key], option_of(node, key))
        if key in hints and not _has_target(node[key])
        else node[key]
        for key in given
    }


def _built(value: Any) -> Any:
    """A value in plain Python, and the objects of the nodes in it."""
    if isinstance(value, DictConfig):
        if "_target_" in value:
            return instantiate(value)
        return {key: _built(value[key]) for key in value}
    return list(map(_built, value)) if isinstance(value, ListConfig) else value


def _has_target(value: Any) -> bool:
    """Whether there is a `_target_` node in a value."""
    if isinstance(value, DictConfig):
        return "_target_" in value or any(_has_target(value[key]) for key in value)
    return isinstance(value, ListConfig) and any(map(_has_target, value))


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
    except ValidationError as problem:
        reason = " or ".join(dict.fromkeys(map(_reason, problem.errors())))
    except OverflowError:
        reason = "it is too large"
    else:
        if not _is_number_made_of_truth(value, fit):
            return value if type(value) is int and fit == value else fit  # 2 stays 2
        reason = "true and false are no numbers"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    raise TemperaError(f"`{option}={shortened(shown)}` is not possible: {reason}", option=option)


def _is_number_made_of_truth(value: Any, fit: Any) -> bool:
    """Whether true or false became a number, or a number true or false, here or in a list."""
    if isinstance(value, list) and isinstance(fit, list | tuple) and len(value) == len(fit):
        pairs = zip(value, fit, strict=True)
        return any(_is_number_made_of_truth(inner, made) for inner, made in pairs)
    numbers = isinstance(value, int | float) and isinstance(fit, int | float)
    return numbers and isinstance(value, bool) != isinstance(fit, bool)


def _reason(error: Any) -> str:
    """Pydantic's words for a wrong value, and the place in a list."""
    place = "".join(f"[{part}] " for part in error["loc"] if isinstance(part, int))
    said = str(error["msg"]).partition(", unable to parse")[0]
    return place + said.replace("Input should be", "it must be")


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


def from_options(cfg: DictConfig, call: Callable[..., T], /, **extra: Any) -> T:
    """Call a class or function with `extra` and the top-level options named like its arguments,
    with the checks of `instantiate`.
    """
    node = OmegaConf.create({"_target_": f"{call.__module__}.{call.__qualname__}"})
    for name in inspect.signature(call).parameters:
        if name in cfg and name not in extra:
            node[name] = f"${{{name}}}"
    node._set_parent(cfg)
    made: T = instantiate(node, **extra)
    return made


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


def declared(node: DictConfig, name: str) -> Any:
    """An attribute of the node's target, which says something of what it makes; None without."""
    return getattr(_located(node), name, None)


def product(node: DictConfig) -> type | None:
    """The class of what the node's target makes, as it is annotated; None if it is not."""
    call = _located(node)
    made = call if isinstance(call, type) else _hints(call).get("return")
    return made if isinstance(made, type) else None


def option_of(node: Any, key: str) -> str:
    """The user's name for a value: the option that it interpolates, or its own path in the
    configuration.
    """
    raw: Any = OmegaConf.to_container(node, resolve=False)
    raw = raw.get(key) if isinstance(raw, dict) else None
    match = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
    return match[1] if match else str(node._get_full_key(key))


def _located(node: Any) -> Callable[..., Any]:
    """What the `_target_` of a node names."""
    if not OmegaConf.is_dict(node):
        raise TemperaError(
            f"'{shortened(str(node))}' stands where several options belong: give them one by one, "
            "as in speed.prompts=4"
        )
    target, option = node.get("_target_"), str(node._get_full_key("_target_"))
    shown = f"`{option}={shortened(str(target))}`"
    try:  # Hydra refuses what would let a configuration run any code
        call: Callable[..., Any] = hydra.utils.instantiate(
            {"_target_": target}, _partial_=True
        ).func
        inspect.signature(call)
    except Exception as problem:
        reason = shortened(str(problem.__cause__ or problem), most=200)
        raise TemperaError(f"{shown} is not possible: {reason}", option=option) from problem
    return call


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call, include_extras=True)
    except NameError:
        return {}
