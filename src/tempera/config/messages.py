"""Turns errors of Hydra, OmegaConf and the file system into one sentence: what, where, and what to
do.
"""

import difflib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from tempera.errors import (
    BenchmarkTooLarge,
    CannotCompile,
    ChainsTooShort,
    CoupledDraft,
    DeltaNotUsed,
    DiskTooSmall,
    DraftTooShort,
    EmptyDraft,
    EmptySearch,
    LengthBeyondDraft,
    LengthNotFound,
    LengthNotGiven,
    LengthOutOfReach,
    MemoryTooSmall,
    MemoryUnknown,
    NaNProbabilities,
    NoRange,
    NoReference,
    NoSmallerModel,
    NotAChain,
    NotAClass,
    NotADensityRule,
    NotADiscreteRule,
    OtherCodebook,
    OtherSchedule,
    OtherWorld,
    PromptTooLong,
    TemperaError,
    TooFewImages,
    UnknownMeasure,
    UnknownTree,
    shortened,
)
from tempera.runtime.files import FULL
from tempera.runtime.installation import command

OPTIONS: dict[type[BaseException], str] = {
    BenchmarkTooLarge: "batch_sizes=[1], dtype=bfloat16, depth=, trees=[]",
    CannotCompile: "compile=false",
    ChainsTooShort: "depth=",
    CoupledDraft: "drafter=sjd, or rule=exact",
    DeltaNotUsed: "delta=null expected_length=, or another schedule=",
    DiskTooSmall: "hydra.run.dir=DIR, source.images=DIR; HF_HUB_CACHE for downloads",
    DraftTooShort: "depth=; in training draft.length=",
    EmptyDraft: "method=ar",
    EmptySearch: "matching.prompts=, matching.trials=, matching.pilot=, matching.tolerance=",
    LengthBeyondDraft: "expected_length=",
    LengthNotFound: "expected_length=, matching.tolerance=",
    LengthNotGiven: "expected_length=",
    LengthOutOfReach: "expected_length=",
    MemoryUnknown: "batch_size=8, or in training gradient_accumulation=1",
    MemoryTooSmall: "batch_size=, dtype=bfloat16; in training also gradient_accumulation=",
    NaNProbabilities: "dtype=float32",
    NoRange: "free_parameter.least=, free_parameter.most=",
    NoReference: "metrics.reference=DIR, or metrics.reference=coco",
    NoSmallerModel: "model=shapes and llamagen_3b_c2i have one; drafter=mar_base serves MAR models",
    NotAChain: "tree=chain, or rule=exact",
    NotAClass: "as in prompt=207 or data=imagenet",
    NotADensityRule: "method=cspd, cspd_published or cspd_exact",
    NotADiscreteRule: "rule=exact, relaxed or lantern",
    OtherCodebook: "neighbours.directory=DIR",
    OtherWorld: "metrics=real or metrics=none",
    OtherSchedule: "method=optimal_rsd goes with schedule=optimal or constant_price, method=coolsd "
    "with the others",
    PromptTooLong: "truncate=true",
    TooFewImages: "train_data.limit=, from a source that has as many",
    UnknownTree: "tree=, trees=[]",
    UnknownMeasure: "as in metrics.names=[fid,clip,hps]",
}
"""For each error of the library, the command-line options that fix it."""

SCRIPTS = {"build_shapes": "build", "train_draft": "train"}
"""For each configuration of another name, the command that it is of."""

OUT_OF_MEMORY = (
    "out of memory: give a smaller batch_size, dtype=bfloat16 or a shorter draft (depth=, "
    "window=); in training also a larger "
    "gradient_accumulation=, mixed_precision=bf16, or FSDP on several devices"
)
UNWRITABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}


def sentence(
    problem: BaseException, conf: Path, config_name: str, arguments: Sequence[str]
) -> str | None:
    """Describe the user's mistake in one line; None if the problem is not a mistake of the user.

    Args:
        problem: an exception raised while composing the configuration or running the script.
        conf: the directory of configurations.
        config_name: the primary configuration, without `.yaml`.
        arguments: the command line, without the script's name.
    """
    message = _message(problem, conf, config_name, arguments)
    return message and shortened(message, most=2000)


