"""What the shipped model cannot read is refused or told, not cut or replaced in silence."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tempera
from tempera.errors import TemperaError
from tempera.shapes.networks import UNKNOWN, WorldCaptions, load_text_encoder, tokenize
from tempera.shapes.world import WORDS, World

CAPTIONS = WorldCaptions()
ENCODER = load_text_encoder()


def test_the_worlds_captions_are_understood() -> None:
    captions = [sample.caption for sample in World(1).batch(0, 200)]
    CAPTIONS.check(captions)
    assert CAPTIONS.warnings(captions) == []


TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=25).map(" ".join)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_every_text_is_refused_told_of_or_read_whole(text: str) -> None:
    encoder = ENCODER
    try:
        CAPTIONS.check([text])
    except TemperaError as problem:
        told = str(problem)
        assert "is empty" in told or f"the model takes at most {encoder.length}" in told
        with pytest.raises(TemperaError):
            encoder.encode([text])
        return
    ids = tokenize([text], encoder.length)[0]
    assert int((ids != 0).sum()) == len(text.split())
    warnings = " ".join(CAPTIONS.warnings([text]))
    assert ("does not know words such as" in warnings) == bool((ids == UNKNOWN).any())
    assert encoder.encode([text])[1].sum() == len(text.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [("an astronaut on a horse", "words such as astronaut, horse (2 in"),
     ("כוכב ירוק", "words such as"), ("a red 🟥", "words such as 🟥 (1 in"),
     ("red ring a", "1 of 1 prompts are not captions of the shapes world, such as 'red ring a'")],
)  # fmt: skip
def test_what_the_world_does_not_know_is_warned_of(text: str, told: str) -> None:
    (warning,) = CAPTIONS.warnings([text])
    assert told in warning and "\n" not in warning


def test_a_warning_reaches_who_asks_for_an_image() -> None:
    with pytest.warns(UserWarning, match="not captions of the shapes world"):
        tempera.generate("red ring a")


def test_too_many_words_are_cut_if_that_is_asked_for() -> None:
    long = "a red ring " * 3_000
    with pytest.raises(TemperaError, match=r"has 9000 tokens, .* or give truncate=true"):
        tempera.generate(long)
    WorldCaptions(truncate=True).check([long])
    assert load_text_encoder(truncate=True).encode([long])[1].all()
