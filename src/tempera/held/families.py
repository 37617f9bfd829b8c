"""What the four families of models do differently: where the parts of a model are, what precedes an
image, and what transformers' `generate` returns.

Shapes: B prompts, T ids of a prompt, V image tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder
from tempera.held.arguments import Settings
from tempera.held.network import HeldNetwork
from tempera.image_tokenizers.emu3 import Emu3Tokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.targets import chameleon, emu3
from tempera.targets.shared_vocabulary import PADDING, PromptEncoder
from tempera.targets.token_format import END_OF_TEXT, ModelSpec


@dataclass(frozen=True)
class Request:
    """Images to generate.

    Attributes:
        prompt: ids of the prompts as the caller gave them, int64 [B, T].
        condition: ids of each prompt and of its null prompt, int64 [B, 2, T'], padded on the left
            with `PADDING`.
        spec: format of the images.
        settings: the caller's settings.
    """

    prompt: Tensor
    condition: Tensor
    spec: ModelSpec
    settings: Settings


class Family(ABC):
    """A family of models.

    Args:
        model: the model.
        processor: its processor; None if prompts are given as ids alone.
    """

    guidance: float = 1.0
    """Guidance where the model's generation_config states none, as in the model's `generate`."""
    preset: ClassVar[str]
    """A preset of conf/model/ with the same kind of tokens."""
    inputs: ClassVar[set[str]] = {"input_ids", "inputs", "attention_mask"}
    """Arguments of `generate` besides settings."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    @abstractmethod
    def network(self, spec: ModelSpec) -> HeldNetwork:
        """The model as a target's network."""

    @abstractmethod
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of `generate` asks for an image."""

    @abstractmethod
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` for prompts, made by the processor.

        Args:
            prompts: texts, B of them.
            options: further arguments of the processor, such as a size.

        Returns:
            ids int64 [B, T] and their mask under transformers' names, and what the family adds.

        Raises:
            TemperaError: there is no processor, or it has no such option.
        """

    @abstractmethod
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        """The format of the images that a call asks for; its prompts are empty.

        Args:
            settings: the call's settings, with the family's arguments as `settings.inputs`.
            ids: of the prompts as given, int64 [B, T].

        Raises:
            TemperaError: the call does not tell the size, or the images of a batch differ in it.
        """

    @abstractmethod
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        """The prompts of the unconditional rows of guidance; they are not read without guidance.

        Args:
            settings: see `spec`.
            rows: ids of the prompts with `PADDING` where they are masked, int64 [B, T].
            ids: the same as given.

        Returns:
            int64 [B, T'], with `PADDING` on the left.

        Raises:
            TemperaError: the model's settings lack what they are made of.
        """

    @property
    def text(self) -> Any:
        """The decoder."""
        return self.model.model.language_model

    def decoder(self) -> ImageDecoder | None:
        """The model's image decoder, if it has one."""
        return None

    def ending(self, spec: ModelSpec) -> list[int]:
        """Ids behind the image in what `generate` returns."""
        return []

    def request(self, arguments: Mapping[str, Any]) -> Request:
        """Read a call of `generate`.

        Raises:
            TemperaError: it asks for something impossible.
        """
        settings = Settings(self.model.generation_config, arguments, self.inputs)
        given = settings.inputs
        ids = given.get("input_ids", given.get("inputs"))
        if ids is None:
            raise TemperaError("there are no input_ids: give what the processor returns.")
        rows = padded(ids, given.get("attention_mask"), "input_ids")
        null = self.null(settings, rows, ids)
        return Request(ids, together(rows, null), self.spec(settings, ids), settings)

    def returned(self, request: Request, tokens: Tensor) -> Tensor:
        """Tokens [B, V] as the ids that `generate` returns."""
        spec, prompt = request.spec, request.prompt
        ids = spec.token_ids.to(tokens.device)[tokens]
        ending = torch.tensor([self.ending(spec)] * len(ids), dtype=ids.dtype, device=ids.device)
        new = torch.cat([ids, ending.view(len(ids), -1)], 1)
        codes = range(spec.first_code, spec.first_code + spec.codes)
        count = request.settings.new(prompt.shape[1], ids.shape[1], new.shape[1], codes)
        return torch.cat([prompt, new[:, :count].to(prompt)], 1)

    def processed(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        """What the processor makes of prompts."""
        if self.processor is None:
            raise TemperaError(
                "prompts need the model's processor: give it to tempera.accelerate, or call "
                "generate_ids with ids."
            )
        made = self.processor(text=prompts, padding=True, return_tensors="pt", **options)
        return dict(made.to(self.model.device))


class Emu3(Family):
    """`Emu3ForConditionalGeneration`."""

    preset = "emu3"
    inputs: ClassVar[set[str]] = {
        *Family.inputs,
        *("image_sizes", "negative_prompt_ids", "negative_prompt_attention_mask"),
        "prefix_allowed_tokens_fn",
    }

    @property
    @override
    def text(self) -> Any:
        return self.model.model.text_model

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "emu3")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        ids = arguments.get("input_ids", arguments.get("inputs"))
        start = self._id("<|image token|>", optional=True)
        begun = ids is not None and start is not None and bool((ids[:, -1] == start).all())
        return "pixel_values" not in arguments and ("image_sizes" in arguments or begun)

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        options = {"return_for_image_generation": True, **options}
        negative = self.processed([emu3.NEGATIVE] * len(prompts), options)
        made = self.processed([prompt + emu3.POSITIVE for prompt in prompts], options)
        return {
            **made,
            "negative_prompt_ids": negative["input_ids"],
            "negative_prompt_attention_mask": negative["attention_mask"],
        }

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        mapping = self.model.model.vocabulary_mapping
        first, codes = mapping.image_tokens[0], len(mapping.image_tokens)
        if [mapping.img2bpe[code] for code in range(codes)] != [*range(first, first + codes)]:
            raise TemperaError(
                "the ids of this model's image codes are not consecutive, which is not supported."
            )
        lines, columns = self._size(settings, ids)
        context = self.text.config.max_position_embeddings
        end = mapping.eol_token_id
        spec = ModelSpec(lines, columns, codes, first, (), (), context, line_end=end)
        allowed = settings.inputs.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            line = torch.cat([ids[0], ids.new_full((columns,), first)])
            if [int(token) for token in allowed(0, line)] != [end]:
                raise TemperaError(
                    f"prefix_allowed_tokens_fn does not end a line of {columns} codes with the end "
                    "of line alone, as Emu3's images have it: leave it away."
                )
        return spec

    def _size(self, settings: Settings, ids: Tensor) -> tuple[int, int]:
        """Lines and columns of codes, of `image_sizes` or else in the prompt, as `90*90`."""
        sizes = settings.inputs.get("image_sizes")
        if sizes is not None:
            distinct = {(int(height), int(width)) for height, width in sizes}
        else:
            start, token = self._id("<|image start|>"), self._id("<|image token|>")
            distinct = set()
            for row in ids.tolist():
                if row[-1] != token or start not in row or self.processor is None:
                    raise TemperaError(
                        "the size of the images is not known: give image_sizes, as the processor "
                        "returns them with return_for_image_generation=True."
                    )
                inside = row[len(row) - row[::-1].index(start) : -1]
                height, _, width = self.processor.tokenizer.decode(inside).partition("*")
                distinct.add((int(height), int(width)))
        if len(distinct) > 1:
            raise TemperaError(
                f"the images of a batch have {len(distinct)} sizes: give those of one size at a "
                "time."
            )
        return distinct.pop()

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        given = settings.inputs.get("negative_prompt_ids")
        if given is None:
            return rows[:, -1:]  # as generate takes it
        mask = settings.inputs.get("negative_prompt_attention_mask")
        return padded(given, mask, "negative_prompt_ids").expand(len(rows), -1)

    @override
    def ending(self, spec: ModelSpec) -> list[int]:
        end = self.text.config.eos_token_id
        return [self._id("<|extra_201|>"), self._id("<|image end|>"), int(end)]

    @override
    def decoder(self) -> ImageDecoder:
        return LinedTokenizer(Emu3Tokenizer(self.model.model.vqmodel))

    def _id(self, name: str, optional: bool = False) -> Any:
        token = self.model.model.vocabulary_mapping.vocab_map.get(name)
        if token is None and not optional:
            raise TemperaError(
                f"the vocabulary_map of the model's configuration has no {name}: load the model "
                "with the configuration of its own repository."
            )
        return token


class Janus(Family):
    """`JanusForConditionalGeneration`."""

    preset, guidance = "janus_pro_7b", 5.0
    inputs: ClassVar[set[str]] = {*Family.inputs, "generation_mode"}

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        head = self.model.model.generation_head
        norm = torch.nn.Sequential(self.text.norm, head.proj_out, head.activation_fn)
        embed = self.model.prepare_embeddings_for_image_generation
        return HeldNetwork(self.text, head.vision_head, spec, "janus", norm, embed)

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("generation_mode") == "image")

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        chats = [f"<|User|>: {prompt}\n\n<|Assistant|>:" for prompt in prompts]
        return self.processed(chats, {"generation_mode": "image", **options})

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        tokens = self.model.model.vision_model.config.num_image_tokens
        side = round(tokens**0.5)
        codes = self.model.model.generation_head.vision_head.out_features
        context = self.text.config.max_position_embeddings
        return ModelSpec(side, side, codes, 0, (), (), context)

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        config = settings.config
        start = (getattr(config, "generation_kwargs", None) or {}).get("boi_token_id")
        if start is None and self.processor is not None:
            tokenizer = self.processor.tokenizer
            start = tokenizer.convert_tokens_to_ids(tokenizer.boi_token)
        names = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
        names["generation_kwargs['boi_token_id']"] = start
        for name, value in names.items():
            if value is None:
                raise TemperaError(
                    f"the model's generation_config has no {name}, which the unconditional rows "
                    "are made with: set it."
                )
        kept = (ids == config.bos_token_id) | (ids == start)
        null = torch.where(kept, ids, config.pad_token_id)
        return torch.where(rows == PADDING, PADDING, null)

    @override
    def returned(self, request: Request, tokens: Tensor) -> Tensor:
        return tokens.to(request.prompt)

    @override
    def decoder(self) -> ImageDecoder:
        return _JanusDecoder(self.model)


