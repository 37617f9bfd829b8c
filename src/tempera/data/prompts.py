"""Prompts from class numbers, a string, or a text, TSV or MS-COCO file."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file


@dataclass(frozen=True)
class Prompt:
    """A prompt. Its `id` seeds the row's random stream and keys every result, so it is
    unique in a run and safe as a file name.
    """

    id: str
    text: str


def class_prompts(limit: int | None = 64, offset: int = 0, classes: int = 1000) -> list[Prompt]:
    """Class numbers, for class-conditional models: prompt i is class i mod `classes`; ids are
    class-0207-000 (class, repetition).
    """
    check_slice(limit, offset)
    numbers = range(offset, offset + (classes if limit is None else limit))
    return [
        Prompt(f"class-{number % classes:04d}-{number // classes:03d}", str(number % classes))
        for number in numbers
    ]


def one_prompt(given: str | float) -> list[Prompt]:
    """A single prompt: a text, or a number such as a class. Its id is a hash of the text, so
    different prompts can share a run directory.

    Raises:
        TemperaError: it is empty, or neither text nor number.
    """
    if not isinstance(given, str | int | float):
        raise TemperaError(
            f"prompt={given} is not possible: give one text in quotes, as in \"prompt='a small red "
            "ring'\", or several in a file, as in data=file data.path=FILE."
        )
    text = str(given).strip()
    if not text:
        raise TemperaError('the prompt is empty: give some text, as in prompt="a small red ring".')
    return [Prompt("prompt-" + hashlib.sha256(text.encode()).hexdigest()[:8], text)]


def file_prompts(path: str | None, limit: int | None = None, offset: int = 0) -> list[Prompt]:
    """Read prompts from a file. Its ending decides the format.

    - `.txt`: one prompt per line; ids are `<file stem>-<line number>`.
    - `.tsv`: a header with a `Prompt` column, as in PartiPrompts; ids are as for `.txt`.
    - `.json`: MS-COCO captions (`annotations`: list of `id` and `caption`); ids are the annotation
      ids.

    Args:
        path: the file.
        limit: number of prompts to take, None for all.
        offset: number of prompts to skip first.

    Raises:
        TemperaError: the file is missing, empty or not UTF-8, or holds a broken line, an empty
            prompt or a repeated id; the message names file and line.
    """
    if not path:
        raise TemperaError(
            "data=file needs a file of prompts: give path=FILE (.txt, .tsv with a Prompt column, "
            "or MS-COCO captions .json)."
        )
    check_slice(limit, offset)
    readers = {".txt": _read_text, ".tsv": _read_tsv, ".json": _read_coco}
    file = Path(path)
    if file.suffix.lower() not in readers:
        raise TemperaError(
            f"the path {path} does not end like a prompt file: use one of {', '.join(readers)}."
        )
    prompts = readers[file.suffix.lower()](file)
    if not prompts:
        raise TemperaError(f"{path} holds no prompts: put one on each line.")
    if offset >= len(prompts):
        raise TemperaError(
            f"{path} holds {len(prompts)} prompts, so offset={offset} leaves none: choose a "
            "smaller offset."
        )
    return prompts[offset:] if limit is None else prompts[offset : offset + limit]


def described(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The number of prompts, and a hash of their ids and texts."""
    lines = "\n".join(f"{prompt.id}\t{prompt.text}" for prompt in prompts)
    return {"count": len(prompts), "sha256": hashlib.sha256(lines.encode()).hexdigest()}


def check_slice(limit: int | None, offset: int) -> None:
    """Refuse a slice of prompts that holds none, or a negative offset."""
    if limit is not None and limit < 1:
        raise TemperaError(f"limit={limit} asks for no prompts: give at least 1.")
    if offset < 0:
        raise TemperaError(
            f"offset={offset} is negative: give how many prompts to skip, 0 or more."
        )


def _lines(file: Path) -> list[str]:
    """The file's lines without trailing blank ones; line i is `lines[i - 1]`."""
    regular_file(file)
    try:
        raw = file.read_bytes()
    except OSError as problem:
        raise TemperaError(
            f"{file} cannot be read ({problem.strerror}): check the path of the prompt file."
        ) from None
    lines = []
    for number, line in enumerate(raw.rstrip().split(b"\n"), start=1):
        try:
            lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r"))
        except UnicodeDecodeError as problem:
            raise TemperaError(
                f"{file}:{number} is not UTF-8 text (byte {problem.start + 1}): save the file as "
                "UTF-8."
            ) from None
    return [] if lines == [""] else lines


