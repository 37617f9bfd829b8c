"""Images in three lines of Python: `generate`, and `load` for many calls with one model.

Both take the groups and options of `conf/generate.yaml`, as the command line does, and refuse a
wrong one in the same sentence.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from threading import Lock
from typing import Any

import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from tempera.config import build
from tempera.config.compose import composed, in_one_sentence, written
from tempera.data.prompts import Prompt, one_prompt, warnings_of
from tempera.decoding.trace import Trace, joined
from tempera.errors import TemperaError, shown
from tempera.evaluation.pipeline import Pipeline


@dataclass(frozen=True)
class Result:
    """Generated images and their trace; P prompts, T tokens per image.

    Attributes:
        prompts: the texts, in the order given.
        tokens: on the CPU; int64 [P, T], or float32 [P, T, D] of a model of continuous tokens.
        trace: token by token, one row per prompt: accepted or not, at what depth, how probable.
        seconds: wall-clock time of decoding all of them, without text encoder and image decoder.
        pixels: uint8 [P, 3, H, W].
    """

    prompts: tuple[str, ...]
    tokens: Tensor
    trace: Trace
    seconds: float
    pixels: Tensor

    @cached_property
    def images(self) -> list[Image.Image]:
        """One PIL image per prompt."""
        return [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in self.pixels]

    @property
    def accepted_length(self) -> float:
        """Tokens ÷ rounds, over all images; 1 for plain autoregression."""
        return self.trace.place.numel() / int(self.trace.rounds.sum())

    @property
    def tau(self) -> float:
        """Accepted drafted tokens ÷ rounds, over all images (the papers' τ)."""
        return int(self.trace.accepted.sum()) / int(self.trace.rounds.sum())

    def __repr__(self) -> str:
        """The numbers without the tensors."""
        return f"Result({len(self.prompts)} images, accepted_length={self.accepted_length:.2f})"


class LoadedModel:
    """A model with a method, in memory; made by `tempera.load`. Calls from several threads take
    turns: a batch uses the model's caches alone.
    """

    def __init__(self, cfg: DictConfig, method: str) -> None:
        rule = build.build_rule(cfg)
        if cfg.batch_size == "auto":
            raise TemperaError("give batch_size a number here", option="batch_size")
        self._lock = Lock()
        self._captions = build.build_captions(cfg)
        target = build.build_fast_target(cfg)
        self.pipeline: Pipeline = build.build_pipeline(cfg, target, rule)
        self.model: str = cfg.model.name
        self.method: str = method
        self.batch_size = cfg.batch_size
        self.diagnostics: bool = cfg.diagnostics

    @property
    def batch_size(self) -> int:
        """How many prompts are decoded together."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise TemperaError(
                f"batch_size={shown(size)} is not possible: give a whole number above 0",
                option="batch_size",
            )
        self._batch_size = size

    def __repr__(self) -> str:
        """What it is made of."""
        return f"LoadedModel(model={self.model!r}, method={self.method!r}, {self.pipeline.device})"

    def generate(
        self,
        prompts: str | Sequence[str],
        seed: int | torch.Generator = 0,
        *,
        num_images: int = 1,
        guidance: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Result:
        """Images of prompts; see `tempera.generate`.

        Args:
            prompts: a text or several.
            seed: of the random draws, or a generator that it is drawn from.
            num_images: images of every prompt, which follow each other.
            guidance: in place of the model's.
            progress: called after every round with the number of its tokens, over all images.

        Raises:
            TemperaError: an argument is not possible.
        """
        named = named_prompts(prompts, num_images)
        if isinstance(seed, torch.Generator):
            seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
        with self._lock, self._guided(guidance):
            return self._generate(named, whole_seed(seed), progress)

    @contextmanager
    def _guided(self, guidance: float | None) -> Iterator[None]:
        """Another guidance inside the `with` block."""
        if guidance is None:
            yield
            return
        target: Any = self.pipeline.target
        usual = getattr(target, "sampling", None)
        if usual is None:
            raise TemperaError(
                f"model={self.model} takes no other guidance in memory: load it with "
                f"guidance={guidance}",
                option="guidance",
            )
        target.sampling = replace(usual, guidance=float(guidance))
        try:
            yield
        finally:
            target.sampling = usual

    def _generate(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        progress: Callable[[int], object] | None = None,
    ) -> Result:
        pipeline, size = replace(self.pipeline, seed=seed), self.batch_size
        for line in warnings_of(prompts, self._captions):
            warnings.warn(line, stacklevel=3)
        outputs, seconds = [], 0.0
        for batch in (prompts[first : first + size] for first in range(0, len(prompts), size)):
            with pipeline.text_encoded(batch):
                start = pipeline.now()
                outputs.append(
                    pipeline.tokens(batch, diagnostics=self.diagnostics, progress=progress)
                )
                seconds += pipeline.now() - start
        pictures = [torch.from_numpy(pipeline.pictures(output.tokens)) for output in outputs]
        return Result(
            prompts=tuple(prompt.text for prompt in prompts),
            tokens=torch.cat([output.tokens.cpu() for output in outputs]),
            trace=joined([output.trace.cpu() for output in outputs]),
            seconds=seconds,
            pixels=torch.cat(pictures),
        )

    def __deepcopy__(self, memo: object) -> "LoadedModel":
        raise TemperaError("a loaded model cannot be copied: call tempera.load again")


def load(model: str = "shapes", method: str = "coolsd", **options: Any) -> LoadedModel:
    """Load a model with a method, for many calls of `generate`.

    Args:
        model: a name of `conf/model/`.
        method: a name of `conf/method/`.
        options: options of the command line, such as `delta=2`, `device="cuda"` or `batch_size=4`;
            nested ones as `**{"drafter.path": "my_draft"}`.

    Raises:
        TemperaError: no such model, method or option, or weights that do not fit.

    >>> import tempera
    >>> loaded = tempera.load(model="shapes", method="eagle")
    >>> two = loaded.generate(["a small red ring", "a large blue square"], seed=1)
    >>> len(two.images), two.images[0].size
    (2, (48, 48))
    >>> two.tokens.shape
    torch.Size([2, 144])
    """
    for name in options:
        if name == "seed" or name.startswith("hydra"):
            raise TemperaError(
                f"`{name}` is not an option here: a seed is an argument of generate, and no files "
                "are written",
                option=name,
            )
    given = {"diagnostics": False, "model": model, "method": method, **options}
    arguments = [written(*option) for option in given.items()]
    cfg = composed("generate", arguments)
    with in_one_sentence("generate", arguments):
        return LoadedModel(cfg, method)


def generate(
    prompts: str | Sequence[str],
    model: str = "shapes",
    method: str = "coolsd",
    seed: int = 0,
    **options: Any,
) -> Result:
    """Generate one image per prompt.

    An image depends on its prompt and the seed alone, not on the other prompts: it is the one of
    `tempera-eval prompt=TEXT seed=SEED`. Equal prompts of one call get different images.

    Args:
        prompts: a text or several; for a class-conditional model class numbers, `207` or `"207"`.
        model: a name of `conf/model/`.
        method: a name of `conf/method/`.
        seed: of the random draws.
        options: as of `tempera.load`.

    Raises:
        TemperaError: no such model, method or option, weights that do not fit, or an empty prompt.

    >>> import tempera
    >>> result = tempera.generate("a large green star", method="coolsd", delta=2, seed=0)
    >>> result.images[0].save("star.png")
    >>> result.accepted_length > 1.5
    True
    >>> tempera.generate("a large green star", method="eagle", delta=2)
    Traceback (most recent call last):
    tempera.errors.TemperaError: there is no option `delta` with method=eagle: it belongs to ...
    """
    named, seed = named_prompts(prompts), whole_seed(seed)  # refused before weights are read
    return load(model, method, **options)._generate(named, seed)


def named_prompts(prompts: Any, images: Any = 1) -> list[Prompt]:
    """The prompts under the ids that the command line gives them, each as often as it has images;
    repeated texts are numbered. The numbers of classes may be given as numbers.

    Raises:
        TemperaError: something is neither a text nor a number, or there is nothing.
    """
    if isinstance(images, bool) or not isinstance(images, Integral) or images < 1:
        raise TemperaError(f"num_images={images} is not possible: give 1 or more")
    single = isinstance(prompts, str | Integral)
    if isinstance(prompts, Mapping | Set | bytes) or not (single or isinstance(prompts, Iterable)):
        raise _no_prompt(prompts)
    named, seen = [], Counter[str]()
    for text in [prompts] if single else prompts:
        if isinstance(text, bool) or not isinstance(text, str | Integral):
            raise _no_prompt(text)
        (prompt,) = one_prompt(str(text))
        for _ in range(images):
            again = seen[prompt.id]
            seen[prompt.id] += 1
            named.append(Prompt(f"{prompt.id}-{again}", prompt.text) if again else prompt)
    if not named:
        raise TemperaError("there are no prompts: give at least one text")
    return named


def _no_prompt(given: Any) -> TemperaError:
    return TemperaError(
        f"{shown(given)} is not a prompt: give a text or a list of texts, as in "
        'generate("a large green star"), or the number of a class'
    )


def whole_seed(seed: Any) -> int:
    """The seed as an int."""
    if not isinstance(seed, bool) and isinstance(seed, Integral) and abs(int(seed)) < 2**63:
        return int(seed)
    raise TemperaError(f"seed={shown(seed)} is not possible: give a whole number")
