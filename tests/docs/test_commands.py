"""The commands of README and docs/ run, in order, in one directory; README's Python and the
notebooks run too.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest
from markdown_pages import PAGES, blocks, commands, name_of, text_of
from page_commands import run
from paths import ROOT
from PIL import Image

EXTENDING = ROOT / "docs" / "extend"
OTHERS = ("notebooks", "docs/replay_animation.py")
"""What has a test of its own."""
COMMANDS = [
    command
    for command in dict.fromkeys(
        command for page in PAGES if page.parent != EXTENDING for command in commands(page)
    )
    if not any(other in command for other in OTHERS)
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with what the commands take from the user: a file of prompts, and photos
    with captions beside them.
    """
    directory = tmp_path_factory.mktemp("docs")
    (directory / "prompts.txt").write_text("a small red ring\n", encoding="utf-8")
    photos = directory / "photos"
    photos.mkdir()
    for number in range(80):
        Image.new("RGB", (80, 64), (3 * number, 90, 200)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"photo {number} of the sky\n", encoding="utf-8")
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one working directory: later commands use what earlier ones made."""
    run(command, workplace, monkeypatch)


def test_the_commands_wrote_the_documented_files(workplace: Path) -> None:
    outputs = workplace / "outputs"
    assert len(list(outputs.glob("eval/*/metrics.json"))) >= 5
    assert (outputs / "train_draft/shapes/draft/model.safetensors").is_file()
    assert all((outputs / "report" / name).is_file() for name in ("report.md", "results.csv"))
    assert list(outputs.glob("frontier/*/metrics.json"))


OF_MODELS = [
    ROOT / "docs" / f"{name}.md" for name in ("accelerate", "metrics", "training", "tutorial")
]
"""Their code takes published models; test_wrapped.py, test_speculators.py and
test_export_command.py run it on tiny ones.
"""
WITH_PYTHON = [
    page
    for page in PAGES
    if page.parent != EXTENDING and page not in OF_MODELS and blocks(page, "python")
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_its_python_runs(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), namespace)
    said = capsys.readouterr().out
    for promised in re.findall(r"# (agrees|DIFFERS) …", text_of(page)):
        assert re.search(rf"(?m)^{promised}", said)


FEWER = {
    "range(5)": "range(1)",
    "(0.1, 0.25, 0.4, 0.6, 0.8)": "(0.4,)",
    "(low, high, 6)": "(low, high, 3)",
    "world_prompts(16)": "world_prompts(5)",
    "num_images=16": "num_images=2",
    "in (1.0, 2.0)": "in (2.0,)",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    """From top to bottom, with fewer seeds and images; it is kept with small outputs."""
    matplotlib.use("agg")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells) and path.stat().st_size < 250_000
    source = "\n".join(cell.source for cell in cells)
    for many, few in FEWER.items():
        source = source.replace(many, few)
    exec(compile(source, path.name, "exec"), {"__name__": "__main__"})
    matplotlib.pyplot.close("all")


IN_A_KERNEL = """
import sys, warnings
import IPython, ipykernel.zmqshell
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import tqdm.auto
sys.exit("; ".join(str(warning.message) for warning in seen) or None)
"""


def test_progress_bars_do_not_warn_in_a_notebook() -> None:
    """As they do there without ipywidgets."""
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
