"""Images in three lines of Python: `generate`, and `load` for many calls with one model.

Both take the groups and options of `conf/generate.yaml`, as the command line does, and refuse a
wrong one in the same sentence.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from tempera.config.compose import composed, in_one_sentence, written
from tempera.config.instantiate import fitting
from tempera.config.parts import Parts
from tempera.continuous.loop import ContinuousRound
from tempera.data.prompts import Prompt, one_prompt, pictured, warnings_of
from tempera.decoding.interfaces import (
    Drafter,
    ImageTarget,
    Round,
    Rule,
    Target,
)
from tempera.decoding.loop import Output
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trace import Trace
from tempera.errors import TemperaError, shown
from tempera.evaluation.pipeline import ImageDecoder, Method, NoPictures, Pipeline, watchers
from tempera.runtime.processor import Placement
from tempera.runtime.torch_modes import usual_modes
from tempera.runtime.turns import Turns


@dataclass(frozen=True)
class Result:
    """Generated images and their trace; P prompts, T tokens per image.

    Attributes:
        prompts: the texts, in the order given.
        tokens: on the CPU; int64 [P, T], or float32 [P, T, D] of a model of continuous tokens.
        trace: token by token, one row per prompt: accepted or not, at what depth, how probable.
        seconds: wall-clock time of decoding all of them, without the image decoder.
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
        return pil_images(self.pixels)

    @property
    def accepted_length(self) -> float:
        """Tokens ÷ rounds, over all images; 1 for plain autoregression."""
        return self.trace.step.numel() / int(self.trace.rounds.sum())

    @property
    def tau(self) -> float:
        """Accepted drafted tokens ÷ rounds, over all images (the papers' τ)."""
        return int(self.trace.accepted.sum()) / int(self.trace.rounds.sum())

    def __repr__(self) -> str:
        """The numbers without the tensors."""
        return f"Result({len(self.prompts)} images, accepted_length={self.accepted_length:.2f})"


def pil_images(pixels: Tensor) -> list[Image.Image]:
    """Pictures uint8 [B, 3, H, W] as PIL images."""
    return [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels]


