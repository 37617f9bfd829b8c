"""A replay in the middle of a decode, as report.html shows it: docs/report.png.

python eval/run.py -m method=ar,parallel_block
python eval/report.py runs=outputs/multirun
python docs/report_picture.py outputs/report/report.html docs/report.png
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright


def take(browser: Browser, report: Path, file: Path, run: str, number: int) -> None:
    """The viewer of the first prompt, when round `number` of a run has been drawn."""
    page = browser.new_page(viewport={"width": 980, "height": 864}, color_scheme="light")
    page.goto(report.resolve().as_uri())
    page.locator("#run").select_option(label=run)
    page.locator(".shot").first.click()
    page.wait_for_selector("canvas[data-stage='finished']")
    page.locator("#round").fill("0")
    while f"round {number} of" not in page.locator("#viewer").inner_text():
        page.locator("#forward").click()
    page.locator("#viewer").screenshot(path=file)
    page.close()


if __name__ == "__main__":
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play, play.chromium.launch(executable_path=installed) as browser:
        take(browser, Path(sys.argv[1]), Path(sys.argv[2]), "parallel_block", 28)
