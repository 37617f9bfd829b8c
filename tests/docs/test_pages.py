"""README, CONTRIBUTING and docs/ hold together: links, file names, widths, lists, commands."""

import re
import shlex
from pathlib import Path

import pytest
from markdown_pages import PAGES, blocks, name_of, outside_fences, shown_commands, text_of
from paths import ROOT

from tempera.config.cli import literal
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.reporting import paper_results

README = ROOT / "README.md"
OURS = {
    *("frontier", "frontier_continuous", "relaxations", "study"),
    *("results", "results_mar", "results_speed", "evidence"),
}
"""Presets that are not a paper's."""
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
SCRIPTS = {
    "eval/run.py": "eval",
    "eval/bench.py": "bench",
    "eval/score.py": "score",
    "eval/export.py": "export",
    "eval/report.py": "report",
    "eval/gpu_check.py": "gpu_check",
    "eval/tune.py": "tune",
    "train_draft/main.py": "train_draft",
    "train_draft/prepare.py": "prepare",
}
SHOWN = sorted(
    command
    for command in {command for page in PAGES for command in shown_commands(page)}
    if any(script in command for script in SCRIPTS)
)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "findings/README.md"])
def test_files_behind_links_exist(name: str) -> None:
    """Links of docs/ are checked by `mkdocs build --strict`."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)", text_of(page))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@each_page
def test_tables_and_lists_have_lines_of_their_own(page: Path) -> None:
    inside = r"[^|-]\|--|[.:] - |[.:] \d\. [A-Z]"
    assert [line for line in outside_fences(page) if re.search(inside, line)] == []


@each_page
def test_the_files_it_names_exist(page: Path) -> None:
    roots = "src|tests|conf|eval|train_draft|examples|notebooks|docs|findings"
    named = re.findall(rf"`((?:{roots})/[\w/.]*)`", text_of(page))
    missing = {name for name in named if not (ROOT / name).exists()}
    assert missing <= set(re.findall(r"(?m)^\| `([^`]+)` \| new", text_of(page)))


@each_page
def test_prose_and_code_are_at_most_100_columns_wide(page: Path) -> None:
    """And README's tables, but for those that docs/results/render.py writes."""
    code = "".join(blocks(page, "(?:python|yaml|sh|text)"))
    written = re.findall(r"(?s)<!-- \w+ -->(.*?)<!-- end -->", text_of(page))
    typed = [line for line in outside_fences(page) if line not in "".join(written)]
    prose = [line for line in typed if page == README or not line.startswith("|")]
    assert [line for line in [*prose, *code.splitlines()] if len(line) > 100] == []


def test_two_set_up_commands_and_ci_runs_them() -> None:
    assert re.findall(r"(?m)^    (pip .*)$", text_of(README)) == [
        "pip install -c constraints.txt -e . && python eval/run.py method=coolsd delta=2",
        'pip install -c constraints.txt -e ".[dev]" && pytest -n 2 --dist loadfile',
    ]
    reads = r"grep -E '^    pip install -c constraints\.txt -e ' README.md"
    assert reads in text_of(ROOT / ".ci" / "run")


def test_readme_names_the_methods() -> None:
    section = text_of(README).split("## Methods")[1].split("## Models")[0]
    rows = re.findall(r"(?m)^\| (`[^|]+`) \|", section)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    assert len(names) == 31
    for page in (README, ROOT / "pyproject.toml"):
        assert "thirty-one methods" in text_of(page)


def test_readme_says_which_methods_are_exact() -> None:
    section = text_of(README).split("## Methods")[1].split("## Models")[0]
    rows = re.findall(r"(?m)^\| (`[^|]+`) \|.*\| (yes|no) \|$", section)
    said = {name: exact for names, exact in rows for name in re.findall(r"`(\w+)`", names)}
    for method, exact in said.items():
        model = "shapes_mar" if method in ("cspd", "cspd_exact", "draft") else "shapes"
        rule = Parts.of(composed("eval", [f"method={method}", f"model={model}"])).rule()
        assert (rule is not None and rule.exact) == (exact == "yes"), method


def test_readme_names_the_models() -> None:
    text = text_of(README)
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        assert path.stem in text or path.stem.endswith("_c2i"), path.stem


CONTENTS = {  # numbered tables and figures of each paper, appendices included
    "Cool-SD": (3, 6),
    "LANTERN": (11, 13),
    "SJD": (11, 18),
    "SJD-PAC": (4, 6),
    "CSpD": (4, 21),
}


def numbered(paper: str) -> list[tuple[str, list[int], list[str]]]:
    """Table or Figure, the numbers and the other cells of each row of a paper's list."""
    section = text_of(ROOT / "docs" / "paper_tables.md").split(f"\n### {paper}\n")[1]
    rows = re.findall(r"(?m)^\| (Table|Figure)s? ([\d, ]+) \| (.+) \|$", section.split("\n### ")[0])
    return [
        (kind, [int(one) for one in numbers.split(", ")], cells.split(" | "))
        for kind, numbers, cells in rows
    ]


@pytest.mark.parametrize("paper", CONTENTS)
def test_every_table_and_figure_of_a_paper_is_listed(paper: str) -> None:
    """Once, with a preset and the models whose rows the paper prints, or with the reason why there
    is none.
    """
    found = numbered(paper)
    for kind, count in zip(("Table", "Figure"), CONTENTS[paper], strict=True):
        listed = [one for name, numbers, _ in found if name == kind for one in numbers]
        assert sorted(listed) == list(range(1, count + 1)), kind
    for _, _, (preset, published, about) in found:
        assert about and (preset == "–") == (published == "–")
        if preset == "–":
            continue
        tables = [
            paper_results.find(name).get("models") for name in preset.strip("`").split("`, `")
        ]
        models = set(re.findall(r"`(\w+)`", published))
        named = {paper_results.group(title)["model"] for rows in tables for title in rows or {}}
        assert models and (models == named if all(tables) else models >= named)


def test_every_preset_of_a_paper_is_listed() -> None:
    presets = {path.stem for path in (ROOT / "conf" / "experiment").rglob("*.yaml")}
    presets -= {"paper", "paper_mar", "debug"}  # what the others share, and what is for trying
    presets -= OURS
    page = text_of(ROOT / "docs" / "paper_tables.md")
    cells = " ".join(re.findall(r"(?m)^\| [^|]+ \| (`[^|]+`) \|", page))
    assert set(re.findall(r"`(\w+)`", cells)) == presets
    assert len(presets) == 27 and "Twenty-seven [presets]" in text_of(README)


def test_the_groups_of_conf_are_listed() -> None:
    text = text_of(ROOT / "docs" / "training.md")
    for group in ("source", "train_data"):
        choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert choices <= set(re.findall(r"(?m)^\| `(\w+)` \|", text))


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_needs_weights_or_devices_composes(command: str) -> None:
    words = shlex.split(command)
    at = next(place for place, word in enumerate(words) if word in SCRIPTS)
    options = [word for word in words[at + 1 :] if word != "-m" and not word.startswith("hydra.")]
    if any(option.startswith("launcher=") for option in options):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if "-m" in words:  # the first job of the sweep
        options = [option if "[" in option else option.partition(",")[0] for option in options]
    assert composed(SCRIPTS[words[at]], list(map(literal, options)))
