"""Captions that a model cannot use are broken entries; prompts are refused before anything is
drawn.
"""

import pytest

from tempera.data.captions import CheckedCaptions, check_prompts
from tempera.data.prompts import Prompt
from tempera.data.sources import Broken, Entry, Listed
from tempera.errors import TemperaError
from tempera.targets.conditioners import AnyCaption, CaptionTokens, ClassLabels

TEXTS = ("a cat", "https://example.org/x.jpg", "一只猫", "@someone", "one two three four five")


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


@pytest.mark.parametrize("truncate", [False, True])
def test_what_cleaning_empties_and_what_is_too_long(truncate: bool) -> None:
    entries = [Entry(f"line {number}", str(number), text) for number, text in enumerate(TEXTS)]
    inner = Listed([*entries, Broken("line 5", "no text")], {"kind": "texts"})
    source = CheckedCaptions(inner, CaptionTokens(words, 4, truncate))
    found = list(source.read(0))
    good = [number for number, entry in enumerate(found) if isinstance(entry, Entry)]
    assert good == ([0, 4] if truncate else [0])
    emptied = "is empty once addresses, handles and Chinese are taken out"
    assert str(found[1]) == f"line 1: the caption {emptied}"
    assert truncate or str(found[4]).endswith("has 6 tokens, the model has room for 4")
    assert list(source.read(4)) == found[4:]
    assert source.count() == 6 and source.describe() == {"kind": "texts"}


def test_prompts_are_checked_as_a_whole() -> None:
    prompts = [Prompt(str(number), text) for number, text in enumerate(("a cat", "a b c d e"))]
    check_prompts(prompts, AnyCaption())
    with pytest.raises(TemperaError, match="prompt 2 of 2 has 6 tokens"):
        check_prompts(prompts, CaptionTokens(words, 4))
    with pytest.raises(TemperaError, match="prompt 1 of 2, 'a cat', is no class"):
        check_prompts(prompts, ClassLabels(10))
