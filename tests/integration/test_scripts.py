"""The scripts as a person calls them, on tiny random networks: results where they belong, and for
bad input one sentence, exit status 1 and nothing half-written.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cases import slow_but
from hub import Hub
from omegaconf import OmegaConf
from paths import ROOT
from tiny_evaluation import tiny_options

from hydra_plugins.tempera_cases import CaseSweeper
from tempera.commands.evaluate import check_files
from tempera.config.compose import composed
from tempera.decoding.trees import tree_names
from tempera.errors import TemperaError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_options(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(
    no_figures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:  # fmt: skip
    """Call a script in an empty directory, in this process: (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def call(script: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return call


def refused(answer: tuple[int, str, str], *words: str) -> None:
    status, _, err = answer
    assert status == 1
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


def metrics(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "metrics.json").read_text()))


@pytest.mark.slow
def test_a_run_is_resumed_by_its_directory_alone(run: Run, tiny: list[str]) -> None:
    given = [one for one in tiny if not one.startswith("limit")]
    given += ["method=coolsd", "delta=2", "floor=1", "depth=3"]
    status, out, err = run("eval/run.py", *given, "data.limit=3")
    assert status == 0, err
    (place,) = Path("outputs/eval").glob("*_coolsd*")
    assert "report: " in out and place.name in out
    content = metrics(place)
    settings = content["settings"]
    assert (settings["delta"], settings["method"], settings["tree"]) == (2, "coolsd", "chain")
    assert content["name"].startswith("coolsd drafter.path=")
    assert content["name"].endswith(" depth=3 floor=1 δ=2")
    assert len(content["acceptance_by_depth"]) == 3
    assert content["about"]["overrides"][-1] == "data.limit=3"
    images = {path: path.stat().st_mtime_ns for path in (place / "images").iterdir()}
    here = f"hydra.run.dir={place}"
    assert run("eval/run.py", *given, "data.limit=6", "batch_size=2", here)[0] == 0
    assert metrics(place)["images"] == len(list((place / "images").iterdir())) == 6
    assert {path: path.stat().st_mtime_ns for path in images} == images and len(images) == 3
    refused(run("eval/run.py", *given, "seed=1", here), "made with seed=0, but this run has seed=1")
    assert metrics(place)["settings"]["seed"] == 0


@pytest.mark.slow
def test_prompts_of_a_sweep_and_a_text_with_a_comma(run: Run, tiny: list[str]) -> None:
    Path("mine.txt").write_text("a red ring\na blue ring\na white star\n")
    plain = ["method=ar", *(one for one in tiny if not one.startswith(("drafter", "limit")))]
    file = ["data=file", "data.path=mine.txt", "data.limit=1"]
    assert (
        run("eval/run.py", "-m", *plain, *file, "data.offset=1,2", "hydra.sweep.dir=sweep")[0] == 0
    )
    text = "a large green star, left of a small white ring"
    assert run("eval/run.py", *plain, f"prompt={text}", "hydra.run.dir=one")[0] == 0
    found = [
        (row["id"], row["text"])
        for place in (*sorted(Path("sweep").glob("?")), Path("one"))
        for row in pq.read_table(place / "results.parquet").to_pylist()
    ]
    assert found[:2] == [("mine-000002", "a blue ring"), ("mine-000003", "a white star")]
    assert [text for _, text in found[2:]] == [text]


