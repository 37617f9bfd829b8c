"""Turns errors of tempera, Hydra, OmegaConf and the file system into one sentence."""

import difflib
import errno
import re
import traceback
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigAttributeError, MissingMandatoryValue, OmegaConfBaseException

from tempera.config.nodes import plain
from tempera.config.search import DIRECTORIES, Catalogue, option_names
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import FULL

OUT_OF_MEMORY = (
    "out of memory: give a smaller batch_size (an evaluation takes auto), dtype=bfloat16 (on a T4 "
    "float16), or a shorter draft (depth=, window=); in training a smaller train_data.batch_size "
    "or decodes, a larger gradient_accumulation, or mixed_precision=bf16"
)
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


def sentence(problem: BaseException, config_name: str, arguments: Sequence[str]) -> str | None:
    """What was wrong, where, and what to do; None if it was not the user's mistake.

    Args:
        problem: raised while composing the configuration or running the script.
        config_name: the script's configuration, without `.yaml`.
        arguments: the command line, without the script's name.
    """
    text = text_of(problem)
    answer: str | None = None
    match problem:
        case TemperaError():
            return _of_tempera(problem)
        case MissingConfigException(missing_cfg_file=str(missing), options=options) if options:
            # of hydra/launcher, or of model=/dev/null
            group, choice = re.findall("^((?:hydra/)?[^/]*)/(.*)", missing)[0]
            near = difflib.get_close_matches(choice, options, n=1)
            if any(name.startswith(f"{choice}_") for name in options):
                near = []  # of a family of models, none is the one that was meant
            meant = f"did you mean {near[0]}? The choices are" if near else "choose one of"
            answer = f"there is no {group}={choice}: {meant} {', '.join(options)}"
            if group == "hydra/launcher" and choice in ("joblib", "submitit_slurm"):
                answer = 'this launcher is an extra: pip install "tempera-decoding[launchers]"'
        case OverrideParseException():
            answer = _unreadable(problem.override)
        case HydraException():
            answer = _composition(text, config_name, arguments)
        case MissingMandatoryValue():
            answer = f"`{problem.full_key}` has no value; give {problem.full_key}=VALUE"
        case ValueError() | TypeError() if _raised_in(problem, "defaults_list.py"):
            answer = (
                "a group takes the name of one of its choices, as in method=ar; ~GROUP removes it"
            )
        case RecursionError() if _passes(problem, "defaults_list.py"):
            answer = "a defaults list leads back to itself: take the circle out of your YAML files"
        case MemoryError() | RuntimeError() if _is_out_of_memory(problem, text):
            answer = OUT_OF_MEMORY
        case RuntimeError() if 'Could not detect "srun"' in text:
            answer = "launcher=slurm needs srun: start the sweep on a machine of the cluster"
        case Exception() if type(problem).__module__.startswith("submitit."):
            first = text.strip().splitlines()[0]
            answer = f"{first}: see the logs in .submitit of the sweep, and run the command again"
        case ConfigAttributeError(full_key=str(missing)):
            answer = f"`{missing}` is missing: it cannot be removed, as by ~{missing}"
        case OmegaConfBaseException() if (reason := _of_resolver(problem)) is not None:
            return _of_tempera(reason)
        case OmegaConfBaseException():
            place = f" (in `{problem.full_key}`)" if problem.full_key else ""
            answer = f"{text.strip().splitlines()[0]}{place}; correct it"
        case OSError():
            answer = _of_files(problem)
    return answer and shortened(answer, most=4000)


def _of_resolver(problem: BaseException) -> TemperaError | None:
    """What a resolver of conf/ raised, around which OmegaConf puts its own errors."""
    met: list[BaseException] = []
    inner = problem.__cause__ or problem.__context__
    while inner is not None and inner not in met:
        if isinstance(inner, TemperaError):
            return inner
        met.append(inner)
        inner = inner.__cause__ or inner.__context__
    return None


def _of_tempera(problem: TemperaError) -> str:
    """Its sentence, with the option if that does not name it, and its details in lines."""
    text = text_of(problem).removesuffix("\n  ".join(["", *problem.details]))
    option = problem.option
    if option is not None and not re.search(rf"\b{re.escape(option)}\b", text):
        text = f"{text} ({option}=)"
    return "\n  ".join([shortened(text, most=4000), *problem.details])


def text_of(problem: BaseException) -> str:
    """An error's own words, or its type if it has none or they fail."""
    try:
        return str(problem) or type(problem).__name__
    except Exception:
        return type(problem).__name__


