"""eval/run.py as a person calls it, on tiny random networks."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cases import slow_rows_but
from paths import ROOT
from tiny_evaluation import tiny_options

from tempera.reporting import figures

SCRIPT = ROOT / "eval" / "run.py"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_options(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Call the script in an empty directory; returns (exit status, standard output, standard
    error).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "acceptance_map", lambda path, *_: path.touch())

    def call(*arguments: str) -> tuple[int, str, str]:
        idle = ("drafter",) if "method=ar" in arguments else ()
        if any(argument.startswith("prompt=") for argument in arguments):
            idle += ("limit",)
        known = [option for option in options if not option.startswith(idle)]
        flags = [argument for argument in arguments if argument.startswith("-")]
        monkeypatch.setattr(
            sys,
            "argv",
            [
                str(SCRIPT),
                *flags,
                *known,
                *(argument for argument in arguments if argument not in flags),
            ],
        )
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return call


def metrics(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "metrics.json").read_text())


@pytest.mark.slow
def test_default_directory_and_command_line(run: Any, tmp_path: Path) -> None:
    status, out, error = run("delta=2", "floor=1", "depth=3")
    assert status == 0, error
    (directory,) = (tmp_path / "outputs" / "eval").glob("*_coolsd*")
    assert f"report: {directory.relative_to(tmp_path)}" in out.replace(str(tmp_path) + "/", "")
    content = metrics(directory)
    assert content["settings"]["delta"] == 2
    assert content["settings"]["method"] == "coolsd"
    assert content["settings"]["tree"] == "chain"
    assert content["name"].startswith("coolsd drafter.path=")
    assert content["name"].endswith(" depth=3 floor=1 δ=2")
    assert len(content["acceptance_by_depth"]) == 3
    assert content["about"]["overrides"][-1] == "depth=3"
    assert len(list((directory / "images").iterdir())) == 6


@pytest.mark.slow
def test_a_prompt_and_files_of_prompts(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a red ring\na blue ring\na white star\n")
    assert (
        run(
            "method=ar",
            "prompt=a large green star, left of a small white ring",
            "hydra.run.dir=one",
        )[0]
        == 0
    )
    rows = pq.read_table(tmp_path / "one" / "results.parquet").to_pylist()
    assert [row["text"] for row in rows] == ["a large green star, left of a small white ring"]
    assert (
        run("method=ar", "data=file", "path=mine.txt", "offset=1", "limit=5", "hydra.run.dir=two")[
            0
        ]
        == 0
    )
    rows = pq.read_table(tmp_path / "two" / "results.parquet").to_pylist()
    assert [(row["id"], row["text"]) for row in rows] == [
        ("mine-000002", "a blue ring"),
        ("mine-000003", "a white star"),
    ]


@pytest.mark.slow
def test_a_sweep_gives_each_job_its_directory(run: Any, tmp_path: Path) -> None:
    assert run("-m", "delta=1.1,2", "speed.prompts=0", "hydra.sweep.dir=sweep")[0] == 0
    assert [
        metrics(path)["settings"]["delta"] for path in sorted((tmp_path / "sweep").glob("?"))
    ] == [1.1, 2]


@pytest.mark.slow
def test_the_same_directory_resumes_and_refuses_other_settings(run: Any, tmp_path: Path) -> None:
    assert run("limit=3", "hydra.run.dir=run")[0] == 0
    first = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "images").iterdir()}
    assert run("batch_size=2", "hydra.run.dir=run")[0] == 0
    assert metrics(tmp_path / "run")["images"] == 6
    assert {
        name: (tmp_path / "run" / "images" / name).stat().st_mtime_ns for name in first
    } == first
    for changed, sentence in (
        ("delta=3", "made with delta=1.1, but this one has delta=3"),
        ("seed=1", "made with seed=0, but this one has seed=1"),
        ("guidance=1", "made with guidance=2.0, but this one has guidance=1"),
    ):
        status, _, error = run(changed, "hydra.run.dir=run")
        assert status == 1
        assert sentence in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert metrics(tmp_path / "run")["settings"]["delta"] == 1.1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    slow_rows_but(
        [
            (["data=file"], "data=file is no prompt file"),
            (["data=file", "path=nowhere.txt"], "there is no file nowhere.txt"),
            (["data=file", "path=broken.tsv"], "broken.tsv:3 "),
            (["prompt="], "the prompt must be one printable text"),
            (["limit=0"], "`limit=0`"),
            (["limit=many"], "`limit=many`"),
            (["batch_size=0"], "`batch_size=0`"),
            (["batch_size=big"], "`batch_size=big`"),
            (["seed=x"], "`seed=x`"),
            (["speed.prompts=-1"], "speed.prompts=-1"),
            (
                ["metrics=real", "metrics.names=[fidd]"],
                "there is no metric fidd: did you mean fid? The names are",
            ),
            (
                ["metrics=real", "metrics.names=[fid]"],
                "there are no real images for FID: give metrics.reference=DIR",
            ),
            (
                ["metrics=real", "metrics.names=[hps]", "metrics.hps.weights=no.pt"],
                "HPS_v2.1_compressed.pt, which a metric reads, is not at no.pt",
            ),
            (
                ["metrics=shapes", "model.name=large"],
                "metrics=shapes evaluates pictures of the shapes world, not of large",
            ),
            (["tracking=wandb", "tracking.mode=on"], "`tracking.mode=on`"),
            (["hydra.run.dir=/dev/null/run"], "/dev/null/run"),
        ],
        (["data=file"], "data=file is no prompt file"),
    ),
)
def test_mistakes_are_reported_in_one_sentence(
    run: Any, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "broken.tsv").write_text("Prompt\tCategory\na\tb\na\tb\tc\n")
    status, _, error = run(*arguments)
    assert status == 1
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("metrics.json"))


@pytest.mark.slow
def test_two_processes_share_a_run(options: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(SCRIPT),
        *options,
        "batch_size=2",
    ]
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'two'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("report: ") == 1
    assert metrics(tmp_path / "two")["images"] == 6
    assert len(list((tmp_path / "two" / "records").glob("*.parquet"))) == 4  # 3 prompts each
