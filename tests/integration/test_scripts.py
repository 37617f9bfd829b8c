"""Bad input, given to the real scripts on the shipped model: one sentence, exit status 1, nothing
half-written.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file, save_file
from tiny_training import tiny_draft, tiny_target

from tempera.shapes.networks import SHIPPED

SHORT = [
    "limit=1",
    "speed.prompts=0",
    "metrics=none",
    "tracking=none",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a script in an empty directory, in this process: (exit status, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(script: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        status = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        return status, capsys.readouterr().err

    return call


def refused(status: int, err: str, *words: str) -> None:
    assert status == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def nothing_written(directory: Path) -> None:
    """Neither results nor temporary files; Hydra's own record of the options may be there."""
    left = [
        path
        for path in (directory / "outputs").rglob("*")
        if path.is_file() and ".hydra" not in path.parts
    ]
    assert [path.name for path in left if path.name not in ("run.json", "multirun.yaml")] == []


def a_draft(directory: Path, **tensors: torch.Tensor) -> Path:
    """A copy of the shipped draft, with some of its tensors replaced."""
    directory.mkdir()
    (directory / "config.json").write_bytes((SHIPPED / "draft" / "config.json").read_bytes())
    save_file(
        {**load_file(SHIPPED / "draft" / "model.safetensors"), **tensors},
        directory / "model.safetensors",
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("method=foo", ["method=foo", "coolsd"]),
        ("model=foo", ["model=foo", "shapes"]),
        ("dleta=2", ["`dleta`", "`delta`"]),
        ("delta=abc", ["`delta=abc`"]),
        ("delta=-1", ["delta=-1"]),
        (
            "method=eagle delta=2",
            ["`delta`", "method=eagle", "rule=relaxed"],
        ),
        ("drafter.path=nowhere", ["nowhere"]),
        ("prompt=", ["prompt", "one printable text"]),
        ("data=file path=nowhere.txt", ["nowhere.txt"]),
        ("limit=0", ["limit=0"]),
        ("batch_size=0", ["batch_size"]),
        ("top_p=0", ["top_p=0"]),
    ],
)
def test_bad_options(arguments: str, words: list[str], run: Any, tmp_path: Path) -> None:
    refused(*run("eval/run.py", *SHORT, *arguments.split()), *words)
    nothing_written(tmp_path)


@pytest.mark.slow
def test_a_draft_of_another_target(run: Any, tmp_path: Path) -> None:
    tiny_draft(tiny_target()).save_pretrained(tmp_path / "tiny")
    refused(*run("eval/run.py", *SHORT, f"drafter.path={tmp_path / 'tiny'}"), "tiny", "hidden size")
    nothing_written(tmp_path)


@pytest.mark.slow
def test_a_truncated_draft(run: Any, tmp_path: Path) -> None:
    weights = a_draft(tmp_path / "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(
        *run("eval/run.py", *SHORT, f"drafter.path={tmp_path / 'cut'}"), str(weights), "truncated"
    )
    nothing_written(tmp_path)


@pytest.mark.slow
def test_a_pickle_where_safetensors_is_expected(run: Any, tmp_path: Path) -> None:
    weights = a_draft(tmp_path / "pickled") / "model.safetensors"
    torch.save(
        {name: tensor.clone() for name, tensor in load_file(weights).items()},
        weights.with_suffix(".new"),
    )
    weights.with_suffix(".new").replace(weights)
    refused(
        *run("eval/run.py", *SHORT, f"drafter.path={tmp_path / 'pickled'}"), str(weights), "pickle"
    )
    nothing_written(tmp_path)


@pytest.mark.slow
def test_a_draft_that_gives_nan(run: Any, tmp_path: Path) -> None:
    weights = load_file(SHIPPED / "draft" / "model.safetensors")
    name = next(name for name in weights if name.startswith("fc"))
    a_draft(tmp_path / "sick", **{name: torch.full_like(weights[name], float("nan"))})
    refused(*run("eval/run.py", *SHORT, f"drafter.path={tmp_path / 'sick'}"), "NaN in fc")
    nothing_written(tmp_path)


@pytest.mark.slow
def test_a_caption_file_with_a_broken_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "captions.tsv").write_text(
        "Prompt\tCategory\na red ring\tshapes\na blue\tstar\tshapes\n", encoding="utf-8"
    )
    refused(
        *run("eval/run.py", *SHORT, "data=file", "path=captions.tsv", "limit=2"),
        "captions.tsv:3",
    )
    nothing_written(tmp_path)


