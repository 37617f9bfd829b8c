"""open_clip models, given by a tag, a `hf-hub:` id, a directory or a file."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.metrics.weights import WeightsFile, filled
from tempera.runtime.tensor_files import read_tensors
from tempera.runtime.torchvision import import_open_clip

Tokenizer = Callable[[list[str]], Tensor]
Preprocess = Callable[[Any], Tensor]
_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


@dataclass(frozen=True)
class ClipModel:
    """A CLIP model of open_clip.

    Args:
        model: name of an architecture (`ViT-B-32`), `hf-hub:owner/name` or `local-dir:DIRECTORY`;
            the last two include weights.
        weights: one of open_clip's tags for the architecture (`openai`), or a file.
    """

    model: str = "ViT-B-32"
    weights: str | None = "openai"

    @property
    def files(self) -> tuple[WeightsFile, ...]:
        """The model's files: its configuration if it has one, then its weights."""
        scheme, _, place = self.model.rpartition(":")
        if scheme:
            return WeightsFile(place, ("open_clip_config.json",)), WeightsFile(place, _NAMES)
        open_clip = import_open_clip()
        if self.model not in open_clip.list_models():
            raise TemperaError(
                f"{self.model} is not a model that open_clip knows: give one that "
                "open_clip.list_models() lists, or hf-hub:owner/name."
            )
        tag = self._tag
        repository, _, name = tag.get("hf_hub", "").rpartition("/")
        if repository:
            return (WeightsFile(repository, (name,) if name else _NAMES),)
        if "url" in tag:
            return (WeightsFile(tag["url"], (tag["url"].rpartition("/")[2],)),)
        if self.weights is None or not Path(self.weights).expanduser().is_file():
            tags = open_clip.list_pretrained_tags_by_model(self.model)
            raise TemperaError(
                f"{self.weights} is neither a file nor a tag of open_clip's {self.model}: give a "
                + (f"file, or one of {', '.join(tags)}." if tags else "file, as it has no tags.")
            )
        return (WeightsFile(self.weights, _NAMES),)

    @property
    def _tag(self) -> dict[str, Any]:
        """open_clip's entry for the weights; empty for a file."""
        tag: dict[str, Any] = import_open_clip().get_pretrained_cfg(self.model, self.weights or "")
        return tag

    def network(self) -> nn.Module:
        """The network with its weights, on the CPU.

        Raises:
            TemperaError: they are the weights of another model.
        """
        open_clip = import_open_clip()
        *config, weights = (file.path() for file in self.files)
        name = f"local-dir:{config[0].parent}" if config else self.model
        quick = not config and (
            self._tag.get("quick_gelu", False) or "openai" in str(weights.resolve()).lower()
        )
        if not config:
            self._check_activation(weights, quick)

        state = {key.removeprefix("module."): one for key, one in read_tensors(weights).items()}
        network = filled(lambda: architecture(name, quick), state, weights, self.model)
        preprocess = {**network.visual.preprocess_cfg, **_preprocess_of(self._tag)}  # type: ignore[union-attr,dict-item]
        open_clip.model.set_model_preprocess_cfg(network, preprocess)
        return network

    def _check_activation(self, weights: Path, quick: bool) -> None:
        """Warn where weights and activation do not match.

        OpenAI's weights were trained with QuickGELU, but open_clip uses it only if the model's name
        ends in -quickgelu. Here these weights always get it.
        """
        named = import_open_clip().get_model_config(self.model)
        if quick and not named.get("quick_gelu", False):
            if not self._tag:
                print(f"warning: {weights} holds OpenAI's weights: computing with QuickGELU.")
        elif named.get("quick_gelu", False) and not quick:
            print(
                f"warning: {self.model} uses QuickGELU, but {self.weights} may have been trained "
                "without it: compare with the model of that name without -quickgelu."
            )

    def tools(self) -> tuple[nn.Module, Tokenizer, Preprocess]:
        """The network, its tokenizer (texts → ids [B, T]) and its preprocessing (PIL image →
        [3, h, w]).
        """
        open_clip = import_open_clip()
        network, files = self.network(), self.files
        config = open_clip.transform.PreprocessCfg(**network.visual.preprocess_cfg)  # type: ignore[union-attr,arg-type]
        name = f"local-dir:{files[0].path().parent}" if len(files) > 1 else self.model
        return (
            network,
            open_clip.get_tokenizer(name),
            open_clip.transform.image_transform_v2(config, is_train=False),
        )


def architecture(name: str, quick_gelu: bool = False) -> nn.Module:
    """A network of open_clip on the meta device."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns that no weights are loaded
    try:
        made: nn.Module = import_open_clip().create_model(
            name,
            load_weights=False,
            pretrained_text=False,
            force_quick_gelu=quick_gelu,
            device="meta",
        )
    finally:
        logging.disable(before)
    return made


def preprocessed(pictures: Tensor, preprocess: Preprocess) -> Tensor:
    """Pictures uint8 [B, 3, h, w] → a network's input [B, 3, h', w'], one by one through Pillow."""
    return torch.stack(
        [
            preprocess(Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()))
            for picture in pictures
        ]
    )


def _preprocess_of(tag: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tag[name] for name in ("mean", "std", "interpolation", "resize_mode") if name in tag
    }
