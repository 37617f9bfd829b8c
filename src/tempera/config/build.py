"""From a Hydra configuration to objects: the only module, with the scripts' entry functions, that
reads `cfg`.

`script` turns a function into a command-line script whose mistakes are told in one sentence.
`instantiate` builds a `_target_` node after checking every argument against the target's own
signature. `build_target`, `build_drafter` and `build_rule` read the groups of `conf/`.
"""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigValueError, ValidationError
from torch import nn

from tempera.config.messages import sentence
from tempera.decoding.interfaces import Drafter, Rule, Target
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.rules.schedules import floored

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
METHODS_FOR = {
    "discrete": "method=ar, eagle or coolsd",
    "continuous": "method=mar, cspd, cspd_published or cspd_exact",
}
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}

OmegaConf.register_new_resolver(
    "package", lambda path: str(Path(__file__).resolve().parent.parent / path), replace=True
)
"""`${package:PATH}` in conf/: a file or directory that ships inside the package."""

OmegaConf.register_new_resolver(
    "beside",
    lambda weights: str(Path(weights).parent) if Path(str(weights)).is_file() else weights,
    replace=True,
)
"""`${beside:WEIGHTS}` in conf/: the directory of a file; a directory, a hub id or `random` as it
is.
"""

OmegaConf.register_new_resolver(
    "unless_random", lambda weights, other: "random" if weights == "random" else other, replace=True
)
"""`${unless_random:WEIGHTS,OTHER}` in conf/: OTHER, or `random` where WEIGHTS is: what serves an
untrained network needs no weights.
"""


# Scripts


def script(config_name: str) -> Callable[[Callable[[DictConfig], T]], Callable[..., T | None]]:
    """Make `main(cfg)` a Hydra script on `conf/<config_name>.yaml`, the `conf` beside the script's
    own folder.

    From the command line every mistake of the user becomes `error: <sentence>` on standard error
    and exit status 1; other exceptions keep their traceback, and HYDRA_FULL_ERROR=1 shows all of
    them. `prompt=` is taken literally, commas and quotes included. Called with a `cfg`, as tests
    and notebooks do, the script is the plain function: it returns its metrics and raises
    `TemperaError`.
    """

    def decorate(main: Callable[[DictConfig], T]) -> Callable[..., T | None]:
        conf = Path(inspect.getfile(main)).resolve().parent.parent / "conf"

        @functools.wraps(main)
        def job(cfg: DictConfig) -> T:
            try:
                return main(cfg)
            except Exception as problem:
                if (
                    HydraConfig.get().mode == RunMode.MULTIRUN
                ):  # the launcher says which point of the sweep it was
                    raise
                _tell(problem, conf, config_name)
                raise

        run = hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)(job)

        @functools.wraps(main)
        def entry(cfg: DictConfig | None = None) -> T | None:
            if cfg is not None:
                return main(cfg)
            sys.argv[1:] = [literal_prompt(argument) for argument in sys.argv[1:]]
            with _hydra_raises():
                try:
                    run()
                except Exception as problem:
                    _tell(problem, conf, config_name)
                    raise
            return None

        return entry

    return decorate


def literal_prompt(argument: str) -> str:
    """Quote the value of `prompt=...` for Hydra's grammar, unless it is quoted already or null;
    other arguments stay as they are.
    """
    key, separator, value = argument.partition("=")
    if (
        key.lstrip("+") != "prompt"
        or not separator
        or value == "null"
        or re.fullmatch(r"(['\"]).*\1", value, re.DOTALL)
    ):
        return argument
    value = re.sub(r"(\\*)(\"|$)", lambda match: match[1] * 2 + match[2].replace('"', '\\"'), value)
    return f'{key}="{value}"'.replace("${", "\\${")


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


def _tell(problem: Exception, conf: Path, config_name: str) -> None:
    """Print the problem as one sentence and exit with status 1, where it is the user's."""
    if told := sentence(problem, conf, config_name, sys.argv[1:]):
        print(f"error: {told}", file=sys.stderr)
        sys.exit(1)


# Instantiation


def instantiate(node: Any, /, **extra: Any) -> Any:
    """Call the `_target_` of a node with the node's values and the objects in `extra`, which never
    enter the configuration.

    Nested `_target_` nodes are built first; lists and mappings arrive as plain Python. Raises
    TemperaError in one sentence that names the option when a value does not fit the target's
    annotation, when an argument is unknown or missing, and whenever the target itself does.
    """
    check(node, extra)
    try:
        make = hydra.utils.instantiate(node, _partial_=True, _convert_="all")
    except InstantiationException as problem:
        raise (
            problem.__cause__ if isinstance(problem.__cause__, TemperaError) else problem
        ) from None
    return functools.partial(make, **extra) if node.get("_partial_") else make(**extra)


