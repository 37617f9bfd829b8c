"""The pages of docs/extend/ work as written: in a copy, their modules and YAML files are created
and their code and commands run. None touches more than 3 existing files.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_replays import replayed
from hydra.utils import instantiate
from markdown_pages import blocks, commands, text_of
from network_drafts import eagle
from omegaconf import OmegaConf
from page_commands import run
from paths import ROOT
from tiny_networks import PROMPTS, tiny_target

from tempera import Exact, RandomStreams, Tree, decode
from tempera.decoding.probabilities import Sampling
from tempera.drafters.jacobi import sjd
from tempera.drafters.none import NoDraft
from tempera.evaluation.length_search import FreeParameter
from tempera.exactness.tables import check
from tempera.metrics import table
from tempera.targets.conditioners import ClassLabels

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
FILE = re.compile(r"(?:# @package \S+\n)?# ((?:src|conf)/\S+)\n")


def files(page: Path) -> dict[str, str]:
    """The blocks that are files, by their path: it is their first comment."""
    written = [*blocks(page, "python"), *blocks(page, "yaml")]
    return {match[1]: block for block in written if (match := FILE.match(block))}


def metric_entries(page: Path) -> list[dict[str, Any]]:
    """What the page adds to the table of metrics."""
    added = "# added to src/tempera/metrics/metrics.yaml"
    found = [block for block in blocks(page, "yaml") if block.startswith(added)]
    return [entry for block in found for entry in OmegaConf.to_container(OmegaConf.create(block))]


def touched(page: Path, how: str) -> list[str]:
    return re.findall(rf"(?m)^\| `([^`]+)` \| {how}", text_of(page))


@pytest.fixture
def overlay(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's files in it; its modules can be imported as tempera's."""
    before = set(sys.modules)
    for name, text in files(request.param).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".py":
            package = importlib.import_module(".".join(Path(name).parts[1:-1]))
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
    for entry in metric_entries(request.param):
        monkeypatch.setattr(table, "METRICS", (*table.METRICS, table.Metric(**entry)))
    (tmp_path / "prompts.txt").write_text("a small red ring\n", encoding="utf-8")
    (tmp_path / "conf").mkdir(exist_ok=True)
    yield tmp_path
    new = [Path(name).with_suffix("").parts[1:] for name in files(request.param)]
    for name in {".".join(parts) for parts in new} & (set(sys.modules) - before):
        package, _, module = name.rpartition(".")
        del sys.modules[name]
        vars(sys.modules[package]).pop(module, None)


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
with_its_files = pytest.mark.parametrize(
    ("page", "overlay"), [(page, page) for page in PAGES], ids=lambda page: page.stem,
    indirect=["overlay"],
)  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(
    ("overlay", "name"),
    [(ROOT / "docs/extend/drafter.md", name) for name in ("running_mean", "ngram")],
    ids=["running_mean", "ngram"],
    indirect=["overlay"],
)
def test_its_drafters_decode_in_compiled_rounds(
    overlay: Path, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two batches, with the tokens of rounds that are not, and at T = 0 those of no draft."""
    replays = replayed(monkeypatch)
    module = importlib.import_module(f"tempera.drafters.{name}")

    def decoded(drafting: Any, compiled: bool = False) -> list[Any]:
        target = tiny_target(Sampling(3.0, temperature, top_k=4))
        if compiled:
            target.compile()
        drafter = drafting(target)
        ids = [PROMPTS[:2], PROMPTS[-2:]]
        return [decode(target, drafter, Exact(), RandomStreams(0, row), row).tokens for row in ids]

    def drafting(target: Any) -> Any:
        if name == "ngram":
            return module.NGram(3, 1)
        return module.build_running_mean(target, Tree.chain(3))

    expected = decoded(drafting)
    assert all(map(torch.equal, decoded(drafting, compiled=True), expected))
    own = {"propose": 1, "observe": 1} if name == "running_mean" else {}
    assert replays.variants == {"score": 1, "verify": 1, "append": 1, **own}
    if temperature == 0:
        assert all(map(torch.equal, decoded(lambda target: NoDraft()), expected))


@pytest.mark.parametrize("overlay", [ROOT / "docs/extend/rule.md"], indirect=True)
def test_its_rule_has_an_option_that_expected_length_finds(overlay: Path) -> None:
    options = OmegaConf.load(overlay / "conf/rule/power.yaml")
    parameter: FreeParameter = instantiate(options.free_parameter)
    assert parameter.option in options
    least, most = (
        instantiate(options.rule, alpha=end) for end in (parameter.least, parameter.most)
    )
    lengths = [check(rule, Tree.chain(3), rows=1000).accepted_length for rule in (least, most)]
    assert lengths[0] > lengths[1] + 0.5


@each_page
def test_it_touches_at_most_3_existing_files(page: Path) -> None:
    assert sorted(touched(page, "new")) == sorted(files(page))
    assert all(not (ROOT / name).exists() for name in touched(page, "new"))
    assert all((ROOT / name).exists() for name in touched(page, "changed"))
    assert len(touched(page, "changed")) <= 3


@with_its_files
def test_its_code_and_commands_run(page: Path, overlay: Path, monkeypatch: Any) -> None:
    """Laws at the size of test_laws.py, at which faults are seen."""
    monkeypatch.setitem(check.__kwdefaults__, "rows", 20_000)
    module = types.ModuleType(f"walk_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(overlay)
    for block in blocks(page, "python"):
        if not FILE.match(block):
            exec(compile(block, page.name, "exec"), module.__dict__)
    for command in commands(page):
        extra = [] if "report.py" in command else ["--config-dir", str(overlay / "conf")]
        run(command, overlay, monkeypatch, *extra)
    for entry in metric_entries(page):
        runs = [
            file.read_text(encoding="utf-8") for file in overlay.glob("outputs/eval/*/metrics.json")
        ]
        assert any(f'"{entry["key"]}"' in run for run in runs)


RULE_PAGE = ROOT / "docs" / "extend" / "rule.md"


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("overlay", [RULE_PAGE], indirect=True)
@torch.no_grad()
def test_the_rules_of_the_page_run_in_compiled_rounds(
    overlay: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each part, and the tokens of rounds that are not compiled."""
    module = types.ModuleType("walk_compiled")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(RULE_PAGE, "python"):
        if "class Late" in block:  # without the checks of its law
            block = block[: block.index("tree =")]
        if FILE.match(block) or "class Late" in block:
            exec(compile(block, RULE_PAGE.name, "exec"), module.__dict__)
    rules = [module.Power(0.5), module.Late(3, module.Power(0.5))]
    for rule in rules:
        found = []
        for compiled in (True, False):
            replays = replayed(monkeypatch)
            target = tiny_target(Sampling(3.0, temperature=temperature))
            if compiled:
                target.compile()
            drafter = eagle(target, Tree.chain(3))
            streams = RandomStreams(0, ["a", "b"])
            found.append(decode(target, drafter, rule, streams, ["a", "b"]).tokens)
            assert replays.variants["verify"] == compiled
        assert found[0].equal(found[1])
    assert not repr(rules[1]).count(" at 0x")  # a run is told from another by it


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.0])
@pytest.mark.parametrize("overlay", [ROOT / "docs/extend/target.md"], indirect=True)
def test_the_target_of_the_page_decodes_in_compiled_rounds(
    overlay: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each part in two batches, and the tokens of rounds that are not compiled; at
    T = 0 those of no draft.
    """
    replays = replayed(monkeypatch)
    module = importlib.import_module("tempera.targets.plain_llama")
    torch.manual_seed(0)
    network = module.untrained(side=3, classes=4, vocab_size=12, width=16)

    def decoded(drafting: Any, compiled: bool = False) -> list[Any]:
        target = tiny_target(Sampling(2.0, temperature), network, ClassLabels(4).encode)
        if compiled:
            target.compile()
        drafter = drafting(target)
        batches = [["1", "3"], ["0", "2"]]
        return [decode(target, drafter, Exact(), RandomStreams(0, row), row).tokens
                for row in batches]  # fmt: skip

    expected = decoded(lambda target: sjd(target, 3))
    found = decoded(lambda target: sjd(target, 3), compiled=True)
    assert all(map(torch.equal, found, expected))
    assert set(replays.variants.values()) == {1}
    if temperature == 0:
        assert all(map(torch.equal, decoded(lambda target: NoDraft()), expected))


CONCERNED = [
    "tests/test_layout.py::test_imports_point_downwards",
    "tests/config/test_conf.py::test_no_group_is_forgotten",
    "tests/metrics/test_table.py",
    "tests/docs/test_pages.py::test_readme_names_the_models",
    "tests/docs/test_pages.py::test_the_files_it_names_exist",
    *(
        f"tests/config/test_conf.py::test_every_choice_composes_and_fits_its_target[{choice}]"
        for page in PAGES
        for name in files(page)
        if name.startswith("conf/")
        for choice in ["-".join(Path(name).with_suffix("").parts[1:])]
    ),
]
"""Tests that look at every file, group, metric or model, and those of the pages' choices."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this checkout, as it lies here, in which all the pages' steps are done."""
    clone = tmp_path_factory.mktemp("clone")
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    for page in PAGES:
        for name, text in files(page).items():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_text(text, encoding="utf-8")
        for block in blocks(page, "yaml"):
            if match := re.match(r"# added to (src/\S+\.yaml)\b.*\n", block):
                with (clone / match[1]).open("a", encoding="utf-8") as file:
                    file.write(block[match.end() :])
    with (clone / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n`model=plain_llama`\n")  # the target's row
    return clone


def in_clone(clone: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command there, on the clone's own package."""
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_checkout_that_followed_all_pages_passes_the_tests(extended: Path) -> None:
    done = in_clone(extended, "pytest", "-q", "-m", "", *CONCERNED)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_what_the_pages_add_is_clean(extended: Path) -> None:
    made = [name for page in PAGES for name in files(page) if name.endswith(".py")]
    check = ["ruff", "check", "--extend-ignore", "D1", *made]  # short, so without docstrings
    for command in (check, ["ruff", "format", "--check", *made]):
        done = in_clone(extended, *command)
        assert done.returncode == 0, done.stdout
