"""Options that were renamed: an old name is refused in one sentence that has the new one."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from paths import ROOT

from tempera.config.compose import composed
from tempera.config.messages import sentence
from tempera.config.old_names import RENAMED, renamed
from tempera.config.search import DIRECTORIES, SHIPPED, Directories
from tempera.errors import TemperaError
from tempera.runtime.files import fingerprint, write_json
from tempera.training.checkpoint import FORMAT, RECORD, fix_record

BESIDE = {
    ("eval", "path"): ["data=file"],
    ("tune", "path"): ["data=file"],
    ("export", "path"): ["layout=dpg"],
    ("train_draft", "limit"): ["train_data=generated"],
}
"""Choices with which an option is there."""


@pytest.mark.parametrize("config", RENAMED)
def test_every_new_name_is_an_option(config: str) -> None:
    usual = composed(config, [])
    for old, new in RENAMED[config].items():
        beside = BESIDE.get((config, old))
        cfg = composed(config, beside) if beside else usual
        group, _, name = new.rpartition(".")
        assert name in OmegaConf.select(cfg, group), new
        assert old not in cfg


@pytest.mark.parametrize(
    ("config", "typed", "wanted"),
    [
        ("eval", "limit=512", "`limit` is now `data.limit`: give data.limit=512"),
        ("eval", "+limit=5", "`limit` is now `data.limit`: give data.limit=5"),
        ("eval", "path=mine.txt", "`path` is now `data.path`: give data.path=mine.txt"),
        ("tune", "offset=7", "`offset` is now `data.offset`: give data.offset=7"),
        ("export", "path=p", "`path` is now `layout.path`: give layout.path=p"),
        ("prepare", "limit=80", "`limit` is now `source.limit`: give source.limit=80"),
        ("train_draft", "limit=9", "`limit` is now `train_data.limit`: give train_data.limit=9"),
        ("train_draft", "decay=cosine", "`decay` is now `training.decay`: give training.decay=cos"),
        ("train_draft", "++lr=1e-3", "`lr` is now `training.lr`: give training.lr=0.001"),
        ("train_draft", "~steps", "`steps` is now `training.steps`: give training.steps=VALUE"),
    ],
)
def test_an_old_name_is_told_with_the_new_one(config: str, typed: str, wanted: str) -> None:
    with pytest.raises(TemperaError) as problem:
        composed(config, [typed])
    assert str(problem.value).startswith(wanted)
    assert "\n" not in str(problem.value)


def test_a_method_keeps_its_short_names() -> None:
    assert composed("eval", ["method=entropy", "decay=4"]).rule.decay == 4
    assert composed("eval", ["model=shapes_mar", "method=ar", "steps=6"]).decoding.steps == 6
    assert composed("eval", ["method=lantern", "delta=0.2", "proximity=l2"]).rule.delta == 0.2
    assert renamed("eval", "decay", ["decay=4"]) is None
    assert renamed("bench", "limit", ["limit=4"]) is None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Files that were written for an earlier version, in --config-dir."""
    globally = {
        "experiment/small": "limit: 7",
        "experiment/reads": "speed: {prompts: '${limit}'}",
        "local/default": "lr: 0.1",
        "rule/mine": "path: x\nrule: {_target_: tempera.rules.standard.Exact, path: '${path}'}",
    }
    files = {name: f"# @package _global_\n{text}\n" for name, text in globally.items()}
    files["data/mine"] = "path: mine.txt\nlimit: ${limit}\n"
    for name, text in files.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "option", "wanted"),
    [
        (
            "eval",
            "experiment=small",
            "`limit` is now `data.limit`: .* in a file data: {limit: 7}",
        ),
        ("train_draft", "seed=1", "`lr` is now `training.lr`: .* in a file training: {lr: 0.1}"),
        ("eval", "experiment=reads", r"`limit` is now `data.limit`: write \${data.limit}"),
        ("eval", "data=mine", "`limit` is now `data.limit`: leave that line out of your file"),
    ],
)
def test_an_old_name_in_a_file_of_ones_own_is_told(
    config: str, option: str, wanted: str, own: Path
) -> None:
    token = DIRECTORIES.set(Directories(SHIPPED.main, (own,)))
    try:
        with pytest.raises(Exception) as problem:  # noqa: PT011  its sentence is what counts
            OmegaConf.to_container(composed(config, [option]), resolve=True)
        said = sentence(problem.value, config, [option])
    finally:
        DIRECTORIES.reset(token)
    assert said is not None and re.search(wanted, said) and "\n" not in said, said


