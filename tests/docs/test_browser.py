"""report.html in a real browser: nothing fails, nothing is fetched, and all of it can be used."""

import os
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from PIL import Image
from report_runs import RUNS, made_up_runs

from tempera.decoding.replay import REPLAYS
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.report import write_report

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
        started = play.chromium.launch(
            executable_path=path, timeout=PATIENCE, args=["--no-sandbox"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report #1 <&>")  # names that an address must escape
    made_up_runs(directory, RUNS[:5], prompts=3)
    runs, _ = collect(find_runs([directory])[0])
    write_report(runs, directory)
    return directory / "report.html"


@pytest.fixture
def page(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened from disk; afterwards, no error was logged and nothing was fetched."""
    problems: list[str] = []
    opened = browser.new_page(**getattr(request, "param", {}))
    opened.set_default_timeout(PATIENCE)

    def requested(asked: Any) -> None:
        if not asked.url.startswith(("file:", "data:")):
            problems.append(asked.url)

    def told(said: Any) -> None:
        if said.type == "error" or "WARN" in said.text:  # Vega's, too
            problems.append(said.text)

    opened.on("console", told)
    opened.on("pageerror", lambda problem: problems.append(str(problem)))
    opened.on("request", requested)
    opened.goto(report.as_uri())
    opened.wait_for_selector("html[data-ready]")
    yield opened
    opened.close()
    assert problems == []


def test_points_show_their_pictures_beside_those_of_ar(page: Any) -> None:
    points = page.locator("#chart .mark-symbol.role-mark path")
    assert points.count() == 4  # and plain autoregression as a line
    points.last.click(force=True)
    assert "coolsd δ=3" in page.locator("#pictures-note").inner_text()
    for name, pictures in (("coolsd δ=2", 2), ("ar", 1)):
        page.locator("#run").select_option(label=name)
        assert page.locator("#pictures figure").first.locator("img").count() == pictures
    page.locator("#beside").select_option(label="eagle")
    assert "Left eagle" in page.locator("#pictures-note").inner_text()


def test_the_axes_are_chosen(page: Any) -> None:
    page.locator("#axis-x").select_option("speedup")
    page.locator("#axis-y").select_option("clip_score")
    page.wait_for_selector("#chart text:text-is('CLIP score ↑')")
    titles = page.locator("#chart .role-axis-title text").all_text_contents()
    assert titles == ["speed-up", "CLIP score ↑"]
    page.locator("#axis-y").select_option("kl_per_token")
    page.wait_for_selector("#chart text:text-is('KL bound per token ↓')")


def test_a_run_without_a_point_is_named(browser: Any, tmp_path: Path) -> None:
    """As LANTERN's KL bound, which is infinite."""
    runs, _ = collect(find_runs([made_up_runs(tmp_path, RUNS[:3], prompts=1)])[0])
    runs[2].metrics["kl_per_token"] = {"value": float("inf")}
    write_report(runs, tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#chart-note").inner_text() == ""
    page.locator("#axis-y").select_option("kl_per_token")
    page.wait_for_selector("#chart text:text-is('KL bound per token ↓')")
    told = page.locator("#chart-note").inner_text()
    assert told == "Not plotted, because a value is not finite: coolsd δ=1.1."
    page.close()


def test_pictures_of_other_code_are_not_asked_for_replays(browser: Any, tmp_path: Path) -> None:
    made_up_runs(tmp_path, RUNS[1:2], prompts=1)
    runs, _ = collect(find_runs([tmp_path])[0])
    theirs = runs[0].model_copy(update={"length": float("nan"), "model": "", "method": "theirs"})
    shutil.rmtree(Path(theirs.directory) / REPLAYS)
    write_report([theirs], tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.title() == "tempera: theirs"
    assert page.locator("#pictures-note").inner_text() == ""
    page.locator("#pictures .shot").click()
    assert "theirs: drawn by other code" in page.locator("#stage figcaption").inner_text()
    assert "replay" not in page.locator("body").inner_text()
    page.close()


def test_a_chart_without_points_says_so(browser: Any, tmp_path: Path) -> None:
    made_up_runs(tmp_path, RUNS[:1], prompts=1)
    made_up_runs(tmp_path / "again", RUNS[:1], prompts=1)
    runs, _ = collect(find_runs([tmp_path])[0])
    write_report(runs, tmp_path)
    said: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda one: said.append(one.text))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#chart").inner_text().startswith("No run beside plain autoregression")
    page.close()
    assert said == []


def test_a_wide_table_says_that_it_scrolls(page: Any) -> None:
    tables = page.locator(".wide")
    wide = tables.evaluate_all("all => all.map(one => one.scrollWidth > one.clientWidth)")
    assert tables.evaluate_all("all => all.map(one => one.matches('.scrolls'))") == wide
    page.set_viewport_size({"width": 320, "height": 700})
    page.wait_for_selector(".wide.scrolls")
    assert page.locator(".wide").first.evaluate("one => getComputedStyle(one, '::before').content")


def test_the_keyboard_reaches_tokens(page: Any) -> None:
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
    page.locator("#run").select_option(label="coolsd δ=2")
    page.locator(".shot").first.click()
    page.locator("#unit").select_option("rounds")
    page.locator("input[value=picture]").check()
    left, right = page.locator("#stage canvas").all()
    page.wait_for_selector("#stage figure:last-child canvas[data-stage='finished']")
    assert page.evaluate(SAME_PIXELS)
    slider = page.locator("#round")
    assert slider.get_attribute("max") == "64"  # rounds of AR, which stands beside it
    slider.fill("0")
    seen = [right.get_attribute("data-stage")]
    while seen[-1] != "finished":
        assert not page.evaluate(SAME_PIXELS)
        page.locator("#forward").click()
        assert page.locator("#drafted .kept, #drafted .rejected").count() >= 1
        assert left.get_attribute("data-stage") == f"{len(seen)}/64"
        seen.append(right.get_attribute("data-stage"))
    tokens = [int(stage.split("/")[0]) for stage in seen[:-1]]
    assert tokens == sorted(set(tokens)) and len(seen) < 64
    slider.fill("64")
    assert "finished in round" in page.locator("#round-text").inner_text()
    page.locator("#back").click()
    assert f"round {len(seen) - 1} of" in page.locator("#round-text").inner_text()
    assert page.evaluate(SAME_PIXELS)
    for mode in ("origin", "depth", "logprob"):
        page.locator(f"input[value={mode}]").check()
        assert not page.evaluate(SAME_PIXELS)
        assert page.locator("#key").inner_text().strip()
    slider.fill("62")
    page.locator("#play").click()
    page.wait_for_selector("#play:text-is('Play')")
    assert slider.input_value() == "64"


def test_the_replay_plays_in_measured_time(page: Any, report: Path) -> None:
    runs, _ = collect(find_runs([report.parent])[0])
    speedup = next(run.value("speedup") for run in runs if run.name == "coolsd δ=2")
    page.locator("#run").select_option(label="coolsd δ=2")
    page.locator(".shot").first.click()
    page.wait_for_selector("#stage figure:last-child canvas[data-stage='finished']")
    clocks = page.locator("#stage .clock").all_inner_texts()
    plain, drafted = (float(clock.removesuffix(" s")) for clock in clocks)
    assert plain == 0.64 and plain / drafted == pytest.approx(speedup, rel=0.25)  # of this prompt
    slider = page.locator("#round")
    assert float(slider.get_attribute("max")) == pytest.approx(plain)
    slider.fill(str(drafted + 0.01))
    stages = page.locator("#stage canvas").evaluate_all("all => all.map(one => one.dataset.stage)")
    assert stages[1] == "finished" and stages[0] != "finished"
    assert page.locator("#stage .clock").last.inner_text() == clocks[1]
    page.locator("#back").click()
    assert page.locator("#stage canvas").last.get_attribute("data-stage") != "finished"


def test_the_picture_of_the_page_about_reports(browser: Any, report: Path, tmp_path: Path) -> None:
    take = runpy.run_path(str(ROOT / "docs" / "report_picture.py"))["take"]
    pictures = [tmp_path / f"{number}.png" for number in (3, 4)]
    for number, picture in zip((3, 4), pictures, strict=True):
        take(browser, report, picture, "coolsd δ=2", number)
    early, late = (Image.open(picture).convert("RGB") for picture in pictures)
    assert early.width == late.width == 980
    assert early.tobytes() != late.tobytes()


PHONE = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["dark phone"])
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


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["phone"])
def test_a_phone_shows_both_pictures_above_the_slider(page: Any) -> None:
    page.locator("#run").select_option(label="coolsd δ=2")
    page.locator(".shot").first.click()
    page.wait_for_selector("canvas[data-stage='finished']")
    left, right = (one.bounding_box() for one in page.locator("#stage canvas").all())
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    assert page.evaluate("document.querySelector('#round').getBoundingClientRect().bottom") <= 740


CONTRASTS = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const page = light(getComputedStyle(document.querySelector("#viewer")).backgroundColor);
  const texts = [...document.querySelectorAll("#viewer :is(p, span, b, figcaption, label)")];
  return texts.map((one) => {
    const ink = light(getComputedStyle(one).color);
    return [one.textContent, Math.max(ink, page) / Math.min(ink, page)];
  });
}"""


@pytest.mark.parametrize(
    "page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=str
)
def test_texts_of_the_replay_stand_out(page: Any) -> None:
    """By 4.5 to 1, as WCAG 2 wants of texts."""
    page.locator("#run").select_option(label="coolsd δ=2")
    page.locator(".shot").first.click()
    page.wait_for_selector("canvas[data-stage='finished']")
    page.locator("#unit").select_option("rounds")
    page.locator("#round").fill("3")
    assert page.locator(".kept").count() and page.locator(".rejected").count()
    assert [text for text, ratio in page.evaluate(CONTRASTS) if ratio < 4.5] == []


LAPTOP = {"viewport": {"width": 1366, "height": 900}}
SMALL_LAPTOP = {"viewport": {"width": 1366, "height": 768}}


@pytest.mark.parametrize("page", [LAPTOP, SMALL_LAPTOP], indirect=True, ids=["900", "768"])
@pytest.mark.parametrize("run", ["ar", "coolsd δ=2"], ids=["one picture", "two"])
def test_the_replay_fits_a_laptop(page: Any, run: str) -> None:
    """Pictures, controls and what was drafted, without scrolling."""
    page.locator("#run").select_option(label=run)
    page.locator(".shot").first.click()
    page.wait_for_selector("canvas[data-stage='finished']")
    page.locator("#round").fill("5")
    assert page.locator("#stage canvas").count() == (1 if run == "ar" else 2)
    bottom = "document.querySelector('#token').getBoundingClientRect().bottom <= innerHeight"
    assert page.evaluate(bottom)
    assert page.evaluate("document.querySelector('#stage canvas').clientWidth > 200")