def _of_files(problem: OSError) -> str | None:
    name = shortened(str(problem.filename), most=100)
    reason = problem.strerror
    if problem.errno in FULL:
        what = _place(problem) if problem.filename is None else f"'{name}'"
        return f"cannot write {what}: {reason}; free some space, and run the command again"
    if problem.filename is None or reason is None:
        return None
    if problem.errno in UNWRITABLE or _raised_in(problem, "makedirs", "mkdir"):
        return (
            f"cannot write '{name}': {reason}; choose another directory with hydra.run.dir=DIR "
            "(for -m: hydra.sweep.dir=DIR)"
        )
    return f"cannot read '{name}': {reason}; give another file or directory"


def _place(problem: OSError) -> str:
    """What was written to, by an error that does not say it."""
    frames = traceback.extract_tb(problem.__traceback__)
    line = (frames[-1].line or "") if frames else ""
    if line.startswith("print(") or "stdout" in line:
        return "what is printed"
    if HydraConfig.initialized():
        return f"in '{HydraConfig.get().runtime.output_dir}'"
    return "the run's directory (hydra.run.dir)"


def _raised_in(problem: BaseException, *places: str) -> bool:
    """Whether an exception comes from one of these files or functions."""
    frames = traceback.extract_tb(problem.__traceback__)[-1:]
    return any(one.name in places or one.filename.endswith(places) for one in frames)


def _passes(problem: BaseException, file: str) -> bool:
    """Whether an exception comes through a file."""
    frames = traceback.extract_tb(problem.__traceback__)
    return any(frame.filename.endswith(file) for frame in frames)


def _is_out_of_memory(problem: BaseException, text: str) -> bool:
    """Whether memory ran out in Python, on CUDA or in torch's CPU allocator; by name, because
    importing torch takes seconds.
    """
    return (
        isinstance(problem, MemoryError)
        or type(problem).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "No executable batch size" in text  # accelerate, of batch_size=auto
    )


def _unreadable(argument: str) -> str:
    shown = shortened(argument)
    if "=" not in argument:
        return f"cannot read '{shown}': options are written name=value, as in method=ar"
    advice = "quote a value that has commas, brackets or quotes of its own, as in 'name=\"value\"'"
    return f"cannot read '{shown}': {advice}"


def _composition(text: str, config_name: str, arguments: Sequence[str]) -> str:
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        advice = "add -m to run them all, or quote a value that contains commas"
        return f"'{ambiguous[1]}' gives several values: {advice}"
    if wrong := re.fullmatch("Error merging override (.*)", text, re.DOTALL):
        return f"`{wrong[1]}` is not possible: the option has values of another kind"
    if unknown := re.search(r"Could not (?:override|delete)(?: from config\.)? ?'([^'=]+)", text):
        return _unknown(unknown[1].partition("@")[0], config_name, arguments)
    return shortened(text, most=300)


def _unknown(option: str, config_name: str, arguments: Sequence[str]) -> str:
    """Which choices of conf/ define an option, or which one was probably meant."""
    catalogue = Catalogue(config_name)
    chosen = [argument for argument in arguments if argument.partition("=")[0] in catalogue.groups]
    names = _names_of(config_name, chosen) or _names_of(config_name, [])
    if f"~{option}" in arguments and option in names:
        return f"`{option}` is null already: leave out ~{option}"
    owners = [owner for owner in catalogue.owners(option) if owner[0] != "experiment"]
    methods = [choice for choice in chosen if choice.startswith("method=")]
    method = methods[0] if methods else "these choices"
    if owners and "," in method:
        cases = f'["method=ar","method=coolsd {option}=VALUE"]'
        return f"only some methods have `{option}`: list cases, as 'hydra.sweeper.cases={cases}'"
    if option in catalogue.groups:
        return f"there is no `{option}` to choose with {method}: leave it out"
    if owners:
        places = _places(owners, catalogue.methods(owners))
        return f"there is no option `{option}` with {method}: it belongs to {places}"
    near = difflib.get_close_matches(option, names, n=1, cutoff=0.75)
    near = near or [name for name in names if name.endswith(f".{option}")][:1]
    top = ", ".join(name for name in names if "." not in name)
    meant = f"did you mean `{near[0]}`?" if near else f"the options are {top}"
    return f"there is no option `{option}`: {meant}"


def _places(owners: Sequence[tuple[str, str]], methods: Sequence[str]) -> str:
    """Where an option belongs: the methods that have it first, then the choices that add it."""
    choices = [f"{group}={choice}" for group, choice in owners if group != "method"]
    if not methods:
        return ", ".join(choices)
    parts = f" ({', '.join(choices)})" if choices else ""
    return f"method={', '.join(methods)}{parts}"


def _names_of(config_name: str, choices: Sequence[str]) -> list[str]:
    """The dotted names of all options and groups; none if the choices do not compose."""
    try:
        cfg = DIRECTORIES.get().load(config_name, choices)
    except HydraException:
        return []
    groups = [str(group) for group in cfg.hydra.runtime.choices if "/" not in str(group)]
    options = plain(cfg)
    del options["hydra"]
    return sorted({*groups, *option_names(options)})
