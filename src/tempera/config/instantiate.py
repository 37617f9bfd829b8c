"""From a `_target_` node of conf/ to an object: its values are checked against the types in the
target's signature by pydantic, and a mistake is told by the name of the option.
"""

import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tempera.config import resolvers  # noqa: F401  conf/ needs them
from tempera.config.nodes import plain
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import sha256_file

T = TypeVar("T")
AMOUNTS = ("data.limit", "data.offset", "source.limit")
"""How much is read of prompts or images. What reads them need not take these options."""


@dataclass(frozen=True, eq=False)
class Part(Generic[T]):
    """An object of conf/ that is not made yet: its options are checked, and it waits for the other
    objects that it takes.

    Attributes:
        call: the class or function that its `_target_` names.
        options: arguments of `call`, as it annotates them; those that are nodes of their own are
            parts too.
        node: where the options stand.
    """

    call: Callable[..., T]
    options: Mapping[str, Any]
    node: DictConfig

    @property
    def described(self) -> dict[str, Any]:
        """Its `_target_` and its options, without those that are parts."""
        own = {name: value for name, value in self.options.items() if not isinstance(value, Part)}
        return {"_target_": _name_of(self.call), **own}

    @property
    def identity(self) -> dict[str, Any]:
        """Its `_target_` and its options, those of its parts included, and in place of the name of
        a file a hash of what that holds: what it makes is the same where this is.
        """
        options = {name: _identified(value) for name, value in self.options.items()}
        return {"_target_": _name_of(self.call), **options}

    @property
    def named(self) -> dict[str, Any]:
        """Its values by what the user calls them, such as `delta` or `drafter.dtype`, those of its
        parts included.
        """
        found: dict[str, Any] = {}
        for key, value in self.options.items():
            found |= value.named if isinstance(value, Part) else {option_of(self.node, key): value}
        return found

    def takes(self, name: str) -> bool:
        """Whether it has an argument of this name that no option sets."""
        return name in inspect.signature(self.call).parameters and name not in self.options

    def needs(self, name: str) -> bool:
        """Whether it cannot be made without an object of this name."""
        if not self.takes(name):
            return False
        parameter = inspect.signature(self.call).parameters[name]
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        return parameter.default is parameter.empty and not is_open

    def make(self, /, **objects: object) -> T:
        """The object, with the others that it takes; with `_partial_` in its node, a function that
        takes them.

        Raises:
            TemperaError: an argument is unknown or missing, or `call` raises one; it names the
                option.
        """
        for name in objects:
            _check_name(self.node, self.call, name)
        make = functools.partial(self.partial(), **objects)
        if self.node.get("_partial_"):
            return cast(T, make)
        for name in inspect.signature(self.call).parameters:
            if self.needs(name) and name not in objects:
                option = option_of(self.node, name)
                raise TemperaError(
                    f"{_name_of(self.call)} needs `{option}`: give it a value", option=option
                )
        try:
            return make()
        except TemperaError as problem:  # by the option in place of the argument
            if problem.option is not None and problem.option in self.node:
                problem.option = option_of(self.node, problem.option)
            raise

    def having(self, **options: object) -> "Part[T]":
        """The same with other values of some arguments."""
        return replace(self, options={**self.options, **options})

    def with_option(self, name: str, value: object) -> "Part[T]":
        """The same with another value of what the user calls `name`, here and in parts of it.

        Raises:
            TemperaError: it does not fit.
        """
        hints = _hints(self.call)
        options = {
            key: inner.with_option(name, value) if isinstance(inner, Part) else inner
            for key, inner in self.options.items()
        }
        named = [key for key in options if key in self.node and option_of(self.node, key) == name]
        options |= {key: fitting(value, hints.get(key, Any), name) for key in named}
        return self.having(**options)

    def partial(self) -> "functools.partial[T]":
        """A function that makes the object of the arguments that no option sets."""
        return functools.partial(
            self.call, **{name: _made(value) for name, value in self.options.items()}
        )

    def make_with(self, offered: Mapping[str, object], /, **objects: object) -> T:
        """The object, with the others, and with those of the offered ones that it takes."""
        taken = {name: value for name, value in offered.items() if self.takes(name)}
        return self.make(**taken, **objects)


def part(node: object) -> Part[Any]:
    """Check the options of a `_target_` node; nothing is made.

    Raises:
        TemperaError: a value does not fit its annotation, or an argument is unknown; it names the
            option.
    """
    group = _group(node)
    call = _located(group)
    taken = inspect.signature(call).parameters
    names = [
        name
        for name in map(str, group)
        if not name.startswith("_") and (name in taken or group._get_full_key(name) not in AMOUNTS)
    ]
    return Part(call, _checked(group, call, names), group)


def product(node: object) -> type | None:
    """The class of what the target of a node makes, as it is annotated; None if it is not. The
    node's options are not read.
    """
    call = _located(_group(node))
    made = call if isinstance(call, type) else _hints(call).get("return")
    return made if isinstance(made, type) else None


def instantiate(node: object, /, **objects: object) -> Any:
    """Make the object of a `_target_` node at once; see `part` and `Part.make`."""
    return part(node).make(**objects)