@pytest.mark.slow
def test_training_refuses_too(run: Any, tmp_path: Path) -> None:
    refused(
        *run("train_draft/main.py", "tracking=none", "lr=fast"),
        "`lr=fast`",
    )
    refused(
        *run("train_draft/main.py", "tracking=none", "learning_rate=1"),
        "`learning_rate`",
    )
    refused(
        *run("train_draft/prepare.py", "source=imagefolder"),
        "`source.path`",
    )
    nothing_written(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--delta", "2"], ["write delta=2"]),
        (["--experimental-rerun=run.pickle"], ["reads a pickle"]),
        (["method=eagle", "delta=2"], ["`delta`", "rule=relaxed"]),
        (["hydra.run.dir=file/run"], ["cannot write", "file/run", "hydra.run.dir=DIR"]),
        (["-m", "delta=2,-1"], ["delta=-1"]),
    ],
)
def test_in_a_separate_process(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(ROOT / "eval" / "run.py"), *arguments, *SHORT]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last


@pytest.mark.parametrize("script", ["eval/run.py", "eval/report.py", "train_draft/main.py"])
def test_help_begins_with_the_usage(script: str) -> None:
    command = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith(f"python {script} ")
    assert "\nOptions (name=value):\n" in done.stdout and "\nGroups (" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]])
def test_a_reader_that_stops_early_is_no_error(arguments: list[str]) -> None:
    """As in `--help | head`: quiet, and with the status that shells give."""
    command = [sys.executable, str(ROOT / "eval/run.py"), *arguments]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert made.stdout is not None and made.stderr is not None
    made.stdout.close()
    assert made.stderr.read() == ""
    assert made.wait(300) == 141


SLOW = {"transformers", "torchvision", "torch._dynamo", "matplotlib", "wandb"}
"""Packages that take seconds to import."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "kept_out"),
    [
        ("eval/run.py", ["method=x"], {"torch", *SLOW}),
        ("eval/run.py", ["dleta=2"], {"torch", *SLOW}),
        ("eval/run.py", ["method=eagle", "delta=2"], {"torch", *SLOW}),
        ("eval/run.py", ["--help"], {"torch", *SLOW}),
        ("eval/report.py", ["nowhere"], {"torch", *SLOW}),
        ("eval/run.py", ["delta=abc"], {"matplotlib", "wandb"}),
        ("eval/run.py", ["depth=0"], {"matplotlib", "wandb"}),
        ("eval/run.py", ["limit=abc"], SLOW),
        ("eval/run.py", ["batch_size=0"], SLOW),
        ("eval/run.py", ["drafter.path=nowhere"], {"matplotlib", "wandb"}),
        ("eval/run.py", ["tracking.mode=abc"], SLOW),
        ("eval/tune.py", ["budget=abc"], SLOW),
        ("eval/bench.py", ["repeats=0"], SLOW),
        ("eval/run.py", ["method=lantern", "k=0"], SLOW),
        ("eval/run.py", ["metrics=real", "metrics.names=[foo]"], SLOW),
        ("eval/calibrate.py", ["limit=abc"], SLOW),
        ("eval/calibrate.py", ["method=ar"], SLOW),
        ("train_draft/main.py", ["lr=abc"], {"accelerate", *SLOW}),
        ("train_draft/prepare.py", ["shard_size=abc"], SLOW),
    ],
)
def test_an_answer_does_not_wait_for_imports(
    script: str, arguments: list[str], kept_out: set[str], tmp_path: Path
) -> None:
    """What the answer needs not is not imported."""
    code = (
        f"import runpy, sys; sys.argv = {[str(ROOT / script), *arguments]}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"finally: print('imported', sorted({kept_out} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == ("--help" not in arguments)
    assert done.stdout.splitlines()[-1] == "imported []"


def test_a_bug_is_one_sentence_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    code = (
        "import sys, tempera.commands.evaluate as evaluate, tempera.commands.scripts as scripts\n"
        "evaluate.main = lambda cfg: {}['lost']\n"
        "sys.argv = ['eval/run.py', 'hydra.run.dir=run']\n"
        "scripts.evaluate()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "KeyError" in done.stderr and "HYDRA_FULL_ERROR=1" in done.stderr
    assert "Traceback" in (tmp_path / "run" / "eval.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(streams: str, tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / 'eval/run.py'} --cfg job {streams}"
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=300).returncode == 0


def test_a_terminal_of_ascii_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "eval/run.py"), "--help"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True, timeout=300)
    assert done.returncode == 0 and done.stdout.isascii()