@dataclass(frozen=True)
class _JanusDecoder:
    model: Any

    def decode_codes(self, codes: Tensor) -> Tensor:
        images: Tensor = self.model.decode_image_tokens(codes.flatten(1))
        return images.permute(0, 3, 1, 2)


class Chameleon(Family):
    """`ChameleonForConditionalGeneration`, which generates no images in transformers: Anole and
    Lumina-mGPT.

    Args:
        layout: the format of its images.
    """

    preset = "anole"
    layout: ModelSpec = chameleon.anole()

    @property
    @override
    def text(self) -> Any:
        return self.model.model

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "chameleon")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        ids = arguments.get("input_ids", arguments.get("inputs"))
        start = self.layout.prompt[-1:]
        begun = ids is not None and bool((ids[:, -1:] == torch.tensor(start).to(ids)).all())
        return "pixel_values" not in arguments and begun

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if self.processor is None or options:
            raise TemperaError(
                "prompts need the model's processor and no further options: give it to "
                "tempera.accelerate."
            )
        tokenizer = self.processor.tokenizer

        def tokenize(text: str) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

        condition, _ = PromptEncoder(self.layout, tokenize).encode(prompts)
        ids = condition[:, 0].to(self.model.device)
        return {"input_ids": ids.clamp(min=0), "attention_mask": (ids != PADDING).long()}

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        return self.layout

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        null = [piece for piece in self.layout.null if isinstance(piece, int)]
        return ids.new_tensor([null or [int(ids[0, -1])]] * len(ids))