def options_of(cfg: DictConfig, call: Callable[..., T], without: Collection[str] = ()) -> Part[T]:
    """Check the top-level options that a function takes, but for those that will be objects."""
    names = [
        name for name in inspect.signature(call).parameters if name in cfg and name not in without
    ]
    return Part(call, _checked(cfg, call, names), cfg)


def from_options(cfg: DictConfig, call: Callable[..., T], /, **objects: object) -> T:
    """Make an object of the top-level options at once, but for those that `objects` replace."""
    return options_of(cfg, call, objects).make(**objects)


def _checked(node: DictConfig, call: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    """Values of a node by the arguments of `call`, as it annotates them."""
    hints = _hints(call)
    options = {}
    for name in names:
        _check_name(node, call, name)
        value = node[name]
        if name in hints and not _has_target(value):
            options[name] = fitting(value, hints[name], option_of(node, name))
        else:
            options[name] = _parts(value)
    return options


def _check_name(node: DictConfig, call: Callable[..., Any], name: str) -> None:
    """Raise TemperaError if `call` has no argument of this name."""
    parameters = inspect.signature(call).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if name in parameters or is_open:
        return
    option = option_of(node, name)
    near = difflib.get_close_matches(name, parameters, n=1)
    meant = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(parameters)}"
    raise TemperaError(f"{_name_of(call)} has no option `{option}`: {meant}", option=option)


def _name_of(call: Callable[..., Any]) -> str:
    """What a `_target_` is called."""
    return f"{call.__module__}.{call.__qualname__}"


def _parts(value: object) -> object:
    """A value in plain Python, with a part in place of each node that has a `_target_`."""
    if isinstance(value, DictConfig):
        return part(value) if "_target_" in value else {key: _parts(value[key]) for key in value}
    return list(map(_parts, value)) if isinstance(value, ListConfig) else value


def _made(value: object) -> object:
    """A value with the objects of the parts in it."""
    match value:
        case Part():
            return value.make()
        case dict():
            return {key: _made(inner) for key, inner in value.items()}
        case list():
            return list(map(_made, value))
    return value


def _identified(value: object) -> object:
    """A value in an identity, as JSON has it."""
    match value:
        case Part():
            return value.identity
        case Mapping():
            return {str(key): _identified(inner) for key, inner in value.items()}
        case list() | tuple():
            return list(map(_identified, value))
        case str() | Path() if _is_file(str(value)):
            return sha256_file(Path(value))[:16]
        case None | bool() | int() | float():
            return value
    return str(value)


def _is_file(text: str) -> bool:
    """Whether a value names a file; a word such as `l2` does not, whatever the directory holds."""
    return bool({"/", "."} & set(text)) and os.path.isfile(text)  # noqa: PTH113 (any text)


def _has_target(value: object) -> bool:
    """Whether there is a `_target_` node in a value."""
    if isinstance(value, DictConfig):
        return "_target_" in value or any(_has_target(value[key]) for key in value)
    return isinstance(value, ListConfig) and any(map(_has_target, value))


def fitting(value: object, hint: object, option: str) -> Any:
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
        reason = "true and false are not numbers"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    raise TemperaError(f"`{option}={shortened(shown)}` is not valid: {reason}", option=option)


def _is_number_made_of_truth(value: object, fit: object) -> bool:
    """Whether true or false became a number, or a number true or false, here or in a list."""
    if isinstance(value, list) and isinstance(fit, list | tuple) and len(value) == len(fit):
        pairs = zip(value, fit, strict=True)
        return any(_is_number_made_of_truth(inner, made) for inner, made in pairs)
    numbers = isinstance(value, int | float) and isinstance(fit, int | float)
    return numbers and isinstance(value, bool) != isinstance(fit, bool)


def _reason(error: Mapping[str, Any]) -> str:
    """Pydantic's words for a wrong value, and the place in a list."""
    position = "".join(f"[{part}] " for part in error["loc"] if isinstance(part, int))
    said = str(error["msg"]).partition(", unable to parse")[0]
    return position + said.replace("Input should be", "it must be")


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


def option_of(node: DictConfig, key: str) -> str:
    """The user's name for a value: its own at the top of the configuration; elsewhere the option
    that it interpolates, or its path.
    """
    if node._get_parent() is None:
        return key
    raw = plain(node).get(key)
    match = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
    return match[1] if match else str(node._get_full_key(key))


def _group(value: object) -> DictConfig:
    """A value that is a group of options."""
    if not isinstance(value, DictConfig):
        raise TemperaError(
            f"'{shortened(str(value))}' is one value where several options are expected: give them "
            "one by one, as in speed.prompts=4"
        )
    return value


def _located(node: DictConfig) -> Callable[..., Any]:
    """What the `_target_` of a node names."""
    target = node.get("_target_")
    option = str(node._get_full_key("_target_"))
    shown = f"`{option}={shortened(str(target))}`"
    try:  # Hydra refuses what would let a configuration run any code
        call: Callable[..., Any] = hydra.utils.instantiate(
            {"_target_": target}, _partial_=True
        ).func
        inspect.signature(call)
    except Exception as problem:
        reason = shortened(str(problem.__cause__ or problem), most=200)
        raise TemperaError(f"{shown} is not valid: {reason}", option=option) from problem
    return call


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call, include_extras=True)
    except NameError:
        return {}