def _message(
    problem: BaseException, conf: Path, config_name: str, arguments: Sequence[str]
) -> str | None:
    """The sentence for each kind of mistake; None for other exceptions."""
    match problem:
        case TemperaError():
            return _with_options(problem)
        case MissingConfigException(missing_cfg_file=str(missing), options=options) if options:
            group, _, choice = missing.rpartition("/")
            return f"there is no {group}={choice}; choose one of {', '.join(options)}"
        case InstantiationException():
            cause = problem.__cause__
            return None if cause is None else _message(cause, conf, config_name, arguments)
        case OverrideParseException():
            return _unreadable(problem.override)
        case HydraException():
            return _composition(str(problem), conf, config_name, arguments)
        case MissingMandatoryValue():
            return (
                f"`{problem.full_key}` has no value; give {problem.full_key}=… on the command line"
            )
        case MemoryError() | RuntimeError() if _is_out_of_memory(problem):
            return OUT_OF_MEMORY
        case InterpolationResolutionError():
            by = f" (needed by {problem.full_key})" if problem.full_key else ""
            return f"{_first_line(str(problem))}{by}; give it as name=value on the command line"
        case OmegaConfBaseException():
            place = problem.full_key or " ".join(arguments)
            return f"{_first_line(str(problem))} (at `{place}`); correct it"
        case OSError(errno=code) if code in FULL:
            what = f"'{problem.filename}'" if problem.filename else "the run's files"
            return (
                f"cannot write {what}: {problem.strerror}; free some space, and run the command "
                "again"
            )
        case OSError(errno=errno.ENAMETOOLONG, filename=str(name)):
            return f"the path '{shortened(name, most=100)}' is too long; give a shorter one"
        case OSError(errno=code, filename=str(name)) if code in UNWRITABLE:
            advice = "choose another directory with hydra.run.dir=DIR (for -m: hydra.sweep.dir=DIR)"
            return f"cannot write '{name}': {problem.strerror}; {advice}"
        case OSError(filename=str(name), strerror=str(reason)):
            return f"cannot read '{name}': {reason}; give another file or directory"
    return None