def check(node: Any, extra: Mapping[str, Any] | None = None) -> None:
    """Raise TemperaError unless the node's values and `extra` fit the signature of its `_target_`;
    the same for nested nodes.
    """
    given = {str(key): node[key] for key in node if not str(key).startswith("_")}
    call = _locate(node)
    parameters = inspect.signature(call).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in [*given, *(extra or {})]:
        if key not in parameters and not open_ended:
            raise TemperaError(
                f"{node['_target_']} has no argument `{key}`; it takes "
                f"{', '.join(parameters) or 'none'}"
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
    hints = _hints(call)
    for key, value in given.items():
        nested = list(_nested(value))
        for inner in nested:
            check(inner)
        if not nested and key in hints:
            _check_value(node, key, value, hints[key])


def _check_value(node: Any, key: str, value: Any, hint: Any) -> None:
    """Raise TemperaError unless OmegaConf can convert `value` to the annotation; annotations that
    it does not know pass.
    """
    option = _option(node, key)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise TemperaError(f"`{option}={value}` is not possible; it must be {_in_words(hint)}")
        return
    try:
        schema = OmegaConf.structured(
            make_dataclass("Argument", [(key, hint, field(default=MISSING))])
        )
    except (ConfigValueError, ValidationError):
        return
    try:
        OmegaConf.merge(schema, {key: value})
    except ValidationError:
        shown = "null" if value is None else value
        raise TemperaError(
            f"`{option}={shown}` is not possible; it must be {_in_words(hint)}"
        ) from None


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
    """What the user calls this value: the option that it interpolates, or its own place in the
    configuration.
    """
    raw = node._get_node(key) if isinstance(node, DictConfig) else None
    written = raw._value() if raw is not None else None
    match = re.fullmatch(r"\$\{([\w.]+)\}", written) if isinstance(written, str) else None
    return match[1] if match else str(node._get_full_key(key))


def _locate(node: Any) -> Callable[..., Any]:
    try:
        call = hydra.utils.get_object(node["_target_"])
    except Exception as problem:
        raise TemperaError(
            f"cannot import {node['_target_']} ({problem.__cause__ or problem})"
        ) from problem
    if not callable(call):
        raise TemperaError(f"{node['_target_']} is not a class or a function")
    located: Callable[..., Any] = call
    return located


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(call.__init__ if inspect.isclass(call) else call)
    except NameError:
        return {}


def _in_words(hint: Any) -> str:
    """An annotation as a person would say it."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, type(int | str)):
        return " or ".join(map(_in_words, inner))
    if origin in (list, tuple, set) or hint in (list, tuple):
        return "a list"
    return WORDS.get(hint) or str(getattr(origin or hint, "__name__", hint))


# The groups of conf/


def build_text_encoder(cfg: DictConfig) -> nn.Module:
    """`model.text_encoder`, frozen, on `device` in `dtype`; its `encode(prompts)` gives the
    network's condition and which of it is real.
    """
    return _frozen(instantiate(cfg.model.text_encoder), cfg)


def build_tokenizer(cfg: DictConfig) -> nn.Module:
    """`model.tokenizer`, which turns images into codes and codes into images: frozen, on `device`,
    always in float32.
    """
    tokenizer: nn.Module = instantiate(cfg.model.tokenizer)
    return tokenizer.to(parse_device(cfg.device)).eval().requires_grad_(False)


def build_target(
    cfg: DictConfig, place: Callable[[nn.Module, torch.device], None] | None = None
) -> Target:
    """The model being accelerated: `model.target` around its network and text encoder, sampling as
    the top-level options say. The network is frozen, on `device` in `dtype`, and keeps the identity
    it has in the precision it was loaded in.

    Args:
        cfg: the composed configuration.
        place: brings the network from the CPU's memory to `device`, other than as a whole.
    """
    from tempera.runtime.network_identity import identity_of

    check_tokens(cfg)
    device = parse_device(cfg.device)
    first, dtype = device if place is None else torch.device("cpu"), parse_dtype(cfg.dtype, device)
    made = _accepted(cfg.model.network, {"device": first, "dtype": dtype})
    network: nn.Module = instantiate(cfg.model.network, **made)
    identity = _accepted(cfg.model.target, {"identity": identity_of(network)})
    network = network.to(first, dtype).eval().requires_grad_(False)
    if place is not None:
        place(network, device)
    parts = {
        "network": network,
        "conditioner": build_text_encoder(cfg).encode,
        "sampling": build_sampling(cfg),
    }
    target: Target = instantiate(cfg.model.target, **parts, **identity)
    return target


def build_encoder(cfg: DictConfig) -> Any:
    """`encoder`, which turns captions and images into codes; the target's weights are read only
    where the encoder takes the target.
    """
    check_tokens(cfg)
    tokenizer = build_tokenizer(cfg)
    makers: dict[str, Callable[[DictConfig], Any]] = {"target": build_target, "grid": _grid}
    return instantiate(
        cfg.encoder,
        tokenizer=tokenizer,
        **{name: make(cfg) for name, make in _accepted(cfg.encoder, makers).items()},
    )


def _grid(cfg: DictConfig) -> tuple[int, int]:
    """Rows and columns of the target's image tokens: as the model's description says them, or of
    the model itself where it has none.
    """
    described = cfg.model.get("spec") or cfg.model.network.get("config")
    rows, columns = instantiate(described).grid if described else build_target(cfg).grid
    return rows, columns


def compile_steps(cfg: DictConfig, target: Any) -> None:
    """Compile the steps of the target's rounds, and of drafts that are built on it afterwards, if
    `compile` says so.
    """
    _check_value(cfg, "compile", cfg.compile, bool)
    if not cfg.compile:
        return
    if not hasattr(target, "compile"):
        raise TemperaError(
            f"compile=true is for models of discrete tokens, and model={cfg.model.name} has "
            "none: leave it out."
        )
    target.compile()


def check_tokens(cfg: DictConfig) -> None:
    """Raise TemperaError unless the method decodes the kind of tokens that the model has; each
    declares its own, or is discrete.
    """
    kinds = cfg.model.get("tokens", "discrete"), cfg.get("tokens", "discrete")
    if kinds[0] != kinds[1]:
        raise TemperaError(
            f"model={cfg.model.name} has {kinds[0]} tokens and the method is for {kinds[1]} "
            "ones; choose another model, or a method for "
            f"{kinds[0]} tokens, such as {METHODS_FOR[kinds[0]]}."
        )


def build_sampling(cfg: DictConfig) -> Any:
    """How tokens are drawn, from the top-level options of the presets:
    `tempera.decoding.probabilities.Sampling`, or what `model.sampling` names.
    """
    return from_options(cfg, cfg.model.get("sampling", "tempera.decoding.probabilities.Sampling"))


def from_options(cfg: DictConfig, target: str, **extra: Any) -> Any:
    """Call `target` with `extra` and the top-level options that bear its arguments' names, checked
    as `instantiate` does.
    """
    names = [
        name
        for name in inspect.signature(_locate({"_target_": target})).parameters
        if name in cfg and name not in extra
    ]
    node = OmegaConf.create({"_target_": target, **{name: f"${{{name}}}" for name in names}})
    node._set_parent(cfg)
    return instantiate(node, **extra)


def build_tree(cfg: DictConfig) -> Tree:
    """The draft tree of the method; empty where the method has none."""
    tree: Tree = instantiate(cfg.tree) if "tree" in cfg else Tree.empty()
    return tree


def build_drafter(cfg: DictConfig, target: Target) -> Drafter:
    """The drafter of the method, given the target and the tree where it wants them."""
    offered = {"target": target, "tree": build_tree(cfg)}
    drafter: Drafter = instantiate(cfg.drafter, **_accepted(cfg.drafter, offered))
    return drafter


def build_rule(cfg: DictConfig, depth: int) -> Rule:
    """The acceptance rule of the method. A relaxed rule's schedule spreads its budget over `depth`
    depths and is raised to `floor`; a rule that has `neighbours` gets them of the codebook of
    `model.tokenizer`, from their file or made anew.
    """
    offered: dict[str, Any] = {}
    if "schedule" in cfg:
        _check_value(cfg, "floor", cfg.floor, float)
        offered["schedule"] = floored(instantiate(cfg.schedule, length=depth), cfg.floor)
    if "neighbours" in cfg:
        check(cfg.rule, {"neighbours": None})  # before a table is made
        offered["neighbours"] = instantiate(
            cfg.neighbours, codebook=instantiate(cfg.model.tokenizer).codebook
        )
    rule: Rule = instantiate(cfg.rule, **offered)
    return rule


def build_method(cfg: DictConfig, target: Any) -> Any:
    """How the target's tokens are decoded: `decoding` with the drafter and the rule of the method,
    where it wants them.
    """
    drafter: Any = build_drafter(cfg, target)
    offered = {"drafter": drafter}
    if "rule" in cfg:
        offered["rule"] = build_rule(cfg, getattr(drafter, "depth", 0))
    return instantiate(cfg.decoding, **_accepted(cfg.decoding, offered))


def parse_device(name: str) -> torch.device:
    """`auto` (CUDA where there is one), or a device by PyTorch's name; raises TemperaError when
    this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)
        elif (
            (device.index or 0) >= torch.cuda.device_count()
        ):  # counted: a tensor would take memory of the first one for each process
            raise RuntimeError(name)
    except (RuntimeError, AssertionError):
        raise TemperaError(
            f"`device={name}` is not on this machine; use auto, cpu, cuda or cuda:N"
        ) from None
    return device


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` (float32 on a CPU, bfloat16 on CUDA), float32, bfloat16 or float16."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise TemperaError(
            f"`dtype={name}` is not possible; it must be one of auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _frozen(module: nn.Module, cfg: DictConfig) -> nn.Module:
    device = parse_device(cfg.device)
    return module.to(device, parse_dtype(cfg.dtype, device)).eval().requires_grad_(False)


def _accepted(node: DictConfig, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered objects that the node's target has an argument for and the node does not
    set itself.
    """
    parameters = inspect.signature(_locate(node)).parameters
    return {
        name: thing for name, thing in offered.items() if name in parameters and name not in node
    }
