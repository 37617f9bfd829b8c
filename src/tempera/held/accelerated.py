"""`tempera.accelerate`: images in fewer passes from a transformers model that is in memory.

Shapes: B prompts, T tokens of an image.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from tempera.api import Result, check_callable, seeded_prompts, whole_seed
from tempera.config.compose import composed, in_one_sentence, written
from tempera.config.parts import Parts
from tempera.decoding.interfaces import Rule
from tempera.decoding.loop import Output
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import now
from tempera.decoding.trace import joined
from tempera.errors import TemperaError, shown
from tempera.evaluation.pipeline import ImageDecoder, Method, observer
from tempera.held.chameleon import Chameleon, in_ids
from tempera.held.emu3 import Emu3
from tempera.held.family import Family, Request
from tempera.held.glm_image import GlmImage
from tempera.held.janus import Janus
from tempera.runtime import huggingface
from tempera.targets import chameleon
from tempera.targets.prompt_state import PromptConditioner
from tempera.targets.shared_vocabulary import PADDING
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget

FAMILIES: dict[str, type[Family]] = {
    "Emu3ForConditionalGeneration": Emu3,
    "JanusForConditionalGeneration": Janus,
    "ChameleonForConditionalGeneration": Chameleon,
    "GlmImageForConditionalGeneration": GlmImage,
}
OF_THE_MODEL = {
    "model",
    "weights",
    "device",
    "dtype",
    "compile",
    "batch_size",
    "seed",
    "truncate",
    "diagnostics",
    "image_size",
    "guidance",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
}
"""Options of `tempera.load` that say what a held model says itself, or an argument does."""


class Accelerated:
    """A model of transformers with a method; made by `accelerate`. Calls from several threads take
    turns.

    Attributes:
        method: name of the method.
    """

    def __init__(
        self,
        family: Family,
        method: str,
        options: dict[str, Any],
        rule: Rule | None,
        sampling: Sampling | None,
        decoder: ImageDecoder | None,
    ) -> None:
        self.family = family
        self.method = method
        self._sampling = sampling
        self._decoder = decoder or family.decoder()
        self._parts = _method(family.preset, method, options)
        self._rule: Any = rule or self._parts.rule()
        self._target: TransformerTarget | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        name = type(self.family.model).__name__
        return f"tempera.accelerate({name}, method={self.method!r}, rule={self._rule!r})"

    def generate(
        self,
        prompts: str | Sequence[str],
        seed: int | Sequence[int] | torch.Generator = 0,
        *,
        num_images: int = 1,
        progress: Callable[[int], object] | None = None,
        callback: Callable[..., object] | None = None,
        batch_size: int = 4,
        images: bool = True,
        **options: Any,
    ) -> Result:
        """Images of prompts; the prompt's format is the family's.

        Args:
            prompts: a text or several.
            seed, num_images, progress, callback: see `tempera.LoadedModel.generate`.
            batch_size: prompts decoded together.
            images: whether to decode pictures; otherwise `Result.images` is empty.
            options: of the processor, such as `ratio` and `image_area` (Emu3), or `height` and
                `width` (GLM-Image).

        Raises:
            TemperaError: a prompt or an option is not possible, or there is no image decoder.
        """
        all_prompts, seeds = seeded_prompts(prompts, seed, num_images)
        check_callable(progress=progress, callback=callback)
        self._check(batch_size, images)
        outputs = []
        pictures = []
        seconds = 0.0
        with self._lock, torch.no_grad():
            for first in range(0, len(all_prompts), batch_size):
                rows = slice(first, first + batch_size)
                texts = [prompt.text for prompt in all_prompts[rows]]
                ids = [prompt.id for prompt in all_prompts[rows]]
                arguments = self.family.arguments(texts, dict(options))
                request = self.family.request(arguments)
                observe = observer(progress, callback)
                start = now(self._device)
                output = self._decode(request, seeds[rows], ids, observe)
                seconds += now(self._device) - start
                outputs.append(output)
                if images:
                    pictures.append(self._pictures(request.spec, output.tokens, texts))
        return Result(
            prompts=tuple(prompt.text for prompt in all_prompts),
            tokens=torch.cat([output.tokens.cpu() for output in outputs]),
            trace=joined([output.trace.cpu() for output in outputs]),
            seconds=seconds,
            pixels=torch.cat(pictures) if pictures else torch.zeros(0, 3, 0, 0, dtype=torch.uint8),
        )

    def generate_ids(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | None = None,
        progress: Callable[[int], object] | None = None,
        callback: Callable[..., object] | None = None,
        **arguments: Any,
    ) -> Any:
        """What the model's `generate` returns for the same arguments: int64 [B, T'].

        Args:
            inputs: ids of the prompts, if they are not given as `input_ids`.
            seed: of the random draws; by default drawn from PyTorch's generator.
            progress, callback: see `generate`.
            arguments: of transformers' `generate`.

        Raises:
            TemperaError: an argument is not possible.
        """
        if inputs is not None:
            arguments["inputs"] = inputs
        if arguments.get("pixel_values") is not None:
            raise TemperaError(
                "images as prompts are not possible with an accelerated model: call the model's "
                "own generate."
            )
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        with self._lock, torch.no_grad():
            request = self.family.request(arguments)
            ids = [str(row) for row in range(len(request.prompt))]
            output = self._decode(request, whole_seed(seed), ids, observer(progress, callback))
            sequences = self.family.returned(request, output.tokens)
        sequences = sequences.clone()  # an ordinary tensor
        if request.settings.config.return_dict_in_generate:
            return huggingface.GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    @contextmanager
    def installed(self, seed: int | None = None) -> Iterator[None]:
        """Inside the `with` block the model's own `generate` makes images by this method. Calls
        that ask for text go to the class's.

        Args:
            seed: of the random draws of every call; by default drawn from PyTorch's generator.
        """
        model: Any = self.family.model
        of_class = model.generate
        before = model.__dict__.get("generate")

        def generate(inputs: Tensor | None = None, *rest: Any, **arguments: Any) -> Any:
            named = arguments if inputs is None else {"inputs": inputs, **arguments}
            if rest or not self.family.wants_image(named):
                return of_class(inputs, *rest, **arguments)
            return self.generate_ids(inputs, seed=seed, **arguments)

        model.__dict__["generate"] = generate
        try:
            yield
        finally:
            del model.__dict__["generate"]
            if before is not None:
                model.__dict__["generate"] = before

    def _check(self, batch_size: object, images: bool) -> None:
        """Raise TemperaError for a batch size that is not possible, or without an image decoder."""
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise TemperaError(
                f"batch_size={shown(batch_size)} is not possible: give a whole number above 0"
            )
        if images and self._decoder is None:
            raise TemperaError(
                f"{type(self.family.model).__name__} has no image decoder in transformers: give "
                "accelerate a decoder=, call generate with images=False, or, for GLM-Image, run "
                "diffusers' pipeline inside `with fast.installed():`."
            )

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.family.text.parameters()).device
        return device

    def _decode(
        self,
        request: Request,
        seed: int | Sequence[int],
        ids: list[str],
        observe: Callable[..., None],
    ) -> Output:
        """Decode one image per row of a request, whose random streams are named `ids`."""
        sampling = self._sampling or request.settings.sampling(self.family.guidance)
        target = self._target_of(request.spec, sampling)
        condition = request.condition
        keep = condition[:, 0] != PADDING
        target.conditioner = PromptConditioner(lambda _: (condition, keep))
        if condition.shape[-1] + request.spec.length > request.spec.context:
            raise TemperaError(
                f"a prompt of {condition.shape[-1]} tokens and an image of {request.spec.length} "
                f"do not fit the model's {request.spec.context} positions: shorten the prompt."
            )
        with in_one_sentence("generate", []):
            decoding = cast(Method, self._parts.method(target, self._rule))
        streams = RandomStreams(seed, ids, self._device)
        output: Output = decoding.decode(target, streams, ids, observe=observe)
        return output

    def _target_of(self, spec: ModelSpec, sampling: Sampling) -> TransformerTarget:
        """The target of a format. The last one is kept, with its cache."""
        check_model(self.family)
        if self._target is None or self._target.network.spec != spec:
            self._target = None  # its cache is freed before another is made
            network: Any = self.family.network(spec)
            self._target = TransformerTarget(network, _no_prompts, sampling, identity="held")
        self._target.sampling = sampling
        return self._target

    def _pictures(self, spec: ModelSpec, tokens: Tensor, prompts: list[str]) -> Tensor:
        """Tokens [B, T] and their B prompts -> pictures uint8 [B, 3, H, W]."""
        decoder: Any = self._decoder
        lines, columns = spec.grid
        codes = tokens[:, -lines * columns :].unflatten(1, spec.grid)
        decoded = []
        for place in range(len(codes)):  # a picture does not depend on others
            one = slice(place, place + 1)
            texts = [prompts[one]] if getattr(decoder, "reads_prompts", False) else []
            decoded.append(decoder.decode_codes(codes[one], *texts).float().cpu())
        images = torch.cat(decoded)
        return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def accelerate(
    model: nn.Module,
    processor: Any = None,
    method: str = "scd",
    *,
    rule: Rule | None = None,
    sampling: Sampling | None = None,
    decoder: ImageDecoder | None = None,
    layout: str | ModelSpec | None = None,
    **options: Any,
) -> Accelerated:
    """Make images with a model that you hold, in fewer passes and with the same law.

    No file is read, no weight is copied, and the model is as before. The classes are
    `Emu3ForConditionalGeneration`, `JanusForConditionalGeneration`,
    `ChameleonForConditionalGeneration` (Anole, Lumina-mGPT) and `GlmImageForConditionalGeneration`.

    Args:
        model: the model, in evaluation mode, on one device.
        processor: its processor; needed for prompts as text.
        method: a name of `conf/method/` that needs no trained draft: `scd`, `sjd`, `sjd_pac`,
            `jacobi`, or `ar`.
        rule: an acceptance rule in place of the method's.
        sampling: in place of that of the model's generation_config.
        decoder: makes pictures of codes, in place of the model's own. Chameleon and GLM-Image have
            none in transformers.
        layout: of a Chameleon's images: `anole`, `lumina` or `lumina2` (768 pixels), or a
            `ModelSpec`.
        options: of the method, such as `window=16`.

    Raises:
        TemperaError: the class, a part of the model, the method or an option is not supported.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    supported = [name for name in names if name in FAMILIES]
    if not supported:
        raise TemperaError(
            f"{type(model).__name__} is not supported: give an instance of one of "
            f"{', '.join(FAMILIES)}."
        )
    family = FAMILIES[supported[0]](model, processor)
    if isinstance(family, Chameleon):
        family.layout = in_ids(_layout(layout), processor)
    elif layout is not None:
        raise TemperaError("layout= is for Chameleon's models alone: leave it away.")
    check_model(family)
    return Accelerated(family, method, options, rule, sampling, decoder)


