"""Images in three lines of Python: `generate`, and `load` for many calls with one model.

Both take the groups and options of `conf/eval.yaml`, as the command line does, and refuse a wrong
one in the same sentence.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from tempera.config import build
from tempera.config.compose import composed, in_one_sentence, written
from tempera.config.instantiate import check_value
from tempera.data.prompts import Prompt, one_prompt
from tempera.decoding.trace import Trace, joined
from tempera.errors import TemperaError, shortened
from tempera.evaluation.pipeline import Pipeline

NOT_HERE = {
    "choices": "an option of evaluations alone",
    "data": "an option of evaluations: prompts are the first argument here",
    "dry_run": "an option of evaluations alone",
    "directory": "an option of evaluations: nothing is written here",
    "experiment": "for sweeps of evaluations",
    "hydra": "for the command line",
    "launcher": "for sweeps of evaluations",
    "limit": "an option of evaluations: prompts are the first argument here",
    "matching": "an option of evaluations: lengths are not matched here",
    "metrics": "an option of evaluations: images are not evaluated here",
    "offset": "an option of evaluations: prompts are the first argument here",
    "overrides": "an option of evaluations alone",
    "paper": "for sweeps of evaluations",
    "plan": "an option of evaluations alone",
    "prompt": "an option of evaluations: prompts are the first argument here",
    "replays": "an option of evaluations: nothing is written here",
    "seed": "an argument of `generate`",
    "speed": "an option of evaluations: `Result.speed` is always there",
    "tracking": "an option of evaluations: nothing is tracked here",
}


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

    @property
    def speed(self) -> float:
        """Images per second of decoding: `len(images) / seconds`. The first call on a device also
        pays for its warm-up; for comparisons see `speed` in the command line's evaluation.
        """
        return len(self.prompts) / self.seconds

    def __repr__(self) -> str:
        """The numbers without the tensors."""
        return (
            f"Result({len(self.prompts)} images, accepted_length={self.accepted_length:.2f}, "
            f"tau={self.tau:.2f}, speed={self.speed:.3g} images/s)"
        )


class LoadedModel:
    """A model with a method, in memory; made by `tempera.load`."""

    def __init__(self, cfg: DictConfig) -> None:
        build.check_method(cfg)
        build.check_compile(cfg)
        build.check_length(cfg)
        for name, kind in (("batch_size", int), ("diagnostics", bool)):
            check_value(cfg, name, cfg[name], kind)
        if cfg.batch_size < 1:
            raise TemperaError(f"batch_size={cfg.batch_size} is too small: give at least 1.")
        target = build.build_fast_target(cfg)
        self.pipeline: Pipeline = build.build_pipeline(cfg, target)
        self.batch_size: int = cfg.batch_size
        self.diagnostics: bool = cfg.diagnostics

    def generate(self, prompts: str | Sequence[str], seed: int = 0) -> Result:
        """One image per prompt; see `tempera.generate`."""
        named = _named(_texts(prompts))
        pipeline = replace(self.pipeline, seed=_whole(seed))
        batches = [
            named[first : first + self.batch_size]
            for first in range(0, len(named), self.batch_size)
        ]
        outputs, seconds = [], 0.0
        for batch in batches:
            with pipeline.text_encoded(batch):
                start = pipeline.now()
                outputs.append(pipeline.tokens(batch, diagnostics=self.diagnostics))
                seconds += pipeline.now() - start
        pictures = [torch.from_numpy(pipeline.pictures(output.tokens)) for output in outputs]
        return Result(
            prompts=tuple(prompt.text for prompt in named),
            tokens=torch.cat([output.tokens.cpu() for output in outputs]),
            trace=joined([output.trace.cpu() for output in outputs]),
            seconds=seconds,
            pixels=torch.cat(pictures),
        )


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
    >>> [image.size for image in two.images]
    [(48, 48), (48, 48)]
    >>> two.tokens.shape
    torch.Size([2, 144])
    """
    arguments = _arguments({"model": model, "method": method, **options})
    cfg = composed("eval", arguments)
    with in_one_sentence("eval", arguments):
        return LoadedModel(cfg)


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
    texts, seed = _texts(prompts), _whole(seed)  # refused before weights are read
    return load(model, method, **options).generate(texts, seed)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """The options as on the command line; diagnostics, which cost time, only where asked for."""
    for name in options:
        if reason := NOT_HERE.get(name.partition(".")[0]):
            raise TemperaError(f"`{name}` is {reason}; leave it out")
    return [written(*option) for option in {"diagnostics": False, **options}.items()]


def _texts(prompts: Any) -> list[str]:
    """The prompts as a list of texts; class numbers may be given as numbers.

    Raises:
        TemperaError: they are something else, or there are none.
    """
    single = isinstance(prompts, str | Integral)
    unordered = isinstance(prompts, Mapping | Set | bytes)
    texts = [prompts] if single else prompts
    if unordered or not isinstance(texts, Iterable):
        raise _no_prompt(prompts)
    texts = list(texts)
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | Integral) or not _is_utf8(text):
            raise _no_prompt(text)
    if not texts:
        raise TemperaError("there are no prompts: give at least one text")
    return [str(text) for text in texts]


def _is_utf8(text: Any) -> bool:
    """Whether a text can be stored; lone surrogates cannot."""
    return str(text).isascii() or str(text).encode(errors="ignore").decode() == str(text)


def _no_prompt(given: Any) -> TemperaError:
    return TemperaError(
        f"{shortened(repr(given))} is no prompt: give a text or a list of texts, as in "
        'generate("a large green star"), or the number of a class'
    )


def _whole(seed: Any) -> int:
    """The seed as an int."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TemperaError(
            f"seed={shortened(repr(seed))} is not possible; it must be a whole number"
        )
    return int(seed)


def _named(texts: Sequence[str]) -> list[Prompt]:
    """Prompts under the ids that the command line gives them; repeated texts are numbered."""
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for text in texts:
        (prompt,) = one_prompt(text)
        again = seen[prompt.id] = seen.get(prompt.id, -1) + 1
        prompts.append(Prompt(f"{prompt.id}-{again}", prompt.text) if again else prompt)
    return prompts
