"""Emu3.5 (Cui et al. 2025, arXiv 2510.26583) and Xiaomi-Robotics-U0 (2607.11643): decoders of
Qwen3's layers over text and image tokens. Pictures are those of an IBQ tokenizer, see
`image_tokenizers.vq`.

Ids are from the Emu3.5 repository (BAAI). Special tokens start at 151643 (`<|endoftext|>`):
`<|extra_100|>` (end of the prompt) 151746, `<|extra_200|>` (end of line) 151846, `<|extra_203|>`
(begin) 151849, `<|image token|>` 151851 and `<|image start|>` 151852. The codes are 151854 …
282925.
"""

import unicodedata
from pathlib import Path
from typing import Any

from tempera.errors import TemperaError
from tempera.runtime import huggingface
from tempera.runtime.files import sha256_file
from tempera.runtime.github import Pinned
from tempera.runtime.pretrained import PretrainedFiles, are_sizes_enough
from tempera.targets.family import Family
from tempera.targets.prompt_encoder import PromptEncoder, Tokenize, about_as_many
from tempera.targets.token_format import ModelSpec, patches

PATCH = 16
FIRST_SPECIAL = 151643
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
_LINE_END, _IMAGE, _START, _FIRST_CODE = 151846, 151851, 151852, 151854
TURN = "<|extra_203|>You are a helpful assistant{task}. USER: {text} ASSISTANT: <|extra_100|>"

TOKENIZER = Pinned(
    "baaivision/Emu3.5",
    "8fcf1da48f9c5252fe0a0b8dc842e07b6efcd745",
    "src/tokenizer_emu3_ibq/emu3.tiktoken",
    "9b9b0e0416d84d7c88333eb261c77e5fe2d7f7be",
    option="model.prompt_weights",
)
"""The text tokenizer of both models; U0's `unis.tiktoken` is the same file."""


def emu3_5(
    height: int = 1024,
    width: int = 1024,
    null_task: str = "",
    codes: int = 131072,
    first_code: int = _FIRST_CODE,
) -> ModelSpec:
    """The format of text to image: a turn of chat, then the size in codes as text, then the codes.
    The published code lets the model write text before the image; here the image begins at once.
    Its last line ends with the end of the image there, and with the end of a line here: nothing
    follows it.

    Args:
        height, width: pixels, multiples of 16.
        null_task: what the unconditional row says of the task: nothing (Emu3.5), or " for t2i
            task" (U0).
        codes: size of the image codebook.
        first_code: the network's id of code 0.

    Raises:
        TemperaError: a side is not a multiple of 16.
    """
    lines, columns = patches(height, PATCH, "height"), patches(width, PATCH, "width")
    head = (_START, f"{lines}*{columns}", _IMAGE)
    return ModelSpec(
        lines=lines,
        columns=columns,
        codes=codes,
        first_code=first_code,
        prompt=(TURN.replace("{task}", " for t2i task"), *head),
        null=(TURN.replace("{task}", null_task).replace("{text}", ""), *head),
        context=9216,
        line_end=_LINE_END,
    )


def load_emu3_5_prompts(
    spec: ModelSpec, weights: str, files: list[str], hub: str, truncate: bool = False
) -> PromptEncoder:
    """Load a prompt encoder with Emu3.5's text tokenizer, a file of tiktoken's; it needs the
    package tiktoken.

    Args:
        spec, truncate: see `PromptEncoder`.
        weights: the file, a directory with one of `files`, `random` for tokens without meaning, or
            `published`, which downloads `TOKENIZER`.
        files, hub: see `PretrainedFiles`.

    Raises:
        TemperaError: the file or the package is missing, or the file is another.
    """
    if weights == "random" or are_sizes_enough():
        return PromptEncoder(spec, about_as_many, truncate)
    published = weights == "published"
    file = TOKENIZER.local() if published else PretrainedFiles(weights, files, hub).find()[0]
    return PromptEncoder(spec, _tokenize(file), truncate)


def _tokenize(file: Path) -> Tokenize:
    """Text → ids, by the ranks of a file and the pattern and special tokens of Emu3.5's code."""
    try:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
    except ImportError:
        raise TemperaError(
            "the text tokenizer of Emu3.5 needs the package tiktoken: pip install tiktoken"
        ) from None
    try:
        ranks = load_tiktoken_bpe(str(file), sha256_file(file))  # its cache goes by the path
    except ValueError as problem:
        raise TemperaError(
            f"{file} is not a tiktoken file ({problem}): download {TOKENIZER.path} again.",
            option="model.prompt_weights",
        ) from None
    special = {name: FIRST_SPECIAL + number for number, name in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding(
        "emu3.5", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )

    def tokenize(text: str) -> list[int]:
        return encoding.encode(unicodedata.normalize("NFC", text), allowed_special="all")

    return tokenize


PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers split text before they merge bytes."""


def _config(**sizes: Any) -> Any:
    return huggingface.Qwen3Config(**sizes)


EMU3_5 = Family(name="emu3", config=_config, layer={"head_norm": "rms"})
UNIS = Family(name="unis", config=_config, layer={"head_norm": "rms"})
"""Xiaomi-Robotics-U0, whose files call the same network UNIS."""
