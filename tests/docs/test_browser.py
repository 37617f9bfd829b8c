"""report.html in a real browser: nothing fails, nothing is fetched, and all of it can be used."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import RUNS, made_up_runs

from tempera.reporting import report_page
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.study import StudyTable

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 240_000
"""Milliseconds: a browser on a busy machine is slow."""
SAME_PIXELS = """async () => {
  const canvas = document.querySelector("#stage figure:last-child canvas");
  const image = new Image();
  image.src = document.querySelector(".shot img:last-child").src;
  await image.decode();
  const other = document.createElement("canvas");
  [other.width, other.height] = [canvas.width, canvas.height];
  const pen = other.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  const [left, right] = [canvas, other].map((one) =>
    one.getContext("2d").getImageData(0, 0, one.width, one.height).data);
  return left.every((value, i) => value === right[i]);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with api.sync_playwright() as play:
        own = play.chromium.executable_path
        found = [os.environ.get("CHROME"), *map(shutil.which, NAMES), own]
        path = next((path for path in found if path and Path(path).is_file()), None)
        if path is None:
            pytest.skip("no Chromium or Chrome is here: install one, or name it in CHROME")
        started = play.chromium.launch(executable_path=path, timeout=PATIENCE)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report #1 <&>")  # names that an address must escape
    made_up_runs(directory, RUNS[:5], prompts=3)
    rows, _ = collect(find_runs([directory])[0])
    losses = StudyTable("Losses", "Paired <i>.", ["run", "FID"], [["ar", "–"], ["coolsd", "+1*"]])
    path = directory / "report.html"
    return report_page.write(path, rows, ["compare <b>with</b> care"], studied=[losses])


@pytest.fixture
def page(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened from disk; afterwards, no error was logged and nothing was fetched."""
    problems: list[str] = []
    opened = browser.new_page(**getattr(request, "param", {}))
    opened.set_default_timeout(PATIENCE)
    opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    opened.on("pageerror", lambda problem: problems.append(str(problem)))
    opened.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(("file:", "data:")) else problems.append(asked.url)
        ),
    )
    opened.goto(report.as_uri())
    opened.wait_for_selector("html[data-ready]")
    yield opened
    opened.close()
    assert problems == []


def test_points_show_their_pictures_beside_those_of_ar(page: Any) -> None:
    assert page.locator("#cautions li").all_inner_texts() == ["compare <b>with</b> care"]
    points = page.locator("#chart .point")
    assert points.count() == 5
    for number, name in ((3, "coolsd δ=2"), (4, "coolsd δ=3"), (0, "ar")):
        page.locator(f"#chart .point[data-run='{number}']").click()
        assert page.locator("#pictures-head").inner_text() == f"Pictures of {name}"
        beside = 0 if name == "ar" else 1
        assert page.locator("#pictures figure").first.locator("img").count() == 1 + beside
        assert page.locator("#chart .point[aria-pressed='true']").count() == 1
        assert page.locator("#results tr[aria-current='true'] th").inner_text() == name
    page.locator("#chart .point[data-run='1']").hover()
    shown = page.locator("#tip").inner_text()
    assert shown.startswith("eagle")
    assert "accepted length" in shown
    assert "FID" in shown


def test_the_tables_of_a_study_are_shown(page: Any) -> None:
    study = page.locator("#study")
    assert study.locator("h3, p").all_inner_texts() == ["Losses", "Paired <i>."]
    cells = study.locator("tbody tr").all_inner_texts()
    assert [line.split() for line in cells] == [["ar", "–"], ["coolsd", "+1*"]]


def test_the_keyboard_reaches_points_and_tokens(page: Any) -> None:
    point = page.locator("#chart .point[data-run='0']")
    point.focus()
    page.keyboard.press("ArrowRight")
    chosen = page.evaluate("document.activeElement.dataset.run")
    assert chosen != "0"
    page.keyboard.press("Enter")
    assert page.locator("#run").input_value() == chosen
    page.locator(".shot").first.focus()
    page.keyboard.press("Enter")
    page.locator("#stage canvas").last.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert "row 2, column 2" in page.locator("#token").inner_text()
    assert "log-probability −" in page.locator("#token").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()


def test_the_replay_reaches_the_finished_picture(page: Any) -> None:
    page.locator("#chart .point[data-run='3']").click()
    page.locator(".shot").first.click()
    left, right = page.locator("#stage canvas").all()
    page.wait_for_selector("#stage figure:last-child canvas[data-stage='finished']")
    assert page.evaluate(SAME_PIXELS)
    slider = page.locator("#round")
    rounds = int(slider.get_attribute("max"))
    assert rounds == 64  # of AR, which stands beside it
    slider.fill("0")
    assert right.get_attribute("data-stage") == "0/64"
    seen = []
    while right.get_attribute("data-stage") != "finished":
        assert not page.evaluate(SAME_PIXELS)
        page.locator("#forward").click()
        seen.append(right.get_attribute("data-stage"))
        assert page.locator("#drafted .kept, #drafted .rejected").count() >= 1
        assert left.get_attribute("data-stage") == f"{len(seen)}/64"
    assert [int(stage.split("/")[0]) for stage in seen[:-1]] == sorted(
        {int(stage.split("/")[0]) for stage in seen[:-1]}
    )
    assert page.evaluate(SAME_PIXELS)
    assert len(seen) < rounds
    slider.fill(str(rounds))
    assert left.get_attribute("data-stage") == "finished"
    for mode in ("origin", "depth", "logprob"):
        page.locator(f"input[value={mode}]").check()
        assert not page.evaluate(SAME_PIXELS)
        assert page.locator("#key").inner_text().strip()
    slider.fill(str(rounds - 2))
    page.locator("#play").click()
    page.wait_for_selector("#play:text-is('Play')")
    assert slider.input_value() == str(rounds)


def test_axes_curves_and_the_table(page: Any) -> None:
    page.locator("#axis-x").select_option("speedup")
    page.locator("#axis-y").select_option("clip_score")
    assert page.locator("#chart .name").all_text_contents() == ["speed-up", "CLIP score ↑"]
    page.locator("#legend button").last.click()
    assert page.locator("#chart .point").count() == 2
    head = page.locator("#results [data-key='accepted_length']")
    orders = []
    for _ in range(2):
        head.click()
        cells = page.locator("#results tbody tr td:nth-child(3)").all_inner_texts()
        orders.append([float(cell.split()[0]) for cell in cells])
    assert orders[0] == sorted(orders[0])
    assert orders[1] == orders[0][::-1]
    page.locator("#kind").select_option("differences")
    assert "plain autoregression" in page.locator("#table-note").inner_text()
    page.locator("#beside").select_option(label="eagle")
    assert "Left eagle" in page.locator("#pictures-note").inner_text()


@pytest.mark.parametrize(
    "page",
    [{"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}],
    indirect=True,
    ids=["dark phone"],
)
def test_it_fits_a_phone_in_the_dark(page: Any) -> None:
    fits = "document.scrollingElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.locator(".shot").first.click()
    page.wait_for_selector("canvas[data-stage='finished']")
    assert page.evaluate("document.querySelector('#viewer').scrollWidth <= innerWidth")
    assert page.evaluate(fits)
