"""Captions that a model cannot use are broken entries; prompts are refused before anything is
drawn.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import override

from tempera.data.captions import CheckedCaptions, check_prompts
from tempera.data.prompts import Prompt
from tempera.data.sources import Broken, Entry, Source
from tempera.errors import PromptTooLong, TemperaError
from tempera.runtime.distributed import Processes
from tempera.targets.conditioners import AnyCaption, CaptionTokens, ClassLabels


class Texts(Source):
    fetched = False

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "texts"}

    @override
    def count(self) -> int | None:
        return len(self.texts)

    @override
    def fetch(self, processes: Processes) -> None:
        self.fetched = True

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for number, text in enumerate(self.texts[start:], start):
            yield Entry(f"line {number}", str(number), text) if text else Broken("line", "no text")


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


TEXTS = ("a cat", "", "https://example.org/x.jpg", "一只猫", "@someone", "one two three four five")


@pytest.mark.parametrize("truncate", [False, True])
def test_what_cleaning_empties_and_what_is_too_long(truncate: bool) -> None:
    inner = Texts(*TEXTS)
    source = CheckedCaptions(inner, CaptionTokens(words, 4, truncate))
    entries = list(source.read(0))
    good = [number for number, entry in enumerate(entries) if isinstance(entry, Entry)]
    assert good == ([0, 5] if truncate else [0])
    assert str(entries[2]) == "line 2: the caption is empty once addresses, handles and Chinese " \
        "are taken out"  # fmt: skip
    if not truncate:
        assert str(entries[5]) == "line 5: the caption has 6 tokens, the model has room for 4"
    assert len(entries) == source.count() == 6 and source.describe() == {"kind": "texts"}
    source.fetch(Processes(cpu=True))
    assert inner.fetched


def test_prompts_are_checked_as_a_whole() -> None:
    prompts = [Prompt(str(number), text) for number, text in enumerate(("a cat", "a b c d e"))]
    check_prompts(prompts, AnyCaption())
    with pytest.raises(PromptTooLong, match="prompt 2 of 2 has 6 tokens"):
        check_prompts(prompts, CaptionTokens(words, 4))
    with pytest.raises(TemperaError, match="prompt 1 of 2, 'a cat', is no class"):
        check_prompts(prompts, ClassLabels(10))
