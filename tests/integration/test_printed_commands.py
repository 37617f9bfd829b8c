"""A command that the program prints can be pasted: each is run here, from the directory in which
it was printed, and does what was said.
"""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import CONF, ROOT

from tempera.config.search import SHIPPED

QUIET = "tracking=none hydra/job_logging=none hydra/hydra_logging=none"
RUN = f"{QUIET} speed.prompts=0 metrics=none data.limit=1 replays=0"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in an empty directory: (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)
    model = (CONF / "model" / "shapes.yaml").read_text(encoding="utf-8")
    plain = re.sub(r"(?m)^(entropy_temperature|min_p): .*\n", "", model)
    own = tmp_path / "own"
    for name, text in {
        "model/plain": plain.replace("name: shapes", "name: plain"),
        "method/mine": "# @package _global_\ndefaults: [eagle]\nboost: 1\n",
        "method/mine2": "# @package _global_\ndefaults: [eagle]\nboost: 1\n",
    }.items():
        file = own / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def call(line: str, *more: str) -> tuple[int, str, str]:
        words = [*shlex.split(line.removeprefix("python ")), *shlex.split(" ".join(more))]
        monkeypatch.setattr(sys, "argv", [str(ROOT / words[0]), *words[1:]])
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            SHIPPED.use()
        return status, *capsys.readouterr()

    return call


def printed(said: str, after: str) -> str:
    """The command behind a word."""
    (found,) = re.findall(rf"(?m)^.*?{after}: ((?:python|tempera-).*?)(?:   \(.*)?$", said)
    return str(found)


def test_the_command_of_a_job_that_failed_fails_alike(run: Run) -> None:
    line = f"eval/run.py -m -cd own method=mine,mine2 boost=2 device=cuda:77 {RUN}"
    status, _, err = run(line)
    assert status == 1
    command = re.findall("(?m)^failed: (.*)$", err)[0]
    reason = err.splitlines()[1].strip()
    status, _, err = run(command)
    assert status == 1 and err.strip() == f"error: {reason}"


@pytest.mark.slow
def test_the_command_of_a_trained_draft_decodes_with_it(run: Run, tmp_path: Path) -> None:
    quick = (
        "training.steps=1 training.batch_size=2 training.warmup_steps=0 training.holdout=2 "
        "training.decodes=1 training.validate_every=1"
    )
    status, out, err = run(f"train_draft/main.py -cd own model=plain {quick} {QUIET}")
    assert status == 0, err
    status, _, err = run(printed(out, "draft"), RUN, "hydra.run.dir=next")
    assert status == 0, err
    record = json.loads((tmp_path / "next" / "run.json").read_text())
    assert "model=plain" in record["overrides"]


def test_the_command_that_trains_on_shards_takes_them(run: Run) -> None:
    status, out, err = run(
        "train_draft/prepare.py -cd own model=plain source=shapes source.limit=80 shard_size=40 "
        f"{QUIET}"
    )
    assert status == 0, err
    status, out, err = run(printed(out, "train on them"), QUIET, "dry_run=true")
    assert status == 0 and "to do: " in out, err


@pytest.mark.slow
def test_the_command_of_the_fastest_setting_decodes(run: Run, tmp_path: Path) -> None:
    few = "data.limit=1 images=1 timed=1 repeats=1 runs=1 depths=[2] trees=[]"
    status, out, err = run(f"eval/tune.py -cd own model=plain {few} metrics=none {QUIET}")
    assert status == 0, err
    status, _, err = run(printed(out, "use"), RUN, "hydra.run.dir=next")
    assert status == 0, err
    record = json.loads((tmp_path / "next" / "run.json").read_text())
    assert "model=plain" in record["overrides"]


def test_a_dry_run_of_a_preset_leaves_nothing_in_its_directory(run: Run, tmp_path: Path) -> None:
    line = f"eval/run.py -m experiment=frontier method=ar,eagle dry_run=true {RUN}"
    status, _, err = run(line)
    assert status == 0, err
    left = [path for path in (tmp_path / "outputs").rglob("*") if path.is_dir()]
    assert [path.name for path in left] == ["frontier"]


def test_options_of_a_search_that_is_not_made_are_refused(run: Run) -> None:
    status, _, err = run(f"eval/run.py method=ar matching.prompts=7 {RUN}")
    assert status == 1 and "matching.prompts=7" in err and "expected_length" in err
