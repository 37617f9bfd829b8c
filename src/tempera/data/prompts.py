"""Prompts: a single text, or files of them (.txt, .csv, .tsv, .jsonl, .parquet)."""

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field, NonNegativeInt, PositiveInt

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import read_text
from tempera.runtime.row_store import read_table
from tempera.targets.prompt_state import PicturedText

TEXT_NAMES = ("prompt", "prompts", "caption", "top_caption", "text")
"""Names of columns and fields that hold the text, in any case; the first that exists is read."""
CAPTION_NAMES = ("caption", "text", "top_caption", "prompt", "prompts")
"""The same for captions of pictures, beside which a column `prompt` may hold an instruction."""
LONGEST_ID = 100
"""Most bytes of an id: it names files, which have at most 255 bytes."""
REPEAT = re.compile(r"(-again)?-\d{1,6}\Z")
"""What an id ends in where a prompt is used once more; it does not count."""

QUOTED = re.compile(r'(?:(?:"(?:[^"]|"")*+"|[^"\t\n]*+)(?:[\t\n]|\Z))*+')
"""Tab-separated text in which every quotation mark belongs to a quoted field."""


UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line separators and lone surrogates, which are bytes that are not UTF-8."""
NOT_UTF8 = "not UTF-8, or has control characters, as when Windows-1252 was read as Latin-1"
"""What is wrong with such a text."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. Its `id` seeds the row's random stream, keys every result and names the picture's
    file.

    Raises:
        TemperaError: the id cannot name a file, or the text is not UTF-8 text.
    """

    id: str
    text: str

    def __post_init__(self) -> None:
        fault = None
        if not re.fullmatch(r"[^./\\][^/\\]*", self.id):
            fault = "it must be a file name without slashes and without a leading dot"
        elif UNPRINTABLE.search(self.id + " ".join(self.text.split())):
            fault = "it or its prompt holds control characters"
        elif len(REPEAT.sub("", self.id).encode()) > LONGEST_ID:
            fault = f"it has more than {LONGEST_ID} bytes"
        if fault:
            raise TemperaError(f"a prompt's id, '{shortened(self.id)}', is not valid: {fault}.")


def pictured(prompts: Sequence[Prompt], image: Any, copies: int) -> list[Prompt]:
    """Prompts with pictures.

    Args:
        prompts: `copies` of each in a row.
        image: a picture for all; or a list, of the pictures of the only prompt, or of a picture or
            a list of pictures for each.

    Raises:
        TemperaError: they are not as many, or a prompt has none.
    """
    count = len(prompts) // copies
    rows = list(image) if isinstance(image, list | tuple) else [image] * count
    if count == 1 and not any(isinstance(row, list | tuple) for row in rows):
        rows = [rows]
    found = [list(row) if isinstance(row, list | tuple) else [row] for row in rows]
    if len(found) != count or not all(found):
        raise TemperaError(
            f"image= has {len(found)} entries for {count} prompts: give one picture for all, or a "
            "list with one entry (a picture or a list of pictures) per prompt.",
            option="image",
        )
    texts = [PicturedText(prompt.text, found[i // copies]) for i, prompt in enumerate(prompts)]
    return [replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]


def text_of(value: Any) -> str | None:
    """A caption from data: a text, its bytes, or the first of a list of texts, on one line, which
    may be `UNPRINTABLE`. None if the value is neither, or is empty.
    """
    if isinstance(value, list | tuple):
        texts = [text for text in value if isinstance(text, str) and text.strip()]
        value = texts[0] if texts else None
    if isinstance(value, bytes):
        value = value.decode(errors="surrogateescape")
    return (" ".join(value.split()) or None) if isinstance(value, str) else None


def field_of(row: Any, names: Sequence[str] = TEXT_NAMES) -> str | None:
    """The text in a row: the row itself, or its first field of one of these names, in any case,
    that is not empty.
    """
    if not isinstance(row, dict):
        return text_of(row)
    in_lower_case = {str(key).lower(): value for key, value in row.items()}
    return next((text_of(in_lower_case[name]) for name in names if in_lower_case.get(name)), None)


def caption_column(names: Iterable[str]) -> str | None:
    """Which of a table's columns holds the captions: the first of `CAPTION_NAMES` that exists."""
    in_lower_case = {name.lower(): name for name in names}
    return next((in_lower_case[name] for name in CAPTION_NAMES if name in in_lower_case), None)


def one_prompt(content: str | float) -> list[Prompt]:
    """A single prompt: a text, or a number such as a class. Its id is a hash of the text, so
    different prompts can share a run directory.

    Raises:
        TemperaError: it is empty, or neither text nor number.
    """
    text = text_of(str(content)) if isinstance(content, str | int | float) else None
    if text is None or UNPRINTABLE.search(text):
        raise TemperaError(
            "the prompt must be one printable text: give one, or several in a file, as in "
            "data=file data.path=FILE.",
            option="prompt",
        )
    return [Prompt("prompt-" + hashlib.sha256(text.encode()).hexdigest()[:8], text)]


def file_prompts(
    path: str | None,
    limit: PositiveInt | None = None,
    offset: NonNegativeInt = 0,
    *,
    names: Sequence[str] = TEXT_NAMES,
) -> list[Prompt]:
    """Read prompts from a file: see `rows_of`. Ids are `<file stem>-<line number>`.

    Args:
        path: the file.
        limit: number of prompts to take, None for all.
        offset: number of prompts to skip first.
        names: of the columns that may hold the text; the first that is not empty does.

    Raises:
        TemperaError: the file is missing, empty or not UTF-8, or holds a broken line, an empty
            prompt; the message names file and line.
    """
    if path is None:
        raise TemperaError("data=file needs a file: give data.path=FILE.", option="path")
    file = Path(path)
    stem = re.sub(r"[^A-Za-z0-9_-][^A-Za-z0-9_.-]*", "-", file.stem)
    prompts = []
    for number, row in rows_of(file):
        text = field_of(row, names)
        if text is None or UNPRINTABLE.search(text):
            why = "contains no text for a prompt" if text is None else f"is {NOT_UTF8}"
            raise TemperaError(f"{file}:{number} {why}: repair or delete it.")
        prompts.append(Prompt(f"{stem}-{number:06d}", text))
    return chosen(prompts, limit, offset, path)