def _is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out in Python, on CUDA or in torch's CPU allocator. Errors are recognised
    by name, because importing torch takes seconds.
    """
    return (
        isinstance(problem, MemoryError)
        or type(problem).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(problem)
    )


def _with_options(problem: TemperaError) -> str:
    options = OPTIONS.get(type(problem))
    return f"{problem} ({options})" if options else str(problem)


def _unreadable(argument: str) -> str:
    if "=" not in argument:
        return f"cannot read '{argument}': options are written name=value, as in method=ar"
    advice = "quote a value that has commas, brackets or quotes of its own, as in 'name=\"value\"'"
    return f"cannot read '{argument}': {advice}"


def _composition(text: str, conf: Path, config_name: str, arguments: Sequence[str]) -> str:
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        advice = "add -m to run them all, or quote a value that contains commas"
        return f"'{ambiguous[1]}' gives several values: {advice}"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return unknown_option(unknown[1], conf, config_name, arguments)
    return _first_line(text)


def unknown_option(option: str, conf: Path, config_name: str, arguments: Sequence[str]) -> str:
    """Say which choices of conf/ define the option, or which option was probably meant."""
    choices = [one for one in arguments if (conf / one.partition("=")[0]).is_dir() and "=" in one]
    default = _composed(conf, config_name, choices) or _composed(conf, config_name, [])
    chosen_of = {} if default is None else default.hydra.runtime.choices
    groups = {
        group: _choices(conf, group) for group in sorted(chosen_of) if (conf / group).is_dir()
    }
    choices = [choice for choice in choices if choice.partition("=")[0] in groups]
    names = sorted({*_names(default or OmegaConf.create()), *groups} - {option})
    head, _, tail = option.rpartition(".")
    if head and tail in names:
        return f"there is no option `{option}`: did you mean `{tail}`?"
    scripts = ", ".join(_scripts_with(option, conf))
    elsewhere = f"there is no option `{option}` here: it belongs to {scripts}"
    if scripts and (conf / option).is_dir():
        return elsewhere
    optional = [group for group in groups if chosen_of[group] is None]
    if owners := _owners(option, conf, config_name, groups, choices, optional):
        chosen = [choice for choice in choices if choice.partition("=")[0] in owners]
        where = f" with {' '.join(chosen)}" if chosen else ""
        methods = f"method={', '.join(owners.pop('method'))}" if "method" in owners else ""
        others = " and ".join(f"{group}={', '.join(choices)}" for group, choices in owners.items())
        home = f"{others} ({methods})" if others and methods else others or methods
        return f"there is no option `{option}`{where}: it belongs to {home}"
    near = [name for name in names if name.endswith(f".{option}")][:3]
    if scripts and not near:
        return elsewhere
    near = near or difflib.get_close_matches(option, names, n=1, cutoff=0.7)
    hint = (
        f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
        if near
        else f"the options are {', '.join(name for name in names if '.' not in name)}"
    )
    return f"there is no option `{option}`: {hint}"


def _scripts_with(option: str, conf: Path) -> list[str]:
    """The scripts that have a group or a top-level option of this name."""
    known = re.compile(
        rf"^({re.escape(option)}:|  - (optional )?{re.escape(option)}:)", re.MULTILINE
    )
    return [
        command(SCRIPTS.get(path.stem, path.stem))
        for path in sorted(conf.glob("*.yaml"))
        if known.search(path.read_text(encoding="utf-8"))
    ]


def belongs_elsewhere(option: str, conf: Path) -> bool:
    """Whether some choice of conf/ defines a top-level option of this name."""
    choices = (path.relative_to(conf).with_suffix("") for path in conf.glob("*/*.yaml"))
    return any(_defines(option, conf, choice.as_posix()) for choice in choices)


def _owners(
    option: str,
    conf: Path,
    config_name: str,
    groups: Mapping[str, Sequence[str]],
    chosen: Sequence[str],
    optional: Sequence[str] = (),
) -> dict[str, list[str]]:
    """By group, the choices that define an option which other choices of the group lack, or which
    is missing because nothing of an `optional` group is chosen. They are
    tried with the choices of the command line if these compose, else with the defaults or a method.
    """
    methods = [[f"method={method}"] for method in groups.get("method", ())]
    found = {}
    for group, choices in groups.items():
        if group == "experiment":
            continue  # sweeps over options of others
        if not any(_mentions(option, conf, f"{group}/{choice}") for choice in choices):
            continue
        others = [choice for choice in chosen if choice.partition("=")[0] != group]
        bases = [others, [], *methods] if others else [[], *methods]
        tried = (_having(option, conf, config_name, base, group, choices) for base in bases)
        having = next((having for having in tried if having is not None), [])
        if 0 < len(having) < len(choices) + (group in optional):
            found[group] = having
    return found


def _mentions(option: str, conf: Path, choice: str) -> bool:
    """Whether the file of a choice, or one in its defaults list, may define the option. Files are
    only searched, since composing is slow.
    """
    path = conf / f"{choice}.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if re.search(
        rf"^\s*{re.escape(option.rpartition('.')[2])}:|/{re.escape(option)}:", text, re.MULTILINE
    ):
        return True
    return any(
        _mentions(option, conf, f"{group}/{name}")
        for group, name in re.findall(r"^\s*- /([\w/]+): *(\w+)", text, re.MULTILINE)
    )


def _defines(option: str, conf: Path, choice: str) -> bool:
    """Whether the file of a choice defines the option at the top level of the configuration."""
    path = conf / f"{choice}.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    top = re.search(rf"^{re.escape(option)}:", text, re.MULTILINE)
    return bool(top) and text.startswith("# @package _global_\n")


def _having(
    option: str, conf: Path, config_name: str, base: list[str], group: str, choices: Sequence[str]
) -> list[str] | None:
    """The choices with which the option exists; None unless the choices compose on top of `base`.

    All choices that do not mention the option get it from elsewhere or not at all, and all that
    define it have it, so only one of each kind is composed, since composing is slow.
    """
    silent = [choice for choice in choices if not _mentions(option, conf, f"{group}/{choice}")]
    defining = [choice for choice in choices if _defines(option, conf, f"{group}/{choice}")]
    having = []
    for choice in choices:
        if choice in (*silent[1:], *defining[1:]):
            continue
        cfg = _composed(conf, config_name, [*base, f"{group}={choice}"])
        if cfg is None:
            return None
        if option in _names(cfg):
            alike = next((kind for kind in (silent, defining) if choice in kind), [choice])
            having += alike
    return sorted(having)


def _composed(conf: Path, config_name: str, overrides: list[str]) -> DictConfig | None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        try:
            return compose(config_name, overrides, return_hydra_config=True)
        except HydraException:
            return None


def _names(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted name of every option in a configuration."""
    for key in cfg.keys() - {"hydra", "_target_"}:
        name = f"{prefix}{key!s}"
        yield name
        value = cfg._get_node(key)
        if (
            isinstance(value, DictConfig)
            and not value._is_none()
            and not value._is_missing()
            and not value._is_interpolation()
        ):
            yield from _names(value, f"{name}.")


def _choices(conf: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].strip()