def _layout(layout: str | ModelSpec | None) -> ModelSpec:
    """A layout, perhaps by name.

    Raises:
        TemperaError: there is none of this name.
    """
    if isinstance(layout, ModelSpec):
        return layout
    layouts = {"anole": chameleon.anole, "lumina": chameleon.lumina, "lumina2": chameleon.lumina2}
    if layout not in layouts:
        raise TemperaError(
            "a Chameleon's weights do not tell the format of its images: give layout='anole', "
            "'lumina', 'lumina2', or a ModelSpec such as "
            "tempera.targets.chameleon.lumina(1024, 1024)."
        )
    return layouts[layout]()


def _method(preset: str, method: str, options: dict[str, Any]) -> Any:
    """The configuration of a method with its options.

    Raises:
        TemperaError: it needs files, or an option is not the method's.
    """
    for name in options:
        if name in OF_THE_MODEL or name.startswith(("hydra", "model.")):
            raise TemperaError(
                f"`{name}` is not an option here: the model has it already. Options are those of "
                "the method, and sampling=tempera.Sampling(...).",
                option=name,
            )
    all_options = {"model": preset, "method": method, **options}
    arguments = [written(name, value) for name, value in all_options.items()]
    cfg = composed("generate", arguments)
    if "neighbours" in cfg or "path" in cfg.drafter or "smaller" in cfg.drafter:
        raise TemperaError(
            f"method={method} needs files beside the model (a trained draft or a codebook), which "
            "accelerate does not read: choose scd, sjd, sjd_pac, jacobi or ar, or call "
            "tempera.load.",
            option="method",
        )
    with in_one_sentence("generate", arguments):
        parts = Parts.of(cfg)
        parts.rule()
    return parts


def check_model(family: Family) -> None:
    """Raise TemperaError for a model that cannot be decoded as it is."""
    model = family.model
    text = family.text
    if model.training:
        raise TemperaError("the model is in training mode: call model.eval() first.")
    rope = text.config.rope_parameters.get("rope_type", "default")
    if rope != "default":
        raise TemperaError(f"rope_type={rope} is not supported: only the default is.")
    attention = text.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise TemperaError(
            f"the model's attention is {attention}, which takes no mask of a draft: call "
            "model.set_attn_implementation('sdpa') first."
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise TemperaError(
            "the model has hooks that move its weights (device_map, or offloading to the CPU), "
            "which an accelerated model does not call: load it on one device without them."
        )
    head = list(model.lm_head.parameters())
    weights = [*text.parameters(), *head]
    devices = {weight.device for weight in weights}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise TemperaError(
            f"the model's weights are on {', '.join(sorted(map(str, devices)))}: put all of them "
            "on one device."
        )
    if not all(weight.is_floating_point() for weight in head):
        raise TemperaError("the model's head is quantised, which is not supported: leave it whole.")


def _no_prompts(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """In place of a conditioner until the first request brings one."""
    raise AssertionError(prompts)