def chosen(prompts: list[Prompt], limit: int | None, offset: int, source: str) -> list[Prompt]:
    """`limit` of a set's prompts from `offset` on.

    Raises:
        TemperaError: there is none, or two prompts of the set have the same id.
    """
    check_unique(prompts)
    if not prompts:
        raise TemperaError(f"{source} contains no prompts: give another file.", option="path")
    if offset >= len(prompts):
        raise TemperaError(
            f"{source} contains only {len(prompts)} prompts: give a smaller offset than {offset}.",
            option="offset",
        )
    return prompts[offset:] if limit is None else prompts[offset : offset + limit]


def check_unique(prompts: Sequence[Prompt]) -> None:
    """Raise TemperaError if the ids of two prompts name the same file, on any file system."""
    ids: dict[str, str] = {}  # by the name of their file
    for prompt in prompts:
        name = unicodedata.normalize("NFC", prompt.id.casefold())
        if name in ids:
            raise TemperaError(
                f"two prompts have the ids {ids[name]} and {prompt.id}: ids must differ in more "
                "than case."
            )
        ids[name] = prompt.id


class CaptionCheck(Protocol):
    """The part of a model's text encoder that tells usable captions from unusable ones."""

    def check(self, prompts: list[str]) -> None:
        """Raise TemperaError for a prompt that cannot be used."""


def check_prompts(prompts: Sequence[Prompt], captions: CaptionCheck) -> None:
    """Raise TemperaError for the first prompt that the model cannot use, or if two have one id."""
    check_unique(prompts)
    captions.check([prompt.text for prompt in prompts])


Count = Annotated[int, Field(ge=1, le=10**7)]
"""A number of prompts that are made here; more would fill the memory before a run begins."""


@runtime_checkable
class Warns(Protocol):
    """A `CaptionCheck` that also tells what the model does not understand."""

    def warnings(self, prompts: Sequence[str]) -> list[str]:
        """Sentences about words that the model does not read; such prompts are drawn all the
        same.
        """


def warnings_of(prompts: Sequence[Prompt], captions: object) -> list[str]:
    """What a model with these `captions` does not understand of the prompts, in sentences."""
    if not isinstance(captions, Warns):
        return []
    return captions.warnings([prompt.text for prompt in prompts])


def described(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The number of prompts, and a hash of their ids and texts."""
    lines = "\n".join(f"{prompt.id}\t{prompt.text}" for prompt in prompts)
    return {"count": len(prompts), "sha256": hashlib.sha256(lines.encode()).hexdigest()}


Rows = Iterator[tuple[int, Any]]
"""Line numbers and what stands there: an object, a string, or None where it is broken."""


def rows_of(file: Path) -> Rows:
    """The rows of a file. Its ending, in any case, decides the format.

    - `.txt`: one text a line.
    - `.csv`, `.tsv`: a header with a column prompt (or of another name in `TEXT_NAMES`), quoted as
      pandas writes them; PartiPrompts' TSV, where quotes are part of the prompts, is read too.
    - `.jsonl`: an object with such a field, or a string, a line.
    - `.parquet`: a column of such a name.

    Raises:
        TemperaError: the file is missing, broken, not UTF-8 or of another kind.
    """
    kind = file.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _table_rows(file)
    if kind == ".jsonl":
        return _json_rows(file)
    if kind == ".parquet":
        return enumerate(read_table(file), start=1)
    if kind == ".txt":
        return enumerate(_lines(file), start=1)
    raise TemperaError(
        f"{file} is not a prompt file: give one that ends in .txt, .csv, .tsv, .jsonl or .parquet; "
        "captions of MS-COCO are data=coco.",
        option="path",
    )


def _lines(file: Path) -> list[str]:
    text = read_text(file).rstrip()
    return text.split("\n") if text else []


def _json_rows(file: Path) -> Rows:
    for number, line in enumerate(_lines(file), start=1):
        try:
            yield number, json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError):
            yield number, None


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError if a name occurs twice."""
    named = dict(fields)
    if len(named) < len(fields):
        raise ValueError("a name occurs twice")
    return named


def _table_rows(file: Path) -> Rows:
    text = read_text(file).rstrip("\n")
    tabs = file.suffix.lower() == ".tsv"
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter="\t" if tabs else ",",
        quoting=csv.QUOTE_NONE if tabs and not QUOTED.fullmatch(text) else csv.QUOTE_MINIMAL,
        strict=True,  # a quotation mark without its partner swallows lines
    )
    try:
        header = [name.strip() for name in next(reader, [])]
        if text and not {name.lower() for name in header} & {*TEXT_NAMES, "file_name"}:
            raise TemperaError(
                f"{file}:1 has no column named prompt (it has {shortened(', '.join(header))}): "
                "rename the one with the prompts to prompt."
            )
        if len(set(header)) < len(header):
            raise TemperaError(f"{file}:1 names a column twice: delete or rename one.")
        for row in reader:
            fits = len(row) <= len(header)  # editors cut empty fields at the end
            yield reader.line_num, dict(zip(header, row, strict=False)) if fits else None
    except csv.Error as problem:
        raise TemperaError(f"{file}:{reader.line_num} is broken ({problem}): repair it.") from None
