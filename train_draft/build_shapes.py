"""Train the networks of the shipped model, stage by stage: `--help` lists the options, which
`shapes_recipe/` explains.
"""

import sys

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from shapes_recipe.recipe import Recipe, build

from tempera.errors import TemperaError
from tempera.runtime.terminal import take_all_text

ConfigStore.instance().store("recipe", Recipe)
ConfigStore.instance().store(
    "build_shapes",
    {
        "defaults": ["recipe", "_self_"],
        "hydra": {"run": {"dir": "${output}"}, "output_subdir": None},
    },
)


@hydra.main(version_base="1.3", config_path=None, config_name="build_shapes")
def main(cfg: DictConfig) -> None:
    """Run the stages."""
    take_all_text()
    try:
        build(OmegaConf.to_object(cfg))
    except TemperaError as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