def _line_prompt(file: Path, number: int, text: str) -> Prompt:
    """The prompt on a line, after checking it."""
    text = " ".join(text.split())
    if not text:
        raise TemperaError(
            f"{file}:{number} holds an empty prompt: write one there or delete the line."
        )
    controls = [character for character in text if unicodedata.category(character) == "Cc"]
    if controls:
        raise TemperaError(
            f"{file}:{number} is broken (it holds the control character {controls[0]!r}): repair "
            "or delete the line."
        )
    return Prompt(_file_name(f"{file}:{number}", f"{_safe(file.stem)}-{number:06d}"), text)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _read_text(file: Path) -> list[Prompt]:
    return [_line_prompt(file, number, line) for number, line in enumerate(_lines(file), start=1)]


def _read_tsv(file: Path) -> list[Prompt]:
    lines = _lines(file)
    if not lines:
        return []
    header = lines[0].split("\t")
    if "Prompt" not in header:
        raise TemperaError(
            f"{file}:1 has no Prompt column (found {', '.join(header)[:80]}): name the prompts' "
            "column Prompt in the first line."
        )
    column = header.index("Prompt")
    prompts = []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) > len(header) or len(fields) <= column:
            raise TemperaError(
                f"{file}:{number} is broken ({len(fields)} fields where the header has "
                f"{len(header)}): repair or delete the line."
            )
        prompts.append(_line_prompt(file, number, fields[column]))
    return prompts


def _read_coco(file: Path) -> list[Prompt]:
    lines = _lines(file)
    if not lines:
        return []
    try:
        content = json.loads("\n".join(lines))
    except json.JSONDecodeError as problem:
        raise TemperaError(
            f"{file}:{problem.lineno} is not valid JSON ({problem.msg}): download the file again "
            "or repair the line."
        ) from None
    except (RecursionError, ValueError) as problem:
        raise TemperaError(
            f"{file} is not valid JSON ({shortened(str(problem))}): download the file again."
        ) from None
    annotations = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(annotations, list):
        raise TemperaError(
            f"{file} has no list of annotations: give an MS-COCO captions file (annotations: "
            "[{id, caption}, …])."
        )
    prompts = [
        _annotation_prompt(file, number, annotation)
        for number, annotation in enumerate(annotations, start=1)
    ]
    _check_unique(file, prompts)
    return prompts


def _annotation_prompt(file: Path, number: int, annotation: Any) -> Prompt:
    where = f"{file}, annotation {number}"
    if (
        not isinstance(annotation, dict)
        or not isinstance(annotation.get("caption"), str)
        or not isinstance(annotation.get("id"), int | str)
    ):
        raise TemperaError(
            f"{where} is broken (no id and caption): each annotation needs an id and a caption."
        )
    text = " ".join(annotation["caption"].split())
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise TemperaError(f"{where} is broken (its caption is not UTF-8 text): repair it.")
    if not text:
        raise TemperaError(
            f"{where} (id {annotation['id']}) holds an empty prompt: write a caption there or "
            "delete the annotation."
        )
    name = str(annotation["id"])
    if name != _safe(name) or not name.strip("."):
        raise TemperaError(
            f"{where} has the id '{shortened(name)}', which cannot name a file: use letters, "
            "digits, dot, dash or underscore."
        )
    return Prompt(_file_name(where, name), text)


LONGEST_ID = 200
"""Most characters of an id: file names have at most 255 bytes, including a temporary file's ending.
"""


def _file_name(where: str, name: str) -> str:
    """The id, if it is short enough to name a picture's file."""
    if len(name) > LONGEST_ID:
        raise TemperaError(
            f"{where} has an id of {len(name)} characters ('{shortened(name, 40)}'), which is too "
            f"long to name a file: give at most {LONGEST_ID}, or shorten the prompt file's name."
        )
    return name


def _check_unique(file: Path, prompts: Sequence[Prompt]) -> None:
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts, start=1):
        if prompt.id in seen:
            raise TemperaError(
                f"{file}, annotation {number} repeats the id {prompt.id} of annotation "
                f"{seen[prompt.id]}: ids must be unique."
            )
        seen[prompt.id] = number