def in_ids(spec: ModelSpec, processor: Any) -> ModelSpec:
    """A format with the ids of the special tokens that it names.

    Args:
        spec: the format.
        processor: the model's; read if the format names some.

    Raises:
        TemperaError: it does, and there is no processor, or its tokenizer has no such token.
    """
    named = {*spec.special, END_OF_TEXT} & {*spec.prompt, *spec.null}
    if not named:
        return spec
    if processor is None:
        raise TemperaError(
            "this layout names tokens of the model's tokenizer: give its processor, too."
        )
    tokenizer, ids = processor.tokenizer, dict[Any, int]()
    for name in named:
        text = tokenizer.eos_token if name == END_OF_TEXT else name
        ids[name] = tokenizer.get_vocab().get(text, -1)
        if ids[name] < 0:
            raise TemperaError(f"the processor's tokenizer has no token {text}: give the model's.")
    prompt, null = (
        tuple(ids.get(piece, piece) for piece in part) for part in (spec.prompt, spec.null)
    )
    return replace(spec, prompt=prompt, null=null, special=())


class GlmImage(Family):
    """`GlmImageForConditionalGeneration`."""

    preset = "anole"
    inputs: ClassVar[set[str]] = {*Family.inputs, "image_grid_thw", "images_per_sample"}

    @override
    def network(self, spec: ModelSpec) -> HeldNetwork:
        return HeldNetwork(self.text, self.model.lm_head, spec, "glm_image")

    @override
    def wants_image(self, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("image_grid_thw") is not None

    @override
    def arguments(self, prompts: list[str], options: dict[str, Any]) -> dict[str, Any]:
        options = {
            "target_h" if name == "height" else "target_w" if name == "width" else name: value
            for name, value in options.items()
        }
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        if self.processor is None:
            return self.processed(prompts, options)
        options |= {"return_tensors": "pt", "padding": True}
        made = self.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, processor_kwargs=options
        )
        return dict(made.to(self.model.device))

    @override
    def spec(self, settings: Settings, ids: Tensor) -> ModelSpec:
        grids = settings.inputs.get("image_grid_thw")
        distinct = set() if grids is None else {tuple(map(tuple, g)) for g in _pairs(grids)}
        if len(distinct) != 1:
            raise TemperaError(
                "image_grid_thw must have the two grids of a new image, large and preview, and "
                "the same for every prompt: images as prompts, and several sizes in a batch, are "
                "not possible with an accelerated model."
            )
        (_, lines, columns), (_, *preview) = distinct.pop()
        return ModelSpec(
            lines,
            columns,
            codes=self.model.config.vq_config.num_embeddings,
            first_code=0,
            prompt=(),
            null=(),
            context=self.text.config.max_position_embeddings,
            preview=(preview[0], preview[1]),
        )

    @override
    def null(self, settings: Settings, rows: Tensor, ids: Tensor) -> Tensor:
        if settings.config.guidance_scale not in (None, 1):
            raise TemperaError("GLM-Image is not guided: leave guidance_scale away.")
        return rows[:, -1:]

    @override
    def ending(self, spec: ModelSpec) -> list[int]:
        return [int(self.model.config.image_end_token_id)]


def _pairs(grids: Tensor) -> list[list[list[int]]]:
    """Every two grids of a tensor [2B, 3], each as three numbers; none for an odd number."""
    return [] if len(grids) % 2 else grids.view(-1, 2, 3).tolist()


def padded(ids: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """Ids [B, T] with `PADDING` where a mask is 0.

    Raises:
        TemperaError: the last id of a row is masked.
    """
    if mask is None:
        return ids
    if not bool((mask[:, -1] == 1).all()):
        raise TemperaError(
            f"{name} is padded on the right: give the processor padding_side='left', since "
            "images continue the last id."
        )
    return torch.where(mask == 1, ids, PADDING)


def together(rows: Tensor, null: Tensor) -> Tensor:
    """Prompts [B, T] and null prompts [B, T'], padded on the left to the longer: [B, 2, …]."""
    width = max(rows.shape[1], null.shape[1])
    parts: Sequence[Tensor] = [
        torch.nn.functional.pad(part, (width - part.shape[1], 0), value=PADDING)
        for part in (rows, null)
    ]
    return torch.stack(list(parts), 1)
