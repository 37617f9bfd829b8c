"""examples/published_code: methods outside the package, found as a user's own are."""

import shlex
from typing import Any

import pytest
from markdown_pages import shown_commands
from paths import ROOT
from published_code.gsd import PublishedGSD
from tiny_training import tiny_target

from tempera.config.cli import literal
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.config.search import Directories
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError

CODE = ROOT / "examples" / "published_code"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations, as by -cd."""
    Directories.of(["-cd", str(CODE / "conf")]).use()


def options(command: str) -> list[str]:
    """Of a shown command, those of the first job of a sweep."""
    words = shlex.split(command)
    assert words[1:4] == ["eval/run.py", "-cd", "examples/published_code/conf"]
    given = [word for word in words[4:] if word != "-m"]
    cases = [word for word in given if word.startswith("hydra.sweeper.cases=")]
    added = shlex.split(cases[0].split('"')[1]) if cases else []
    own = [word for word in given if not word.startswith("hydra.")]
    return [option.partition(",")[0] for option in [*own, *added]]


@pytest.mark.parametrize("command", shown_commands(CODE / "README.md"))
def test_its_commands_compose(command: str, found: None) -> None:
    cfg = composed("eval", list(map(literal, options(command))))
    parts = Parts.of(cfg)
    made = f"{parts.decoding_part.call.__module__} {parts.drafter_part.call.__module__}"
    assert "published_code" in made


@pytest.mark.parametrize(
    ("method", "tokens", "rounds"),
    [
        ("method=sjd drafter=sjd_published window=8 reuse=0.5", "ttttttttttnm", 6),
        ("method=gsd_published window=8 distance=100 difference=0.5", "ttmisshnmccd", 10),
    ],
)
def test_discrete_tokens_are_those_of_the_package_s_before_it_left_it(
    method: str, tokens: str, rounds: int, found: None
) -> None:
    parts = Parts.of(composed("eval", method.split()))
    target = tiny_target()
    made: Any = parts.method(target, parts.rule())
    output = made.decode(target, RandomStreams(0, ["a"]), ["a red ring"])
    drawn = "".join(chr(ord("a") + token) for token in output.tokens[0].tolist())
    assert (drawn, int(output.trace.rounds)) == (tokens, rounds)


def test_the_groups_have_the_options_distances(found: None) -> None:
    parts = Parts.of(
        composed("eval", ["method=gsd_published", "window=8", "distance=15", "difference=0.2"])
    )
    rule = parts.method(tiny_target(), parts.rule()).rule
    assert isinstance(rule, PublishedGSD) and (rule.distance, rule.difference) == (15, 0.2)


def test_an_impossible_value_is_refused_by_its_option(found: None) -> None:
    options = ["model=shapes_mar", "method=cspd_published", "exponent_temperature=0"]
    with pytest.raises(TemperaError, match="`exponent_temperature=0` is not valid"):
        Parts.of(composed("eval", options))