class LoadedModel:
    """A model with a method, in memory; made by `tempera.load`. A batch uses the model's caches
    alone: calls of `generate` from several threads take turns, and while `rounds` are not at their
    end other calls are refused.

    Attributes:
        turns: whose turn it is.
    """

    def __init__(self, cfg: DictConfig, custom: "CustomParts", images: int | None = None) -> None:
        objects = "rule, drafter and target can be objects with discrete tokens"
        parts = Parts.of(cfg, discrete="" if custom == CustomParts() else objects)
        rule = parts.rule()
        if custom.rule is not None:
            rule = custom.rule
            parts.check_rule(rule)
        if parts.shrinks:
            raise TemperaError(
                "batch_size=auto is not possible here: give a number", option="batch_size"
            )
        self.turns = Turns()
        self._captions = parts.captions() if custom.target is None else None
        target = custom.made(parts.sampling)
        if target is None:
            target = parts.fast_target(images)
        else:
            parts = replace(parts, placement=custom.placement(target, parts.placement))
        self.pipeline: Pipeline = custom.with_placement(
            parts.pipeline(target, rule, custom.decoder)
        )
        self.model: str = parts.model
        self.method: str = cfg.choices.method
        self.batch_size = parts.batch_size
        self.diagnostics: bool = fitting(cfg.diagnostics, bool, "diagnostics")

    @property
    def batch_size(self) -> int:
        """How many prompts are decoded together; setting it to less than 1 raises TemperaError."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise TemperaError(
                f"batch_size={shown(size)} is not valid: give a whole number above 0",
                option="batch_size",
            )
        self._batch_size = size

    def __repr__(self) -> str:
        """What it is made of."""
        pipeline = self.pipeline
        lines, columns = pipeline.target.grid
        rule = getattr(pipeline.method, "rule", None)
        dtype = str(pipeline.target.dtype).removeprefix("torch.")
        parts = [
            f"model={self.model!r}",
            f"method={self.method!r}",
            *([] if rule is None else [f"rule={rule!r}"]),
            f"{lines}×{columns} tokens",
            f"{dtype} on {pipeline.device}",
            f"batch_size={self.batch_size}",
        ]
        return f"LoadedModel({', '.join(parts)})"

    @usual_modes()
    def generate(
        self,
        prompts: str | Sequence[str],
        seed: int | Sequence[int] | torch.Generator = 0,
        *,
        num_images: int = 1,
        image: Any = None,
        guidance: float | None = None,
        images: bool = True,
        progress: Callable[[int], object] | None = None,
        callback: Callable[..., object] | None = None,
        **unknown: Any,
    ) -> Result:
        """Images of prompts; see `tempera.generate`.

        Args:
            prompts: a text or several.
            image: a picture for all prompts, or a list: of the pictures of the only prompt, or of a
                picture or a list of them for each prompt. For models whose prompts have pictures
                (docs/accelerate.md).
            seed: of the random draws; or a seed for each image, which is then the image of its
                prompt and its seed alone; or a generator that one seed is drawn from.
            num_images: images of every prompt, which follow each other.
            guidance: in place of the model's.
            images: whether to make pictures; otherwise `Result.images` is empty.
            progress: called after every round with the number of its tokens, over all images.
            callback: called after every round with the round, see `rounds`.
            unknown: refused.

        Raises:
            TemperaError: an argument is not possible.
        """
        for name in unknown:
            raise TemperaError(
                f"`{name}` is not an argument of generate: options of the model and its method are "
                "arguments of tempera.load",
                option=name,
            )
        named, seeds = seeded_prompts(prompts, seed, num_images)
        named = self._pictured(named, image, num_images)
        check_callable(progress=progress, callback=callback)
        with self.turns.taken(), self._guided(guidance):
            return self._generate(named, seeds, progress, callback, images)

    def rounds(
        self,
        prompts: str | Sequence[str],
        seed: int | Sequence[int] | torch.Generator = 0,
    ) -> Iterator[Round | ContinuousRound]:
        """The images of prompts round by round, all in one batch; those of `generate`. Any thread
        may ask for the next round, as the threads of a web server do, or close the generator.

        Args:
            prompts, seed: see `generate`.

        Yields:
            each round, which is valid until the next one is asked for; `pictures(round.tokens)`
            shows its images.

        Raises:
            TemperaError: an argument is not possible.

        >>> import tempera
        >>> loaded = tempera.load(method="eagle")
        >>> for round in loaded.rounds("a small red ring"):
        ...     pass
        >>> round.sequences.complete
        True
        """
        named, seeds = seeded_prompts(prompts, seed)
        pipeline = self.pipeline
        target: Any = pipeline.target
        texts = [prompt.text for prompt in named]
        with self.turns.taken(rounds=True), ExitStack() as stack:
            with usual_modes():
                stack.enter_context(pipeline.text_encoded(named))
                streams = pipeline.streams(named, seeds)
            rounds: Iterator[Any] = pipeline.method.rounds(target, streams, texts)
            while True:
                with usual_modes():  # and the caller's between two rounds
                    round = next(rounds, None)
                if round is None:
                    return
                yield round

    @usual_modes()
    def pictures(self, tokens: Tensor, prompts: Sequence[str] = ()) -> list[Image.Image]:
        """Pictures of tokens, int64 [B, T], or float32 [B, T, D] of a model of continuous tokens;
        `prompts` are their texts, for an image decoder that reads them.
        """
        return pil_images(torch.from_numpy(self.pipeline.pictures(tokens, prompts)))

    def _pictured(self, prompts: list[Prompt], image: Any, copies: int) -> list[Prompt]:
        """Prompts, `copies` of each in a row, with their pictures; see `prompts.pictured`.

        Raises:
            TemperaError: this model's prompts have none.
        """
        if image is None:
            return prompts
        if not getattr(self.pipeline.target, "reads_pictures", False):
            raise TemperaError(
                "this model does not read pictures in prompts: leave image= out, or use a "
                "GLM-Image with tempera.accelerate(..., image_prompts=True)",
                option="image",
            )
        return pictured(prompts, image, copies)

    @contextmanager
    def _guided(self, guidance: Any) -> Iterator[None]:
        """Another guidance inside the `with` block."""
        if guidance is None:
            yield
            return
        target: Any = self.pipeline.target
        usual = getattr(target, "sampling", None)
        if usual is None or not isinstance(usual, Sampling):  # a MAR's draft has its own
            raise TemperaError(
                f"model={self.model} cannot change its guidance after loading: load it with "
                f"guidance={guidance}",
                option="guidance",
            )
        if isinstance(guidance, bool) or not isinstance(guidance, Real):
            raise TemperaError(
                f"guidance={shown(guidance)} is not valid: give a number (1 is no guidance)",
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
        seeds: Sequence[int],
        progress: Callable[[int], object] | None = None,
        callback: Callable[..., object] | None = None,
        images: bool = True,
    ) -> Result:
        pipeline = self.pipeline
        decoder = pipeline.image_decoder
        if images and isinstance(decoder, NoPictures):
            raise decoder.refusal
        for line in warnings_of(prompts, self._captions):
            warnings.warn(line, stacklevel=3)
        watch = watchers(progress, callback)
        decoded = pipeline.decoded(
            prompts, self.batch_size, seeds=seeds, diagnostics=self.diagnostics, watch=watch
        )
        seconds = 0.0
        groups = []
        for done in decoded:
            seconds += sum(done.seconds)
            groups.append((done.indices, done.output.cpu()))
        output = Output.collected(groups)
        texts = tuple(prompt.text for prompt in prompts)
        if images:
            pixels = pipeline.pictures(output.tokens, texts)
        else:
            pixels = np.zeros((0, 3, 0, 0), np.uint8)
        return Result(
            prompts=tuple(map(str, texts)),  # without their pictures
            tokens=output.tokens,
            trace=output.trace,
            seconds=seconds,
            pixels=torch.from_numpy(pixels),
        )

    def __deepcopy__(self, memo: object) -> "LoadedModel":
        raise TemperaError("a loaded model cannot be copied: call tempera.load again")


@dataclass(frozen=True)
class CustomParts:
    """Objects of the caller's in place of what the configuration names, else None.

    Attributes:
        rule, drafter, target, decoder: see `load`.
    """

    rule: Rule | None = None
    drafter: Drafter | Callable[[Any], Drafter] | None = None
    target: Any = None
    decoder: ImageDecoder | None = None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise TemperaError for an object that is not what it is given as, and for options that a
        target has already.
        """
        drafts = self.drafter is None or isinstance(self.drafter, Drafter) or callable(self.drafter)
        for name, fits, wanted in (
            ("rule", isinstance(self.rule, Rule | None), "tempera.Rule"),
            ("drafter", drafts, "tempera.Drafter, or a function that makes one from the target"),
            (
                "target",
                self.target is None or isinstance(self.target, Target) or callable(self.target),
                "tempera.Target, or a function that makes one from the sampling options",
            ),
        ):
            if not fits:
                raise TemperaError(
                    f"{name}={shown(getattr(self, name))} is not valid: give a {wanted}",
                    option=name,
                )
        if self.target is not None:
            self._check_options(options)

    def without_draft(self, method: str | None) -> str:
        """The method beside a drafter of the caller's: one that drafts nothing itself.

        Raises:
            TemperaError: the caller named another.
        """
        if method not in (None, "ar"):
            raise TemperaError(
                f"a custom drafter replaces method={method}: leave one of them out",
                option="drafter",
            )
        return "ar"

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TemperaError for options that the target or the decoder has already."""
        own = {"device", "dtype", "weights_dtype", "compile", "truncate", "image_size"}
        if isinstance(self.target, Target):
            own |= {field.name for field in fields(Sampling)}
        if self.decoder is not None:
            own |= {"weights"}
        for name in options:
            of_the_model = name.startswith("model.") and (
                self.decoder is not None or not name.startswith("model.tokenizer")
            )
            if name in own or of_the_model:
                raise TemperaError(
                    f"the target has its own {name}: leave the option out", option=name
                )

    def made(self, sampling: Any) -> Any:
        """The caller's target, or None.

        Raises:
            TemperaError: it makes no pictures.
        """
        target: Any = self.target
        if target is None:
            return None
        if not isinstance(target, Target):
            target = target(sampling)
        lacking = [name for name in ("grid", "dtype", "encoded") if not hasattr(target, name)]
        if lacking:
            raise TemperaError(
                f"a target that makes pictures needs `{lacking[0]}`: add it (see "
                "tempera.decoding.interfaces.ImageTarget), or call tempera.decode, which makes "
                "none",
                option="target",
            )
        return target

    def placement(self, target: Any, usual: Placement) -> Placement:
        """Where the parts beside the caller's target are to be: with it, if it says where it is."""
        device = getattr(target, "device", None)
        return usual if device is None else Placement(device, target.dtype)

    def with_placement(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with the caller's drafter.

        Raises:
            TemperaError: it is none, or drafts more tokens than an image has, or the target's
                tokens are not those of the image decoder.
        """
        target: Any = pipeline.target
        codes = getattr(pipeline.image_decoder, "vocab_size", None)
        if self.target is not None and codes not in (None, target.vocab_size):
            raise TemperaError(
                f"the target has a vocabulary of {target.vocab_size:,} tokens, but the image "
                f"decoder has {codes:,} codes: set model= to the model whose pictures the target "
                "generates",
                option="target",
            )
        if self.drafter is None:
            return pipeline
        drafter = self.drafter if isinstance(self.drafter, Drafter) else self.drafter(target)
        if not isinstance(drafter, Drafter):
            raise TemperaError(
                f"the function drafter= returned {shown(drafter)}: it must return a "
                "tempera.Drafter",
                option="drafter",
            )
        if drafter.depth > target.length:
            raise TemperaError(
                f"the drafter drafts {drafter.depth} tokens in a row, but an image has only "
                f"{target.length}: reduce its depth",
                option="drafter",
            )
        method: Any = pipeline.method
        return replace(pipeline, method=Method(drafter, method.rule))


@usual_modes()
def load(
    model: str = "shapes",
    method: str | None = None,
    *,
    rule: str | Rule | None = None,
    drafter: str | Drafter | Callable[[Any], Drafter] | None = None,
    target: ImageTarget | Callable[[Any], ImageTarget] | None = None,
    decoder: ImageDecoder | None = None,
    **options: Any,
) -> LoadedModel:
    """Load a model with a method, for many calls of `generate`.

    Args:
        model: a name of `conf/model/`.
        method: a name of `conf/method/`, by default an exact one, as `conf/family/` says.
        rule: a name of `conf/rule/`, or an object such as `tempera.Relaxed(...)`, in place of the
            method's.
        drafter: a name of `conf/drafter/`; or an object, or a function that makes one of the
            target, in place of a method: the rule is then exact unless you give another.
        target: an object, or a function that makes one of the sampling, in place of the model's,
            whose image decoder makes the pictures.
        decoder: makes the pictures of a `target`, in place of the model's image decoder.
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
    objects = {"rule": rule, "drafter": drafter, "target": target, "decoder": decoder}
    return _loaded(model, method, options | objects)


def _loaded(
    model: str, method: str | None, options: dict[str, Any], images: int | None = None
) -> LoadedModel:
    """`load` with objects among the options, for a number of images if that is known."""
    objects = {name: options.pop(name, None) for name in ("rule", "drafter", "target", "decoder")}
    for name in ("rule", "drafter"):
        if isinstance(objects[name], str):
            options[name] = objects.pop(name)
    custom = CustomParts(**objects)
    custom.check(options)
    if custom.drafter is not None:
        method = custom.without_draft(method)
    if custom.rule is not None:
        options["rule"] = "exact"  # so that options of the method's rule are refused
    _check_names(options)
    if method is not None:
        options["method"] = method
    all_options = {"diagnostics": False, "model": model, **options}
    arguments = [written(name, value) for name, value in all_options.items()]
    cfg = composed("generate", arguments)
    with in_one_sentence("generate", arguments):
        return LoadedModel(cfg, custom, images)


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise TemperaError for options of the command line that have no meaning in Python."""
    for name in options:
        if name == "seed" or name.startswith("hydra"):
            raise TemperaError(
                f"`{name}` is not an option of tempera.load, which writes no files: leave it out, "
                "and give seed= to generate",
                option=name,
            )


@usual_modes()
def generate(
    prompts: str | Sequence[str],
    model: str = "shapes",
    method: str | None = None,
    seed: int | Sequence[int] | torch.Generator = 0,
    *,
    num_images: int = 1,
    progress: Callable[[int], object] | None = None,
    callback: Callable[..., object] | None = None,
    **options: Any,
) -> Result:
    """Generate images of prompts.

    An image depends on its prompt and the seed alone, not on the other prompts: it is the one of
    `tempera-eval prompt=TEXT seed=SEED`, which puts a text on one line; here its white space is the
    model's to read. Equal prompts of one call get different images.

    Args:
        prompts: a text or several; for a class-conditional model class numbers, `207` or `"207"`.
        model: a name of `conf/model/`.
        method: a name of `conf/method/`, by default an exact one, as `conf/family/` says.
        seed, num_images, progress, callback: see `LoadedModel.generate`.
        options: as of `tempera.load`, objects too.

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
    named, seeds = seeded_prompts(prompts, seed, num_images)  # refused before weights are read
    check_callable(progress=progress, callback=callback)
    loaded = _loaded(model, method, options, len(named))
    return loaded._generate(named, seeds, progress, callback)


def seeded_prompts(prompts: Any, seed: Any, images: Any = 1) -> tuple[list[Prompt], list[int]]:
    """The prompts as of `named_prompts`, and a seed for each. Where every image has its own seed,
    repeated texts are not numbered.

    Raises:
        TemperaError: also for seeds that are not one for each image, or twice the same of a prompt.
    """
    named = named_prompts(prompts, images)
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    if isinstance(seed, str | bytes | Mapping) or not isinstance(seed, Iterable):
        return named, [whole_seed(seed)] * len(named)
    seeds = [whole_seed(number) for number in seed]
    if len(seeds) != len(named):
        raise TemperaError(
            f"there are {len(seeds)} seeds for {len(named)} images: give one seed, or one per image"
        )
    named = [_prompt(prompt.text) for prompt in named]
    ids = [prompt.id for prompt in named]
    ((_, repeated), count) = Counter(zip(ids, seeds, strict=True)).most_common(1)[0]
    if count > 1:
        raise TemperaError(
            f"{count} images of one prompt have the seed {repeated} and would be the same: give "
            "each its own seed seed seed seed"
        )
    return named, seeds


def check_callable(**functions: Any) -> None:
    """Raise TemperaError for what cannot be called, besides None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TemperaError(f"{name}={shown(function)} is not valid: give a function")


def named_prompts(prompts: Any, images: Any = 1) -> list[Prompt]:
    """The prompts under the ids that the command line gives them, each as often as it has images;
    repeated texts are numbered. The numbers of classes may be given as numbers.

    Raises:
        TemperaError: something is neither a text nor a number, or there is nothing.
    """
    if isinstance(images, bool) or not isinstance(images, Integral) or images < 1:
        raise TemperaError(f"num_images={images} is not valid: give 1 or more")
    single = isinstance(prompts, str | Integral)
    if isinstance(prompts, Mapping | Set | bytes) or not (single or isinstance(prompts, Iterable)):
        raise _no_prompt(prompts)
    named = []
    numbers = Counter[str]()
    for text in [prompts] if single else prompts:
        if isinstance(text, bool) or not isinstance(text, str | Integral):
            raise _no_prompt(text)
        prompt = _prompt(str(text))
        for _ in range(images):
            number = numbers[prompt.id]
            numbers[prompt.id] += 1
            named.append(Prompt(f"{prompt.id}-{number}", prompt.text) if number else prompt)
    if not named:
        raise TemperaError("there are no prompts: give at least one")
    return named


def _prompt(text: str) -> Prompt:
    """A text with its white space, under the id that the command line gives it, which puts it on
    one line.
    """
    (prompt,) = one_prompt(text)
    return replace(prompt, text=text)


def _no_prompt(value: Any) -> TemperaError:
    """The error for a value that is no prompt."""
    return TemperaError(
        f"{shown(value)} is not a prompt: give a text or a list of texts, as in "
        'generate("a large green star"), or a class number'
    )


def whole_seed(seed: Any) -> int:
    """The seed as an int.

    Raises:
        TemperaError: it is not a whole number below 2⁶³.
    """
    if not isinstance(seed, bool) and isinstance(seed, Integral) and abs(int(seed)) < 2**63:
        return int(seed)
    raise TemperaError(f"seed={shown(seed)} is not valid: give a whole number")
