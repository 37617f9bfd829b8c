"""Hydra's and OmegaConf's complaints, and the file system's, as one sentence that names what, where and what to do."""

import difflib
import errno
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from tempera.errors import TemperaError

UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC, errno.ENAMETOOLONG}


def sentence(problem: BaseException, conf: Path, config_name: str, arguments: Sequence[str]) -> str | None:
    """Say what the user did wrong, or return None where the problem is not the user's.

    Args:
        problem: what was raised while composing the configuration or running the script.
        conf: the directory of configurations.
        config_name: the primary configuration, without `.yaml`.
        arguments: the command line, without the script's name.
    """
    match problem:
        case TemperaError():
            return str(problem)
        case MissingConfigException(missing_cfg_file=str(missing), options=options) if options:
            group, _, choice = missing.rpartition("/")
            near = difflib.get_close_matches(choice, options, n=1)
            return f"there is no {group}={choice}{_meant(near)}; choose one of {', '.join(options)}"
        case InstantiationException():
            return str(problem.__cause__) if isinstance(problem.__cause__, TemperaError) else None
        case OverrideParseException():
            return _unreadable(problem.override)
        case HydraException():
            return _composition(str(problem), conf, config_name, arguments)
        case MissingMandatoryValue() | InterpolationResolutionError():
            return f"{_first_line(str(problem))} (option {problem.full_key}); give it as name=value on the command line"
        case OSError(errno=code, filename=str(name)) if code in UNWRITABLE:
            return f"cannot write '{name}': {problem.strerror}; choose another directory with hydra.run.dir=DIR (sweeps: hydra.sweep.dir=DIR)"
    return None


def _unreadable(argument: str) -> str:
    if "=" not in argument:
        return f"cannot read '{argument}': options are written name=value, as in method=ar"
    return f"cannot read '{argument}': quote a value that has commas, brackets or quotes of its own, as in 'name=\"value\"'"


def _composition(text: str, conf: Path, config_name: str, arguments: Sequence[str]) -> str:
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        return f"'{ambiguous[1]}' gives several values: add -m to run them all, or quote the value if it is one"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return _unknown(unknown[1], conf, config_name, arguments)
    return _first_line(text)


def _unknown(option: str, conf: Path, config_name: str, arguments: Sequence[str]) -> str:
    """Say which choices of conf/ bring the option, or which option was meant."""
    chosen = _chosen_groups(conf, arguments)
    where = f" with {' '.join(chosen)}" if chosen else ""
    owners = list(_owners(option, conf, config_name))
    if owners:
        return f"there is no option `{option}`{where}: it belongs to {', '.join(owners[:-1])}{' and ' if owners[1:] else ''}{owners[-1]}"
    names = sorted({*_names(_composed(conf, config_name, []) or OmegaConf.create()), *_groups(conf)})
    near = difflib.get_close_matches(option, names, n=1)
    if near:
        return f"there is no option `{option}`{_meant(near)}"
    top = ", ".join(name for name in names if "." not in name)
    return f"there is no option `{option}`; the options are {top}"


def _owners(option: str, conf: Path, config_name: str) -> Iterator[str]:
    """The choices, group by group, that bring an option which other choices of the same group do not have."""
    for group in _groups(conf):
        choices = sorted(path.stem for path in (conf / group).glob("*.yaml"))
        composed = {choice: _composed(conf, config_name, [f"{group}={choice}"]) for choice in choices}
        having = [choice for choice, cfg in composed.items() if cfg is not None and option in _names(cfg)]
        if having and len(having) < len(choices):
            yield f"{group}={' or '.join(having)}"


def _composed(conf: Path, config_name: str, overrides: list[str]) -> DictConfig | None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        try:
            return compose(config_name, overrides)
        except HydraException:
            return None


def _names(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every option of a configuration, dotted."""
    for key in cfg:
        yield f"{prefix}{key}"
        value = cfg._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing() and not value._is_interpolation():
            yield from _names(value, f"{prefix}{key}.")


def _groups(conf: Path) -> list[str]:
    return sorted(path.name for path in conf.iterdir() if path.is_dir())


def _chosen_groups(conf: Path, arguments: Sequence[str]) -> list[str]:
    """The group choices on the command line, such as `method=eagle`."""
    groups = set(_groups(conf))
    return [argument for argument in arguments if argument.partition("=")[0] in groups]


def _meant(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].strip()
