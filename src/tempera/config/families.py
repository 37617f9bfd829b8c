"""What suits a model: its family in conf/family/ names prompts, training data, metrics, recipe and
batch size, which are the defaults of the scripts.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from tempera.errors import TemperaError
from tempera.runtime.installation import conf_directory

OTHER = "other"
"""The family of a model that names none."""


def suited(option: str, *, _root_: DictConfig) -> Any:
    """`${suited:OPTION}` in conf/: what the model's family has for an option, in a configuration or
    in the defaults list of one.
    """
    family = _root_.get("family") or OTHER
    if isinstance(family, str):
        path = conf_directory() / "family" / f"{family}.yaml"
        if not path.is_file():
            choices = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
            raise TemperaError(f"there is no family={family}; choose one of {choices}")
        family = OmegaConf.create({"family": OmegaConf.load(path)}).family
    return family[option]


OmegaConf.register_new_resolver("suited", suited, replace=True)


def check_suited(cfg: DictConfig) -> None:
    """Raise TemperaError where prompts, images or metrics of the shipped toy world meet a model of
    photographs.
    """
    family = cfg.get("family")
    if family is None or family.toy is not False:
        return
    for group in ("data", "train_data", "source", "metrics"):
        node = cfg.get(group)
        if group == "data" and cfg.get("prompt") is not None:
            continue
        if OmegaConf.is_dict(node) and str(node.get("_target_")).startswith("tempera.shapes."):
            raise TemperaError(
                f"the {_NAMES[group]} of the toy world do not suit model={cfg.model.name}: leave "
                f"{group}= out, which gives {group}={family[group]}, or take model=shapes"
            )


_NAMES = {
    "data": "prompts",
    "train_data": "training images",
    "source": "scenes",
    "metrics": "metrics",
}
