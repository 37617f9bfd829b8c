"""MAR's published networks, in the official key layout, and the small ones that ship inside the package."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tempera.continuous.mar import MAR, SIZES, MARConfig, Size
from tempera.errors import TemperaError
from tempera.targets.weights import Release, fill, on_meta, randomise, read


def load_mar(
    weights: str,
    files: list[str],
    hub: str,
    size: Size = "base",
    config: MARConfig | None = None,
    option: str = "model.weights",
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> MAR:
    """A MAR with published weights, the moving average where a file holds both.

    Args:
        weights, files, hub, option: see `tempera.targets.weights.Release`.
        size: `base`, `large` or `huge`.
        config: in place of `size`.
        device, dtype: where and as what random weights are made; published ones stay as they are in their files.
    """
    release, config = Release(weights, files, hub, option), config or SIZES[size]
    network: Any = on_meta(lambda: MAR(config))
    if release.random:
        randomise(network, device or torch.device("cpu"), dtype)
    else:
        found = release.find()
        fill(network, read(found), str(found[0]))
    mar: MAR = network
    return mar


def load_embedded_mar(directory: str | Path) -> MAR:
    """The network saved in `directory` as config.json and model.safetensors, in evaluation mode."""
    directory = Path(directory)
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise TemperaError(
                f"{directory / name} is missing: train it with `python train_draft/build_embedded.py stages=[mar]` and give "
                "weights=DIR, the directory that it wrote."
            )
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    network = MAR(MARConfig(**{**values, "grid": tuple(values["grid"])}))
    network.load_state_dict({name: value.float() for name, value in load_file(directory / "model.safetensors").items()})
    return network.eval().requires_grad_(False)


def config_dict(config: MARConfig) -> dict[str, Any]:
    """What config.json holds."""
    return asdict(config)
