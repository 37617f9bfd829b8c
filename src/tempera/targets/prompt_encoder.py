"""Prompts of networks that read them as tokens (Chameleon, Emu3, Janus-Pro, SimpleAR, GLM-Image).

Shapes: B prompts, T condition tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime import huggingface
from tempera.runtime.files import read_json
from tempera.runtime.pretrained import PretrainedFiles, note
from tempera.targets.token_format import END_OF_TEXT, ModelSpec

Tokenize = Callable[[str], list[int]]
"""Text -> token ids."""
Turn = Callable[[str], str]
"""A prompt -> what stands for `{text}` in a format."""

PADDING = -1
"""Marks padding in a condition."""


def too_long(where: str, tokens: int, room: int) -> TemperaError:
    """The error for a prompt with more tokens than the model reads; `where` says which."""
    return TemperaError(
        f"{where} has {tokens} tokens, but the model takes at most {room}: shorten it, or give "
        "truncate=true",
        option="truncate",
    )


def numbered(prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Every prompt with what errors call it."""
    count = len(prompts)
    return [(prompt, f"prompt {number} of {count}") for number, prompt in enumerate(prompts, 1)]


def plain_turn(prompt: str) -> str:
    """The `Turn` of models without a chat template."""
    return prompt


class PromptEncoder(nn.Module):
    """Encodes prompts as the network's ids, in the model's format.

    Args:
        spec: the format.
        tokenize: text → ids, without special tokens.
        truncate: truncate prompts that are too long, instead of raising.
        turn: puts a prompt into the turn of a chat, if the model has a chat template.
    """

    def __init__(
        self, spec: ModelSpec, tokenize: Tokenize, truncate: bool = False, turn: Turn = plain_turn
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tokenize = tokenize
        self.truncate = truncate
        self.turn = turn

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Encode prompts.

        Returns:
            ids of each prompt and of the null prompt, int64 [B, 2, T], padded on the left with −1;
            and bool [B, T], which is False on the prompts' padding.

        Raises:
            TemperaError: a prompt is empty, or does not fit into the context and `truncate` is
                False.
        """
        pairs = [(row, self._null(row)) for row in self.check(prompts)]
        width = max(len(ids) for pair in pairs for ids in pair)
        padded = [[[PADDING] * (width - len(ids)) + ids for ids in pair] for pair in pairs]
        condition = torch.tensor(padded)
        return condition, condition[:, 0] != PADDING

    def check(self, prompts: list[str]) -> list[list[int]]:
        """The ids of every prompt; errors as of `encode`."""
        return [self._row(prompt, where) for prompt, where in numbered(prompts)]

    def _null(self, row: list[int]) -> list[int]:
        """The null prompt of a prompt."""
        if self.spec.null_filling is None:
            return self._ids(self.spec.null, "")
        filling = self.tokenize(self.spec.null_filling)[:1]
        return [row[0], *filling * (len(row) - 2), row[-1]]

    def _row(self, prompt: str, where: str) -> list[int]:
        if not prompt.strip():
            raise TemperaError(f"{where} is empty: give it at least one word.")
        ids = self._ids(self.spec.prompt, prompt)
        if len(ids) <= self.spec.room:
            return ids
        if not self.truncate:
            raise too_long(where, len(ids), self.spec.room)
        ends = [word.end() for word in re.finditer(r"\S+", prompt)]
        while ends and len(ids) > self.spec.room:
            ends.pop()
            ids = self._ids(self.spec.prompt, prompt[: ends[-1]] if ends else "")
        return ids

    def _ids(self, pieces: Sequence[int | str], text: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            if "{text}" in piece:
                piece = piece.replace("{text}", self.turn(text))
            ids += self.tokenize(piece)
        return ids


def load_prompts(
    spec: ModelSpec,
    weights: str,
    files: list[str],
    hub: str,
    truncate: bool = False,
    template: list[str] | None = None,
) -> PromptEncoder:
    """Load a prompt encoder with the model's text tokenizer, a `tokenizer.json`.

    Args:
        spec, truncate: see `PromptEncoder`.
        template: possible names of a file with a chat template, in which the user's turn is
            `{text}` of the format.
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`; `weights="random"`
            gives tokens without meaning.

    Raises:
        TemperaError: the file is missing, is not a tokenizer, or is another model's.
    """
    published = PretrainedFiles(weights, files, hub)
    tokenize, size = load_tokenize(published)
    if END_OF_TEXT in spec.prompt:
        end = _end_of_text(published)
        prompt = tuple(end if piece == END_OF_TEXT else piece for piece in spec.prompt)
        spec = replace(spec, prompt=prompt, special=(*spec.special, end))
    turn: Turn = plain_turn
    if template is not None:
        turn = _templated(published, replace(published, files=template))
    special = spec.special if spec.null_filling is None else (*spec.special, spec.null_filling)
    for name in special:
        if size is not None and len(tokenize(name)) != 1:
            raise TemperaError(
                f"the text tokenizer of {weights} has no token {name}: give the tokenizer.json of "
                "the model."
            )
    if spec.text_tokens is not None and size not in (None, spec.text_tokens):
        raise TemperaError(
            f"the text tokenizer of {weights} has {size:,} tokens, but the image codes begin "
            f"after {spec.text_tokens:,}: give the tokenizer.json of the model.",
            option="model.spec.text_tokens",
        )
    return PromptEncoder(spec, tokenize, truncate, turn)


def _end_of_text(tokenizer: PretrainedFiles) -> str:
    """The end of text that the `tokenizer_config.json` beside a tokenizer names.

    Raises:
        TemperaError: the file is missing or names none.
    """
    names = [str(Path(name).with_name("tokenizer_config.json")) for name in tokenizer.files]
    files = replace(tokenizer, files=names)
    if files.random or note(files):
        return END_OF_TEXT
    (file,) = files.find()
    end = read_json(file).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(end, str):
        raise TemperaError(
            f"{file} names no eos_token, with which prompts begin: download it again."
        )
    return end


def _templated(tokenizer: PretrainedFiles, files: PretrainedFiles) -> Turn:
    """The turn of a chat template around a prompt.

    Raises:
        TemperaError: the file is missing or is not a template of texts.
    """
    if files.random or note(files):
        return plain_turn
    (file,) = files.find()
    template = file.read_text(encoding="utf-8")
    apply: Any = _tokenizer(tokenizer).apply_chat_template
    try:
        return turn_of(
            lambda turn: str(apply(turn, chat_template=template, tokenize=False)), str(file)
        )
    except TemperaError:
        raise
    except Exception as problem:  # Jinja's have no common class but this
        raise TemperaError(
            f"{file} is not a chat template ({problem}): download it again."
        ) from problem


def turn_of(apply: Callable[[list[dict[str, Any]]], str], template: str) -> Turn:
    """A chat template around a prompt.

    Args:
        apply: makes a text of a conversation, as chat templates take it.
        template: what errors call it.

    Raises:
        TemperaError: it does not give a prompt's text back.
    """

    def turn(prompt: str) -> str:
        return apply([{"role": "user", "content": [{"type": "text", "text": prompt}]}])

    if turn(PROBE).count(PROBE) != 1:
        raise TemperaError(f"{template} does not keep the text of a prompt: download it again.")
    return turn


PROBE = "a red bicycle"
"""A prompt that a chat template must give back."""


def about_as_many(text: str) -> list[int]:
    """About as many tokens as a text has, where its tokenizer is not to be read: one for four
    characters, as of English.
    """
    return [10 + byte for byte in text.encode()[::4]]


def load_tokenize(files: PretrainedFiles) -> tuple[Tokenize, int | None]:
    """Load the tokenizer of a `tokenizer.json` and the number of its tokens; of `random` weights
    and for sizes alone it is `about_as_many`, of no number.

    Raises:
        TemperaError: the file is missing, or cannot be read as a tokenizer.
    """
    if files.random or note(files):
        return about_as_many, None
    tokenizer = _tokenizer(files)

    def tokenize(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    return tokenize, len(tokenizer)


def _tokenizer(files: PretrainedFiles) -> Any:
    file = files.find()[0]
    try:
        return huggingface.PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as problem:  # the tokenizers library raises plain Exception
        raise TemperaError(
            f"{file} is not a tokenizer ({str(problem).splitlines()[0]}): download it again."
        ) from None