def test_data_that_cannot_be_limited_are_told_with_those_that_can() -> None:
    with pytest.raises(TemperaError, match="train_data.limit` .* it belongs to train_data=gen"):
        composed("train_draft", ["train_data=shards", "train_data.limit=9"])


def test_an_option_of_ones_own_may_have_a_name_that_is_free_again(own: Path) -> None:
    token = DIRECTORIES.set(Directories(SHIPPED.main, (own,)))
    try:
        assert composed("eval", ["rule=mine", "path=y"]).rule.path == "y"
    finally:
        DIRECTORIES.reset(token)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("-m method=ar limit=1,2", "`limit` is now `data.limit`: give data.limit="),
        ("-m method=ar +limit=1,2", "none was started:\n  +limit=1: `limit` is now `data.limit`"),
        ('-m hydra.sweeper.cases=["method=ar limit=3"]', "`limit` is now `data.limit`: give"),
    ],
)
def test_a_sweep_with_an_old_name_does_not_begin(
    options: str,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[object] = []
    monkeypatch.setattr("tempera.commands.evaluate.main", begun.append)
    flag, _, rest = options.partition(" ")
    arguments = [rest] if "cases" in rest else rest.split()
    monkeypatch.setattr(sys, "argv", ["eval/run.py", flag, *arguments, "tracking=none"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
    assert wanted in capsys.readouterr().err and not begun


@pytest.mark.parametrize(
    ("script", "options", "module", "names"),
    [
        (
            "train_draft/main.py",
            "training.lr=1e-3,1e-4 training.steps=3",
            "train",
            {"training.lr=0.0001,training.steps=3", "training.lr=0.001,training.steps=3"},
        ),
        (
            "eval/run.py",
            "experiment=frontier method=ar data.limit=1,2",
            "evaluate",
            {"data.limit=1,method=ar", "data.limit=2,method=ar"},
        ),
        ("eval/run.py", "experiment=study method=ar data.limit=1", "evaluate", {"method=ar"}),
    ],
)
def test_the_jobs_of_a_sweep_have_the_new_names(
    script: str,
    options: str,
    module: str,
    names: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"tempera.commands.{module}.main", lambda cfg: None)
    monkeypatch.setattr(sys, "argv", [script, "-m", *options.split(), "hydra.sweep.dir=s"])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert {job.name for job in Path("s").iterdir() if job.is_dir()} == names


def test_a_training_that_an_earlier_version_began_is_resumed(tmp_path: Path) -> None:
    """Its checkpoints carry the fingerprint of the record as it was written."""
    recipe = {"steps": 4, "lr": 0.1}
    old = {
        "format": FORMAT,
        "limit": "${family.images}",
        "epochs": None,
        "cross_entropy": 0.1,
        "recipe": recipe,
        "train_data": {"draws": False, "limit": "${limit}"},
        "source": {"seed": 0, "limit": "${limit}"},
    }
    cfg = composed("train_draft", ["train_data=laion_coco"])
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    new = {
        "recipe": recipe,
        "train_data": {"draws": False, "limit": raw["train_data"]["limit"]},
        "source": {"seed": 0, "limit": raw["source"]["limit"]},
    }
    write_json(tmp_path / RECORD, old)
    assert fix_record(tmp_path, new, write=True) == fingerprint(old)
    for other in ({"recipe": recipe | {"lr": 0.2}}, {"train_data": {"draws": False, "limit": 9}}):
        with pytest.raises(TemperaError, match="was made with"):
            fix_record(tmp_path, new | other, write=True)
