"""The commands of README and docs/ run, in order, in one directory; README's Python runs too."""

import re
from pathlib import Path

import pytest
from markdown_pages import PAGES, blocks, commands, name_of, text_of
from page_commands import points, run
from paths import ROOT
from PIL import Image

EXTENDING = ROOT / "docs" / "extend"
COMMANDS = list(
    dict.fromkeys(
        command for page in PAGES if page.parent != EXTENDING for command in commands(page)
    )
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with what the commands take from the user: a file of prompts, and photos
    with captions beside them.
    """
    directory = tmp_path_factory.mktemp("docs")
    (directory / "prompts.txt").write_text(
        "a small red ring\na large blue star\n", encoding="utf-8"
    )
    (directory / "photos").mkdir()
    for number in range(120):
        Image.new("RGB", (80, 64), (2 * number, 90, 200)).save(
            directory / "photos" / f"{number}.png"
        )
        (directory / "photos" / f"{number}.txt").write_text(
            f"photo {number} of the sky\n", encoding="utf-8"
        )
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one working directory: later commands use what earlier ones made."""
    if "notebooks" not in command and "docs/replay_animation.py" not in command:
        run(command, workplace, monkeypatch)


def test_the_commands_wrote_the_documented_files(workplace: Path) -> None:
    assert len(list((workplace / "outputs").glob("eval/*/metrics.json"))) >= 5
    assert (workplace / "outputs/train_draft/shapes/draft/model.safetensors").is_file()
    for name in ("report.md", "results.csv"):
        assert (workplace / "outputs/report" / name).is_file()
    runs = {path.parent for path in (workplace / "outputs/frontier").rglob("metrics.json")}
    sweeps = [command for command in COMMANDS if "-m experiment=frontier " in command]
    assert len(runs) == len(set[frozenset[str]]().union(*map(points, sweeps)))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != EXTENDING and blocks(page, "python")],
    ids=name_of,
)  # fmt: skip
def test_its_python_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), namespace)
    said = capsys.readouterr().out
    for promised in re.findall(r"# (agrees|DIFFERS) …", text_of(page)):
        assert re.search(rf"(?m)^{promised}", said)
