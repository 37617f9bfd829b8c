"""The numbers of README and docs are those of docs/results/results.json."""

import json
import re
import runpy
from pathlib import Path

import pytest
from markdown_pages import name_of, text_of
from paths import ROOT
from PIL import Image

MAKE = runpy.run_path(str(ROOT / "docs" / "results" / "make.py"))
FIGURE = runpy.run_path(str(ROOT / "docs" / "pareto_figure.py"))
GRID = runpy.run_path(str(ROOT / "docs" / "grid_figure.py"))
RESULTS = MAKE["read"]()
QUOTES = MAKE["QUOTES"]
README, DISCRETE = ROOT / "README.md", ROOT / "docs" / "results" / "discrete.md"
STUDY = ROOT / "docs" / "study.md"


def quoted(text: str, quotes: list[str]) -> list[re.Match[str]]:
    return [found for found, _ in MAKE["quotes"](text, MAKE["everything"](RESULTS), quotes)]


@pytest.mark.parametrize("page", MAKE["PAGES"], ids=name_of)
def test_a_page_has_the_numbers_of_the_results(page: Path) -> None:
    assert MAKE["render"](text_of(page), RESULTS) == text_of(page)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_sentence_stands_on_a_page(quote: str) -> None:
    assert any(quoted(text_of(page), [quote]) for page in MAKE["PAGES"])


@pytest.mark.parametrize("page", [README, DISCRETE, STUDY], ids=name_of)
def test_no_other_number_is_typed(page: Path) -> None:
    """Outside tables, code and the quoted sentences."""
    text = text_of(page)
    for found in quoted(text, QUOTES):
        text = text.replace(found[0], "")
    if page == STUDY:  # its lengths and its values of ν are chosen
        text = re.sub(r"3\.8|4\.2|ν = 0\.\d+", "", text[text.index("## Results") :])
    code = r"(?ms)^```.*?^```|^\|.*?$|^    .*?$|`[^`]*`|\]\([^)]*\)|95%|Python 3.11"
    prose = re.sub(code, "", text)
    assert re.findall(r"\d+\.\d+|\d+%", prose) == []


def test_the_picture_shows_the_results() -> None:
    shown = json.loads(Image.open(ROOT / "docs" / "pareto.png").text["Description"])
    assert shown == FIGURE["points"]()
    assert all(panel["uniform"] for panel in shown.values())


@pytest.mark.parametrize("file", GRID["SHOWN"])
def test_a_grid_shows_the_results(file: str) -> None:
    assert json.loads(Image.open(ROOT / "docs" / file).text["Description"]) == GRID["labels"](file)


def test_a_speed_up_is_length_over_cost() -> None:
    """With the uncertainty of both, over all sessions."""
    sessions = {"one": {"eagle": [2.0, 1.5, 2.5], "eagle on XL": [100, 160, 20]},
                "two": {"eagle": [3.0, 2.8, 3.2]}}  # fmt: skip
    row = {"accepted_length": [3.0, 2.9, 3.1], "kl_per_token": [0.0] * 3}
    found = MAKE["numbers"]({"rows": {"eagle": row}, "sessions": sessions})["eagle"]
    assert found.here_cost == (2.5, 1.5, 3.2) and found.here == (3 / 2.5, 2.9 / 3.2, 3.1 / 1.5)
    assert found.xl == pytest.approx((3 / 1.6, 2.9 / 1.6, 3.1 / 1.6))
    assert found.cheap[0] == 3 / 1.2 and found.exact == "yes"
