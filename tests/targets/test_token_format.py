"""The format of a sequence: ids, forced tokens, room, and the formats of the real models."""

import pytest

from tempera.errors import TemperaError
from tempera.targets.chameleon import anole, lumina
from tempera.targets.emu3 import NEGATIVE, emu3
from tempera.targets.prompt_encoder import PromptEncoder
from tempera.targets.token_format import ModelSpec

LINED = ModelSpec(2, 3, 5, 20, prompt=(1, "{text}!", 2), null=(2,), context=20, line_end=9)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_forced_positions_and_grid() -> None:
    assert (LINED.grid, LINED.length, LINED.room) == ((2, 4), 8, 12)
    assert LINED.token_ids.tolist() == [20, 21, 22, 23, 24, 9]
    assert LINED.forced is not None and LINED.forced.tolist() == [-1, -1, -1, 5, -1, -1, -1, 5]
    plain = ModelSpec(2, 3, codes=5, first_code=20, prompt=("{text}",), null=(), context=20)
    assert (plain.grid, plain.forced) == ((2, 3), None)


def test_prompts_are_left_padded_beside_the_null_prompt() -> None:
    condition, keep = PromptEncoder(LINED, letters).encode(["a", "abc"])
    assert condition[0].tolist() == [[-1, -1, 1, 97, 33, 2], [-1, -1, -1, -1, -1, 2]]
    assert condition[1].tolist() == [[1, 97, 98, 99, 33, 2], [-1, -1, -1, -1, -1, 2]]
    assert keep.tolist() == [[False, False, True, True, True, True], [True] * 6]


def test_a_prompt_that_is_too_long_is_refused_or_truncated() -> None:
    with pytest.raises(TemperaError, match="prompt 2 of 2 has 13 tokens, .* at most 12"):
        PromptEncoder(LINED, letters).encode(["ab", "cdef ghijk"])
    fits, _ = PromptEncoder(LINED, letters).encode(["cdef ghij"])
    condition, keep = PromptEncoder(LINED, letters, truncate=True).encode(["cdef ghij k"])
    assert condition.equal(fits) and keep.all()
    assert condition[0, 0].tolist() == [1, *letters("cdef ghij!"), 2]
    with pytest.raises(TemperaError, match="prompt 1 of 1 is empty"):
        PromptEncoder(LINED, letters).encode([" "])


def test_the_papers_formats() -> None:
    spec = lumina()
    assert spec.grid == (48, 49) and spec.length == 2352
    assert spec.prompt[-3:] == (8197, 8828, 8828) == spec.null and spec.line_end == 8803
    assert lumina(512, 1024).grid == (32, 65) and lumina(512, 1024).null == (8197, 8820, 8836)
    assert "1024x512" in str(lumina(512, 1024).prompt)
    assert anole().grid == (32, 32) and anole().forced is None and anole().room == 4096 - 1024
    spec = emu3()
    assert spec.grid == (90, 91) and "90*90" in spec.prompt and spec.null[1] == NEGATIVE
    assert spec.token_ids[-2:].tolist() == [184621, 151846]
