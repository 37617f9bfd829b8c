"""Turns errors of tempera, Hydra, OmegaConf and the file system into one sentence: one for each
class of mistake.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from traceback import extract_tb
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

from tempera.config.nodes import plain
from tempera.config.old_names import renamed, renamed_reference
from tempera.config.search import DIRECTORIES
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import FULL

OUT_OF_MEMORY = (
    "out of memory: give a smaller batch_size (an evaluation takes auto), dtype=bfloat16 (on a T4 "
    "float16), compile=false, or a shorter draft (depth=, window=); in training a smaller "
    "train_data.batch_size or training.decodes, a larger training.gradient_accumulation, or "
    "training.mixed_precision=bf16"
)
OF_OPTIONS = {"hydra", "omegaconf", "submitit"}
"""Packages whose words say what is wrong with an option."""


def sentence(problem: BaseException, config_name: str, arguments: Sequence[str]) -> str | None:
    """What was wrong, where, and what to do; None if it was not the user's mistake.

    Args:
        problem: raised while composing the configuration or running the script.
        config_name: the script's configuration, without `.yaml`.
        arguments: the command line, without the script's name.
    """
    text = text_of(problem)
    answer: str | None = None
    trace = problem.__traceback__
    is_of_options = not OF_OPTIONS.isdisjoint(_origin(problem))
    told = [cause for cause in causes(problem) if isinstance(cause, TemperaError)]
    if told and (is_of_options or told[0] is problem):  # a resolver of conf/ raised it
        return _of_tempera(told[0])
    match problem:
        case RecursionError() if any("hydra/" in frame.filename for frame in extract_tb(trace)):
            answer = (
                "the defaults of your configurations refer to each other in a circle: remove one "
                "of them"
            )
        case MissingConfigException(missing_cfg_file=str(missing), options=options) if options:
            answer = _no_choice(missing, options)
        case OverrideParseException():
            answer = (
                f"cannot read '{shortened(problem.override)}': write options as name=value, and "
                "quote a value that contains commas, brackets or quotes, as in 'name=\"a, b\"'"
            )
        case HydraException():
            answer = _composition(text, config_name, arguments)
        case MissingMandatoryValue():
            answer = f"`{problem.full_key}` has no value; give {problem.full_key}=VALUE"
        case InterpolationKeyError() if found := re.search(r"Interpolation key '([\w.]+)'", text):
            answer = renamed_reference(config_name, found[1], str(problem.full_key))
            answer = answer or f"{text.strip().splitlines()[0]}; correct it"
        case MemoryError() | RuntimeError() if _is_out_of_memory(problem, text):
            answer = OUT_OF_MEMORY
        case ValueError(__cause__=OSError() as inner) if "logging" in _origin(problem):
            answer = sentence(inner, config_name, arguments)  # of the run's log file
        case OSError(errno=number, strerror=str(reason)) if number in FULL:
            path = problem.filename or "the run's directory (hydra.run.dir=DIR)"
            answer = f"cannot write {path}: {reason}; free some space, and run the command again"
        case OSError(strerror=str(reason), filename=name) if name is not None:
            other = "give another file or directory (of a run: hydra.run.dir=DIR)"
            answer = f"cannot read or write '{shortened(str(name), 100)}': {reason}; {other}"
        case Exception() if is_of_options:
            answer = f"{text.strip().splitlines()[0]}; correct it"
    return answer and shortened(answer, most=4000)


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that led to it."""
    met: list[BaseException] = []  # an error can be among its own causes
    while problem is not None and problem not in met:
        yield problem
        met.append(problem)
        problem = problem.__cause__ or problem.__context__


def _origin(problem: BaseException) -> set[str]:
    """The packages of an exception's class and of the code that raised it."""
    frame = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised = frame.tb_frame.f_globals.get("__name__", "") if frame else ""
    return {name.partition(".")[0] for name in (type(problem).__module__, raised)}


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


def _no_choice(missing: str, options: Sequence[str]) -> str:
    """That a group lacks a choice; `missing` is GROUP/CHOICE."""
    group, choice = re.findall("^((?:hydra/)?[^/]*)/(.*)", missing)[0]
    if group == "hydra/launcher" and choice in ("joblib", "submitit_slurm"):
        return 'this launcher needs an extra package: pip install "tempera-decoding[launchers]"'
    near = difflib.get_close_matches(choice, options, n=1)
    meant = f"did you mean {near[0]}? The choices are" if near else "choose one of"
    return f"there is no {group}={choice}: {meant} {', '.join(options)}"


def _composition(text: str, config_name: str, arguments: Sequence[str]) -> str:
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        option, _, values = ambiguous[1].partition("=")
        return (
            f"'{ambiguous[1]}' gives several values: write {option}=[{values}] for a list, add -m "
            "for a run with each, or quote a value that contains commas"
        )
    if wrong := re.fullmatch("Error merging override (.*)", text, re.DOTALL):
        return (
            f"`{wrong[1]}` is not valid: the option takes values of another type, which --help "
            "shows"
        )
    if unknown := re.search(r"Could not (?:override|delete)(?: from config\.)? ?'([^'=]+)", text):
        return _unknown(unknown[1].partition("@")[0], config_name, arguments)
    return shortened(text, most=300)


def _unknown(option: str, config_name: str, arguments: Sequence[str]) -> str:
    """Which choices define an option, or which one was probably meant."""
    if told := renamed(config_name, option, arguments):
        return told
    directories = DIRECTORIES.get()
    groups = directories.groups()
    chosen = [argument for argument in arguments if argument.partition("=")[0] in groups]
    method = next((choice for choice in chosen if choice.startswith("method=")), "these choices")
    names = _names_of(config_name, chosen) or _names_of(config_name, [])
    inside = [name for name in names if name.endswith(f".{option}")]
    if option in groups:
        with_others = "" if option == "method" else f" with {method}"
        instead = f", or give `{inside[0]}`" if inside else ""
        return f"`{option}` cannot be chosen{with_others}: leave it out{instead}"
    if owners := directories.owners(option):
        return f"there is no option `{option}` with {method}: it belongs to {', '.join(owners)}"
    near = difflib.get_close_matches(option, names, n=1, cutoff=0.75) or inside
    top = ", ".join(name for name in names if "." not in name)
    meant = f"did you mean `{near[0]}`?" if near else f"the options are {top}"
    return f"there is no option `{option}`: {meant}"


def _names_of(config_name: str, choices: Sequence[str]) -> list[str]:
    """The dotted names of all options and groups; none if the choices do not compose."""
    try:
        cfg = DIRECTORIES.get().load(config_name, choices)
    except HydraException:
        return []
    groups = [str(group) for group in cfg.hydra.runtime.choices if "/" not in str(group)]
    options = plain(cfg)
    del options["hydra"]
    return sorted({*groups, *_dotted(options)})


def _dotted(options: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values and nodes."""
    for key, value in options.items():
        if key != "_target_":
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from _dotted(value, f"{prefix}{key}.")
