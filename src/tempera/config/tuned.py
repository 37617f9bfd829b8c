"""`method=auto`: the options that `tempera-tune` has found for a model, under the conditions that
they were found for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, write_json
from tempera.runtime.installation import command

PLAIN = ("method=ar",)
"""The options of plain autoregression, which may be the fastest setting."""

OWN_DRAFT = ("method=parallel", "drafter=parallel")
"""Options of settings whose draft is not the one that `drafter.path` of method=auto names."""

SAMPLING = ("guidance", "temperature", "top_k", "top_p")


def conditions(cfg: DictConfig) -> dict[str, Any]:
    """What the speed and the divergence of a setting depend on: the model, the weights of EAGLE's
    draft (made for one target only), sampling, dtype, compiled or plain steps, and the device.
    """
    import torch

    from tempera.config.build import parse_device, parse_dtype
    from tempera.runtime.network_directory import weights_hash

    device = parse_device(cfg.device)
    path = OmegaConf.select(cfg, "drafter.path")
    return {
        "model": cfg.model.name,
        "draft": None if path is None else weights_hash(Path(str(path))),
        **{name: float(cfg[name]) for name in SAMPLING},
        "dtype": str(parse_dtype(cfg.dtype, device)).removeprefix("torch."),
        "compile": cfg.get("compile", False),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def save_tuned(
    path: Path, options: Sequence[str], found_under: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Write what `method=auto` stands for.

    Args:
        path: the file.
        options: of the command line, such as method=block and depth=4.
        found_under: the `conditions`.
        about: further facts for the reader.
    """
    write_json(path, {"options": list(options), "conditions": dict(found_under), **about})


def is_auto(cfg: DictConfig) -> bool:
    """Whether the method of a configuration is `auto`."""
    return "tuned" in cfg


def with_tuned(cfg: DictConfig, arguments: Sequence[str]) -> list[str]:
    """The arguments of a configuration with `method=auto`, with the stored options in its place.

    Raises:
        TemperaError: there is no result for this model, or it was found under other conditions.
    """
    path = Path(str(cfg.tuned))
    again = f"run `{command('tune')}` with this run's options"
    if not path.is_file():
        raise TemperaError(f"there is no {path}, which method=auto reads: {again} first")
    stored = read_json(path)
    options, known = stored.get("options"), stored.get("conditions")
    if not (isinstance(known, dict) and isinstance(options, list)):
        raise TemperaError(f"{path} is not a result of tuning: {again}")
    for name, now in conditions(cfg).items():
        if known.get(name) != now:
            raise TemperaError(
                f"{path} was found with {name}={known.get(name)}, but this run has {name}={now}: "
                f"{again}, or choose a method"
            )
    others = [one for one in arguments if option_name(one) not in ("method", "tuned")]
    return merged(others, list(map(str, options)))


def merged(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Arguments with the options of a setting. Plain autoregression has none of a draft, and a
    setting with another draft than EAGLE's not the path of EAGLE's.
    """
    if tuple(options) == PLAIN:
        dropped = [one for one in arguments if option_name(one).startswith("drafter.")]
    elif any(option in OWN_DRAFT for option in options):
        dropped = [one for one in arguments if option_name(one) == "drafter.path"]
    else:
        dropped = []
    return [*(one for one in arguments if one not in dropped), *options]


def option_name(argument: str) -> str:
    """The name in an argument `name=value`, `+name=value` or `~name`."""
    return argument.partition("=")[0].lstrip("+~")
