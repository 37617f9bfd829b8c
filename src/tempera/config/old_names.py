"""Names that options had in earlier versions. Each is refused in one sentence that has the new one;
the next release takes them out.
"""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from tempera.config.nodes import plain
from tempera.errors import TemperaError, shortened

OF_PROMPTS = {name: f"data.{name}" for name in ("limit", "offset", "path")}
OF_TRAINING = (
    *("steps", "epochs", "batch_size", "gradient_accumulation", "mixed_precision"),
    *("lr", "matrix_lr", "warmup_steps", "decay", "beta1", "beta2", "weight_decay", "grad_clip"),
    *("ema", "hidden_noise", "noise_length", "ttt_steps", "ttt_decay", "cfg_dropout"),
    *("cross_entropy", "logit_chunk", "validate_every", "checkpoint_every", "log_every"),
    *("holdout", "decodes", "depth"),
)
RENAMED = {
    "eval": OF_PROMPTS,
    "tune": OF_PROMPTS,
    "export": {"path": "layout.path"},
    "prepare": {"limit": "source.limit"},
    "train_draft": {
        "limit": "train_data.limit",
        **{name: f"training.{name}" for name in OF_TRAINING},
    },
}
"""The new name of each old one, by the command's configuration."""


def renamed(config_name: str, option: str, arguments: Sequence[str]) -> str | None:
    """What to say of an option that there is not; None if it never was one."""
    new = RENAMED.get(config_name, {}).get(option)
    given = dict(argument.lstrip("+~").partition("=")[::2] for argument in arguments)
    return new and f"`{option}` is now `{new}`: give {new}={given.get(option) or 'VALUE'}"


def renamed_reference(config_name: str, option: str, reader: str) -> str | None:
    """What to say where an option `reader` of the user's own file is `${option}` and there is no
    such option; None if it never was one.
    """
    new = RENAMED.get(config_name, {}).get(option)
    instead = "leave that line out of your file" if reader == new else f"write ${{{new}}}"
    return new and f"`{reader}` is ${{{option}}}, and `{option}` is now `{new}`: {instead}"


def check_names(config_name: str, cfg: DictConfig) -> None:
    """Raise TemperaError for an old name that a file of the user's own sets, or `+` adds, and that
    nothing reads.
    """
    set_here = [name for name in RENAMED.get(config_name, ()) if name in cfg]
    text = OmegaConf.to_yaml(cfg) if set_here else ""
    for name in set_here:
        value = plain(cfg)[name]
        if f"${{{name}}}" not in text and value is not None:
            new = RENAMED[config_name][name]
            group, _, inner = new.partition(".")
            shown = shortened(str(value), 60)
            raise TemperaError(
                f"`{name}` is now `{new}`: give {new}={shown}, or in a file "
                f"{group}: {{{inner}: {shown}}}"
            )