MISTAKES = {
    "eval/run.py experiment=study": "add -m",
    "eval/run.py data=file data.path=broken.tsv": "broken.tsv:3 ",
    "eval/run.py metrics=real metrics.names=[fid]": "metrics.reference=DIR",
    "eval/run.py metrics=real metrics.names=[hps] metrics.hps.weights=no.pt": "no.pt",
    "eval/run.py tracking=wandb tracking.mode=on": "`tracking.mode=on`",
    "eval/run.py rule._target_=os.system": "os.system",
    "eval/run.py hydra.run.dir=/dev/null/run": "/dev/null/run",
    "train_draft/main.py push_to_hub=mine": "not a repository",
    "train_draft/main.py push_to_hub=me/mine": "hf auth login",
    "train_draft/main.py train_data=shards train_data.path=/absent": "no manifest.json",
    "train_draft/prepare.py source=imagefolder source.path=/absent": "no images in /absent",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_reported_in_one_sentence(line: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.tsv").write_text("Prompt\tCategory\na\tb\na\tb\tc\n")
    script, *arguments = line.split()
    short = ["metrics=none", "data.limit=1"] if script.startswith("eval") else []
    refused(run(script, "tracking=none", *short, *arguments), MISTAKES[line])
    left = [path.name for path in tmp_path.rglob("*") if path.suffix in (".json", ".png")]
    assert left == []


@pytest.mark.slow
def test_a_sweep_that_lacks_a_draft_names_the_job_and_the_command(run: Run, tmp_path: Path) -> None:
    status, _, err = run("eval/run.py", "-m", "model=lumina", "method=ar,coolsd", "metrics=none")
    assert status == 1 and err.startswith("error: 1 of 2 jobs cannot run, so none was started:\n")
    assert "method=coolsd: " in err and "train_draft/main.py model=lumina" in err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("prompts", slow_but(["prompt=dog", "data=coco"], "data=coco"))
def test_a_sweep_whose_files_cannot_be_had_ends_before_the_first_job(
    prompts: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr("tempera.commands.evaluate.main", begun.append)
    line = ["eval/run.py", "-m", "model=lumina", "method=ar,scd", "metrics=none", "tracking=none"]
    with Hub(tmp_path / "cache") as hub:
        hub.here(monkeypatch, offline=True)
        status, _, err = run(*line, prompts)
        assert (status, begun) == (1, []) and not Path("outputs").exists()
        assert err.count("the hub cannot be reached") == err.count("Lumina-mGPT-7B-768 ") == 1
        assert ("coco2017" in err) == (prompts == "data=coco")
        assert run(*line, prompts, "dry_run=true")[0] == 0 and len(begun) == 2


@pytest.mark.slow
def test_files_of_an_independent_draft_are_checked_too(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.touch()
    given = ["model=llamagen_3b_c2i", "prompt=1", f"weights={file}"]
    given.append(f"model.tokenizer_weights={file}")
    plain = composed("eval", [*given, "method=ar"])
    check_files([plain])
    with pytest.raises(TemperaError, match="contains no c2i_L_384.pt"):
        check_files([plain, composed("eval", [*given, "method=independent"])])


def test_a_bug_is_one_sentence_and_its_traceback_is_in_the_log(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempera.commands.evaluate.main", tree_names)  # takes no options
    refused(run("eval/run.py", "hydra.run.dir=run"), "TypeError", "a bug in tempera", "log file")
    assert "Traceback" in Path("run/eval.log").read_text(encoding="utf-8")


def test_an_error_in_a_part_of_ones_own_is_no_bug_of_tempera(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempera.commands.evaluate.main", lambda cfg: {}["lost"])
    words = "KeyError", "<lambda> of test_scripts.py, line", "not tempera's", "HYDRA_FULL_ERROR=1"
    refused(run("eval/run.py", "hydra.run.dir=run"), *words)


def test_output_that_nobody_reads_is_no_error() -> None:
    """As in `--help | head`: quiet, and with the status that shells give."""
    made = subprocess.Popen(
        [sys.executable, str(ROOT / "eval/run.py"), "--help"],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert made.stdout is not None and made.stderr is not None
    made.stdout.close()
    assert made.stderr.read() == b"" and made.wait(300) == 141


def test_python_without_docstrings_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-OO", str(ROOT / "eval/run.py"), "data.limit=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "-OO" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("hydra", "SIGINT"), ("torch", "SIGINT"), ("torch", "SIGTERM")]
)
def test_an_interruption_is_one_sentence_from_the_first_moment(module: str, name: str) -> None:
    """By Ctrl-C, or by a scheduler that takes the machine."""
    code = (
        "import os, signal, runpy, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a caller may ignore it
        "def interrupt(event, given):\n"
        f"    if event == 'import' and given[0] == '{module}':\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "sys.addaudithook(interrupt)\n"
        "sys.argv = ['eval/run.py', 'data.limit=1', 'metrics=none', 'tracking=none']\n"
        f"runpy.run_path({str(ROOT / 'eval/run.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("interrupted")
    assert ("to resume: " in done.stderr) == (module == "torch")


def test_an_interrupted_sweep_says_which_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt  # as of jobs side by side

    monkeypatch.setattr(CaseSweeper.__base__, "sweep", interrupted)
    sweeper = CaseSweeper.__new__(CaseSweeper)  # Hydra's scan for plugins replaces its base
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": "sweeps/1"}}})
    with pytest.raises(KeyboardInterrupt, match="to resume: .* hydra.sweep.dir=sweeps/1"):
        sweeper.sweep(["method=ar"])


TORCH = {"torch", "torch._dynamo", "transformers", "torchvision", "pandas", "matplotlib", "wandb"}
TORCH |= {"httpx", "huggingface_hub.hf_api"}
WITHOUT = [
    ("eval/run.py", "method=x", TORCH),
    ("eval/run.py", "method=eagle delta=2", TORCH),
    ("eval/run.py", "--help", TORCH),
    ("eval/run.py", "metrics=x", TORCH),
    ("eval/run.py", "batch_size=0", TORCH - {"torch"}),
    ("eval/run.py", "tracking.mode=x", TORCH - {"torch"}),
    ("eval/run.py", "method=coolsd delta=abc", TORCH - {"torch"}),
    ("eval/run.py", "top_p=2", TORCH - {"torch"}),
    ("eval/run.py", "speed.prompts=2.5", TORCH - {"torch"}),
    ("eval/run.py", "method=coolsd delta=-1 tracking=none", TORCH - {"torch"}),
    ("train_draft/main.py", "training.lr=abc", {"matplotlib", "wandb"}),
    ("eval/run.py", "depth=0", {"matplotlib", "wandb"}),
    ("eval/report.py", "runs=nowhere", {"wandb"}),
]
"""Scripts, arguments, and packages that take seconds to import, without which they answer; the
quickest come first.
"""


@pytest.mark.slow
def test_an_answer_does_not_wait_for_imports(tmp_path: Path) -> None:
    code = (
        "import gc, runpy, sys\n"
        f"for script, arguments, without in {WITHOUT}:\n"
        f"    sys.argv = [{str(ROOT)!r} + '/' + script, *arguments.split()]\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit as end: assert bool(end.code) == (arguments != '--help'), script\n"
        "    assert not without & set(sys.modules), (arguments, without & set(sys.modules))\n"
        "    assert gc.isenabled()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_imports_nothing_that_only_some_runs_need() -> None:
    """Each of these packages takes a large part of a second, or seconds, as torch's compiler, which
    is imported where something is compiled.
    """
    code = (
        "import sys, tempera.commands.evaluate\n"
        "unwanted = {'transformers', 'torchvision', 'accelerate', 'scipy.optimize', 'matplotlib',\n"
        "            'scipy.stats', 'altair', 'wandb', 'datasets', 'open_clip', 'torchmetrics',\n"
        "            'pandas', 'torch._dynamo'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)\n"
        "loaded = tempera.load(method='coolsd', delta=2, diagnostics=True)\n"
        "loaded.generate('a large green star', images=False)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
