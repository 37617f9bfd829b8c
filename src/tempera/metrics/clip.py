"""CLIP score, computed by any model that open_clip knows, and HPSv2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Networks, Score
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile, check_weights, not_of
from tempera.runtime.files import reason
from tempera.runtime.hub import Repository
from tempera.runtime.tensor_files import check_values

Tokenizer = Callable[[list[str]], Tensor]
Preprocess = Callable[[Any], Tensor]


HUB = "hf-hub:"
"""Before the name of a repository with weights and configuration."""


class OpenClip(NamedTuple):
    """A network of open_clip, and what makes its inputs."""

    network: Any
    preprocess: Preprocess
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ClipScore(Adapter):
    """CLIP score: the cosine between the embeddings of picture and prompt.

    Args:
        model: name of an architecture (`ViT-B-32`), `hf-hub:owner/name` or `local-dir:DIRECTORY`;
            the last two include weights. LANTERN, LlamaGen and Cool-SD use OpenAI's ViT-B-32.
        weights: one of open_clip's tags for the architecture (`openai`), or a file.
        prefix: put before every prompt; LANTERN and LlamaGen use "A photo depicts ".
        quick_gelu: the activation of weights in a file, which does not tell it: whether it is
            QuickGELU, as for OpenAI's and some of MetaCLIP's and DFN's. open_clip's tags say it
            themselves, in `open_clip.pretrained` (3.3.0).
    """

    model: str
    weights: str | None
    prefix: str = ""
    quick_gelu: bool | None = None

    metrics = ("clip_score",)
    name = "open_clip_model.safetensors"

    @property
    @override
    def files(self) -> tuple[WeightsFile, ...]:
        """The weights of an architecture; open_clip finds those of other places."""
        import open_clip  # takes seconds

        if ":" in self.model:
            return ()
        check_activation(self.model, self.weights, self.quick_gelu)
        tag = open_clip.get_pretrained_cfg(self.model, self.weights or "")
        repository, _, name = tag.get("hf_hub", "").rpartition("/")
        return (WeightsFile(repository or str(self.weights), name or self.name),)

    @override
    def fetch(self) -> None:
        super().fetch()
        hub = Repository.named(self.model.removeprefix(HUB))
        if self.model.startswith(HUB) and hub is not None:
            hub.snapshot([self.name, "*.json", "*.txt", "*.model"])  # the last are tokenizers

    @override
    def load(self, device: torch.device) -> Networks:
        network, preprocess, tokenizer = load_open_clip(
            self.model, self.weights, quick_gelu=self.quick_gelu
        )
        return Networks(scores=[clip_scorer(network, tokenizer, preprocess, device, self.prefix)])


@dataclass(frozen=True)
class HPS(Adapter):
    """HPSv2.1 (Wu et al. 2023), a CLIP ViT-H-14 trained on human preferences: 100 × the cosine
    between the embeddings of picture and prompt, as `hpsv2.evaluate` prints it. (`hpsv2.score`
    returns the cosine itself, and uses v2.0 by default.) The longer side of a picture is resized,
    and zeros fill the rest.

    Args:
        weights: HPS_v2.1_compressed.pt, its directory or a hub id; HPS_v2_compressed.pt gives v2.0.
        model: open_clip's name of the architecture.
    """

    weights: str
    model: str = "ViT-H-14"

    metrics = ("hpsv2",)
    name = "HPS_v2.1_compressed.pt"

    @override
    def load(self, device: torch.device) -> Networks:
        """See `Adapter.load`: pictures are fitted by their longer side, as hpsv2 does."""
        import open_clip  # takes seconds

        network, _, tokenizer = load_open_clip(
            self.model, str(self.files[0].path()), "HPSv2", False
        )
        preprocess = open_clip.image_transform(
            network.visual.image_size, is_train=False, resize_mode="longest"
        )
        clip_score = clip_scorer(network, tokenizer, preprocess, device)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            return {"hpsv2": 100 * clip_score(pictures, prompts)["clip_score"]}

        return Networks(scores=[score])


def load_open_clip(
    model: str, weights: str | None, what: str | None = None, quick_gelu: bool | None = None
) -> OpenClip:
    """A frozen network on the CPU, loaded by open_clip itself, which downloads what is missing.

    Args:
        model: see `ClipScore`, as the next.
        weights: a tag or a file. Of a pickle only tensors are read, and no program is run.
        what: what the weights should be, for errors; the model by default.
        quick_gelu: see `ClipScore`.

    Raises:
        TemperaError: they are unavailable or those of another model.
    """
    import open_clip  # takes seconds

    tag = open_clip.get_pretrained_cfg(model, weights or "")
    if weights and Path(weights).is_file():
        check_activation(model, weights, quick_gelu)
        check_weights(Path(weights))
    try:
        network, _, preprocess = open_clip.create_model_and_transforms(
            model,
            weights,
            # open_clip itself goes by the model's name, and computes OpenAI's weights otherwise
            force_quick_gelu=tag.get("quick_gelu", bool(quick_gelu)),
            pretrained_text=False,
            require_pretrained=True,
        )
        tokenizer = open_clip.get_tokenizer(model)
    except Exception as problem:  # whatever torch, open_clip and the hub raise
        raise not_of(weights or model, what or model, reason(problem)) from None
    check_values(dict(network.named_parameters()), weights or model)
    return OpenClip(network.eval().requires_grad_(False), preprocess, tokenizer)


def check_activation(model: str, weights: str | None, quick_gelu: bool | None) -> None:
    """Raise TemperaError for weights in a file without their activation, which no tensor shows, and
    for one that is given where open_clip states it: by the model's name, or for its own weights.
    """
    import open_clip  # takes seconds

    is_stated = _is_quick(model) or bool(open_clip.get_pretrained_cfg(model, weights or ""))
    if is_stated and quick_gelu is not None:
        raise TemperaError(
            f"open_clip already sets the activation of model={model} weights={weights}: leave "
            "quick_gelu out",
            option="quick_gelu",
        )
    if not is_stated and quick_gelu is None and weights and Path(weights).is_file():
        raise TemperaError(
            f"{weights} does not say which activation it was trained with: give quick_gelu=true or "
            "quick_gelu=false next to its path, as open_clip.pretrained lists it",
            option="quick_gelu",
        )


def _is_quick(model: str) -> bool:
    """Whether an architecture computes QuickGELU whatever its weights are."""
    import open_clip  # takes seconds

    known = model in open_clip.list_models()
    return known and bool(open_clip.get_model_config(model).get("quick_gelu"))


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
