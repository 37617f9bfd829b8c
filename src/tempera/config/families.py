"""Families of models: a model's file in conf/family/ sets the scripts' default prompts, training
data, metrics, recipe and batch size.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from tempera.errors import TemperaError
from tempera.runtime.installation import conf_directory

OTHER = "other"
"""The family of models that name none."""


def suited(option: str, *, _root_: DictConfig) -> Any:
    """`${suited:OPTION}` in conf/: the value of an option in the model's family. Works in a
    configuration and in its defaults list.
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
    """Raise TemperaError if prompts, images or metrics of the shipped toy world are combined with a
    model of photographs, or class numbers with a model of texts.
    """
    family = cfg.get("family")
    if family is None or family.toy is None:
        return
    data, texts = cfg.get("data"), family.data not in ("imagenet", "shape_classes")
    classes = OmegaConf.is_dict(data) and str(data.get("_target_")).endswith(".imagenet_prompts")
    if classes and texts and cfg.get("prompt") is None:
        raise TemperaError(
            f"the class numbers of data=imagenet do not suit model={cfg.model.name}, which takes "
            f"texts: leave data= out, which gives data={family.data}"
        )
    if family.toy is not False:
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
