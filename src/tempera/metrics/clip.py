"""CLIP score, computed by any model that open_clip knows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Networks, Score
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, not_of
from tempera.runtime.files import reason
from tempera.runtime.tensor_files import check_values, read_tensors
from tempera.runtime.torchvision import import_open_clip

Tokenizer = Callable[[list[str]], Tensor]
Preprocess = Callable[[Any], Tensor]
NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


@dataclass(frozen=True)
class ClipScore(Adapter):
    """CLIP score: the cosine between the embeddings of picture and prompt.

    Args:
        model: name of an architecture (`ViT-B-32`), `hf-hub:owner/name` or `local-dir:DIRECTORY`;
            the last two include weights. LANTERN, LlamaGen and Cool-SD use OpenAI's ViT-B-32.
        weights: one of open_clip's tags for the architecture (`openai`), or a file.
        prefix: put before every prompt; LANTERN and LlamaGen use "A photo depicts ".
    """

    model: str = "ViT-B-32"
    weights: str | None = "openai"
    prefix: str = ""

    metrics = ("clip_score",)

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        """The model's configuration if it has one, then its weights."""
        scheme, _, place = self.model.rpartition(":")
        if scheme:
            return WeightsFile(place, ("open_clip_config.json",)), WeightsFile(place, NAMES)
        open_clip = import_open_clip()
        if self.model not in open_clip.list_models():
            raise TemperaError(
                f"{self.model} is not a model that open_clip knows: give one that "
                "open_clip.list_models() lists, or hf-hub:owner/name."
            )
        repository, _, name = self._tag.get("hf_hub", "").rpartition("/")
        if repository:
            return (WeightsFile(repository, (name,) if name else NAMES),)
        place = self._tag.get("url", self.weights or "")
        if not self._tag and not Path(place).expanduser().is_file():
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(self.model))
            raise TemperaError(
                f"{self.weights} is neither a file nor a tag of open_clip's {self.model}: give a "
                f"file or one of its tags ({tags or 'it has none'})."
            )
        return (WeightsFile(place, (place.rpartition("/")[2],)),)

    @property
    def _tag(self) -> dict[str, Any]:
        """open_clip's entry for the weights; empty for a file."""
        tag: dict[str, Any] = import_open_clip().get_pretrained_cfg(self.model, self.weights or "")
        return tag

    @property
    def _name(self) -> str:
        """The model as open_clip finds it without a network."""
        config, *weights = self.files
        return f"local-dir:{config.path().parent}" if weights else self.model

    @override
    def network(self) -> nn.Module:
        return load_open_clip(self._name, self.files[-1].path(), self.model, self._tag)

    @override
    def load(self, device: torch.device) -> Networks:
        open_clip, network = import_open_clip(), self.network()
        config = open_clip.transform.PreprocessCfg(**network.visual.preprocess_cfg)  # type: ignore[union-attr,arg-type]
        preprocess = open_clip.transform.image_transform_v2(config, is_train=False)
        tokenizer = open_clip.get_tokenizer(self._name)
        return Networks(scores=[clip_scorer(network, tokenizer, preprocess, device, self.prefix)])


def load_open_clip(
    name: str, weights: Path, what: str, tag: Mapping[str, Any] | None = None
) -> nn.Module:
    """A frozen network of open_clip on the CPU, loaded by open_clip itself.

    Args:
        name: an architecture, or `local-dir:DIRECTORY` with the weights.
        weights: their file. It is looked at first: no pickle or TorchScript program is run.
        what: the model, for errors.
        tag: open_clip's entry for the weights, which states preprocessing and activation. (By
            itself open_clip computes OpenAI's weights with the activation of the model's name.)

    Raises:
        TemperaError: the file is unreadable or holds the weights of another model.
    """
    values = read_tensors(weights)
    tables = (torch.int64, torch.bool)  # position ids and masks
    check_values({key: one for key, one in values.items() if one.dtype not in tables}, weights)
    local, tag = name.startswith("local-dir:"), tag or {}
    try:
        network: nn.Module = import_open_clip().create_model(
            name,
            None if local else str(weights),
            force_quick_gelu=tag.get("quick_gelu", False),
            force_preprocess_cfg=tag,
            pretrained_text=False,
        )
    except Exception as problem:  # whatever torch and open_clip raise on another model's file
        raise not_of(weights, what, reason(problem)) from None
    return network.eval().requires_grad_(False)


def preprocessed(pictures: Tensor, preprocess: Preprocess) -> Tensor:
    """Pictures uint8 [B, 3, h, w] → a network's input [B, 3, h', w'], one by one through Pillow."""
    arrays = pictures.permute(0, 2, 3, 1).cpu().numpy()
    return torch.stack([preprocess(Image.fromarray(array)) for array in arrays])


def clip_scorer(
    model: Any,
    tokenizer: Tokenizer,
    preprocess: Preprocess,
    device: torch.device,
    prefix: str = "",
) -> Score:
    """The score `clip_score` (Hessel et al. 2021) without its factor 2.5: the cosine between an
    open_clip model's embeddings of image and prompt.
    """
    model = model.to(device).eval()

    def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        images = preprocessed(pictures, preprocess).to(device)
        texts = tokenizer([prefix + prompt.text for prompt in prompts])
        image = normalize(model.encode_image(images).float(), dim=-1)
        text = normalize(model.encode_text(texts.to(device)).float(), dim=-1)
        return {"clip_score": (image * text).sum(-1)}

    return score
