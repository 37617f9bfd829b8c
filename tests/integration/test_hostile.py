"""Hostile input ends in one sentence: a sample of all cases, and by name those that once did not.

`python tests/support/hostile.py --all` tries every case.
"""

import csv
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_files
import hostile_options
import pytest
from hostile import every_case, sample
from hostile_files import DAMAGES, picture_bytes
from hostile_options import EVAL, TRAIN
from hostile_process import Case, Outcome, outcomes, warm
from paths import ROOT

from tempera.errors import TemperaError
from tempera.evaluation.run_directory import claim
from tempera.reporting.figures import font, wrap
from tempera.runtime.tracking import wandb_tracker


def answered(cases: list[Case]) -> None:
    warm()
    wrong = {str(case): outcome.faults for case, outcome in outcomes(cases) if outcome.faults}
    assert wrong == {}


def answer(case: Case, keep: Callable[[Path], None] = lambda directory: None) -> Outcome:
    warm()
    ((_, outcome),) = outcomes([case], keep=keep)
    assert outcome.faults == []
    return outcome


def test_a_few_options_are_answered() -> None:
    report = [one for one in hostile_options.contexts() if one.config == "report"]
    cases = sample([*hostile_options.cases(report)], 6, seed=0)
    assert {str(case): one.faults for case, one in outcomes(cases) if one.faults} == {}


@pytest.mark.slow
def test_a_sample_of_all_cases_is_answered() -> None:
    answered(sample(every_case(), 120, seed=3))


@pytest.mark.slow
def test_a_sample_of_damaged_files_is_answered() -> None:
    answered(sample([*hostile_files.cases()], 60, seed=4))


def test_the_cases_cover_every_script_and_a_new_option() -> None:
    lines = hostile_options.contexts()
    assert {line.script for line in lines} == {
        str(path.relative_to(ROOT))
        for folder in ("eval", "train_draft")
        for path in (ROOT / folder).glob("*.py")
    }
    build = [line for line in lines if line.config == "build_shapes"]
    arguments = {case.arguments[-1] for case in hostile_options.cases(build)}
    assert {"threads=nan", "mar.steps=-1", "~clip.lr", "stages={a:1}"} <= arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("eval/run.py", "experiment=frontir", "there is no experiment=frontir; choose one of"),
        ("train_draft/main.py", "recipe=foo", "there is no recipe=foo; choose one of "),
        ("eval/run.py", "metrics=shapes metrics.neighbours=0", "neighbours=0 is too small"),
        ("eval/run.py", "metrics=shapes metrics.neighbours=-1", "neighbours=-1 is too small"),
        ("eval/run.py", "metrics=shapes metrics.resamples=0", "resamples=0 is too small"),
        ("eval/run.py", "data.seed=-1", "seed=-1"),
        ("eval/calibrate.py", "seed=abc", "`seed=abc` is not possible; it must be a whole number"),
        ("eval/calibrate.py", "batch_size=0", "batch_size=0 is too small"),
        ("eval/run.py", "depth=2000", "depth=2000"),
        ("eval/run.py", "paper=abc", "`paper=abc` is not possible; it names a table"),
        ("eval/run.py", "method=eagle rule=density", "CSpD is no rule for discrete tokens"),
        ("eval/tune.py", "budget=-1", "budget=-1 is not a budget"),
        ("eval/tune.py", "drafter.path=0", "drafter.path=DIR"),
        ("eval/tune.py", "depths=[[a]]", "`depths=[['a']]` is not possible; it must be a list"),
        ("eval/tune.py", "weights=0", "there is no directory 0: correct weights=0"),
        ("eval/calibrate.py", "drafter.path=", "drafter.path= is empty"),
        ("eval/run.py", "tree.length=1000000000000", "a chain of 1000000000000 tokens is longer"),
        (
            "eval/run.py",
            "method=cspd model=shapes_mar data=shape_classes model.tokens=",
            "`model.tokens=` is not possible; it must be discrete",
        ),
        ("eval/run.py", "data=file path=2024", "2024 does not end like a prompt file"),
        ("train_draft/main.py", "lr=inf", "`lr=inf` is not possible; it must be a number"),
        ("train_draft/main.py", "hidden_noise=inf", "`hidden_noise=inf` is not possible"),
        ("train_draft/build_shapes.py", "stages=[clip] clip.steps=0", "clip.steps=0 is too small"),
        ("train_draft/build_shapes.py", "stages=[mar] mar.ema=2", "mar.ema=2 is not a share"),
        ("train_draft/build_shapes.py", "threads=0", "threads=0 is not possible"),
        ("train_draft/prepare.py", "source=coco source.path=2024", "2024 does not exist"),
        ("eval/run.py", "tracking=wandb tracking.project=a/b", "the project 'a/b' is no name"),
        ("eval/bench.py", "batch_sizes=[1] bandwidth=9 plan.trees=[1]", "no draft tree named '1'"),
        ("train_draft/main.py", "draft.features=[[a]]", "`draft.features=[['a']]` is not possible"),
        ("eval/report.py", f"runs=. output={5000 * 'x'}", "there is no finished run in ."),
        (
            "eval/run.py",
            f"method=cspd model=shapes_mar data=shape_classes model.draft.directory={5000 * 'x'}",
            "x…' is too long; give a shorter one",
        ),
        ("eval/run.py", "+paper.deeper=1", "`paper={'deeper': 1}` is not possible; it names"),
        ("eval/run.py", "+prompt.deeper=1", "prompt={'deeper': 1} is not possible: give one text"),
    ],
)
def test_options_out_of_range(script: str, arguments: str, words: str) -> None:
    base = {"eval/run.py": EVAL, "train_draft/main.py": TRAIN}.get(script, ())
    outcome = answer(Case(script, (*base, *arguments.split())))
    assert outcome.status == 1
    assert words in outcome.err


@pytest.mark.slow
def test_a_whole_number_is_a_number() -> None:
    outcome = answer(Case("train_draft/main.py", (*TRAIN, "beta1=0", "beta2=0")))
    assert outcome.status == 0, outcome.err


@pytest.mark.slow
def test_a_long_prompt_takes_no_longer() -> None:
    prompt = "a red ring " * 5000
    outcome = answer(Case("eval/run.py", (*EVAL, "method=jacobi", f"prompt={prompt}")))
    assert outcome.status == 0, outcome.err


@pytest.mark.parametrize("text", ["word " * 20_000, "x" * 100_000, "a " + "\u0301" * 50_000])
def test_lines_are_wrapped_in_linear_time(text: str) -> None:
    start = time.process_time()
    lines = wrap(text, font(13), 192)
    assert time.process_time() - start < 1
    assert 1 <= len(lines) <= 4
    assert all(font(13).getlength(line) <= 192 for line in lines)
    assert lines[-1].endswith("…")


@pytest.mark.slow
def test_an_id_that_cannot_name_a_file() -> None:
    name = "p" * 240 + ".txt"
    outcome = answer(
        Case(
            "eval/run.py",
            (*EVAL, "data=file", f"path={name}"),
            setup=lambda directory: (directory / name).write_text("a red ring\n") and None,
        )
    )
    assert outcome.status == 1
    assert "too long to name a file" in outcome.err


def a_bad_folder(directory: Path) -> None:
    """Images with captions, of which one is good."""
    folder = directory / "images"
    folder.mkdir()
    (folder / "good.png").write_bytes(picture_bytes())
    (directory / "secret.png").write_bytes(picture_bytes())
    (folder / "dangling.png").symlink_to("nowhere.png")
    (folder / "bomb.png").write_bytes(bomb())
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["file_name", "text"])
    for name in ("good", "dangling", "bomb", "../secret", "x" * 300):
        writer.writerow([f"{name}.png", "a red ring"])
    writer.writerow([str(directory / "secret.png"), "a red ring"])
    writer.writerow(["good.png", "x" * 131_073])
    (folder / "metadata.csv").write_text(text.getvalue(), encoding="utf-8")


def bomb() -> bytes:
    """A PNG whose header says 60,000 × 60,000."""
    content = bytearray(picture_bytes())
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


@pytest.mark.slow
def test_bad_entries_count_as_broken() -> None:
    kept: dict[str, Any] = {}

    def keep(directory: Path) -> None:
        kept.update(json.loads((directory / "codes" / "manifest.json").read_text()))

    arguments = ("source=imagefolder", "source.path=images", "hydra.run.dir=codes")
    outcome = answer(Case("train_draft/prepare.py", arguments, setup=a_bad_folder), keep)
    assert outcome.status == 0, outcome.err
    assert (kept["count"], kept["broken_count"]) == (1, 6)
    assert sum("points outside" in line for line in kept["broken"]) == 2


def a_bad_archive(directory: Path) -> None:
    latin: dict[str, Any] = {"format": tarfile.USTAR_FORMAT, "encoding": "latin-1"}
    with tarfile.open(directory / "a.tar", "w", **latin) as archive:
        for stem, caption in (
            ("good", b"a red ring"),
            ("n\xe4me", b"a red ring"),
            ("../out", b"a red ring"),
            ("text", b"\xff\xfe"),
        ):
            for ending, content in ((".png", picture_bytes()), (".txt", caption)):
                member = tarfile.TarInfo(stem + ending)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        for stem, field in (
            ("deep", b"[" * 100_000),
            ("lone", rb'{"caption": "\ud800"}'),
        ):
            for ending, content in ((".png", picture_bytes()), (".json", field)):
                member = tarfile.TarInfo(stem + ending)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.mark.slow
def test_bad_members_count_as_broken() -> None:
    kept: dict[str, Any] = {}

    def keep(directory: Path) -> None:
        kept.update(json.loads((directory / "codes" / "manifest.json").read_text()))

    arguments = ("source=webdataset", "source.path=a.tar", "hydra.run.dir=codes")
    outcome = answer(Case("train_draft/prepare.py", arguments, setup=a_bad_archive), keep)
    assert outcome.status == 0, outcome.err
    assert (kept["count"], kept["broken_count"]) == (1, 5)


@pytest.mark.slow
def test_a_source_of_broken_entries_leaves_no_claim() -> None:
    def broken(directory: Path) -> None:
        a_bad_folder(directory)
        (directory / "images" / "good.png").unlink()

    left: list[str] = []

    def keep(directory: Path) -> None:
        left.extend(path.name for path in (directory / "codes").rglob("*") if path.is_file())

    arguments = ("source=imagefolder", "source.path=images", "hydra.run.dir=codes")
    outcome = answer(Case("train_draft/prepare.py", arguments, setup=broken), keep)
    assert outcome.status == 1
    assert "all its entries are broken" in outcome.err
    assert left == []


@pytest.mark.slow
def test_a_damaged_picture_is_drawn_again_from_its_tokens() -> None:
    pictures: list[bytes] = []

    def damaged(directory: Path) -> None:
        hostile_files._after(hostile_files.RUN, "run")(directory)
        (picture,) = (directory / "run" / "images").glob("*.png")
        pictures.append(picture.read_bytes())
        DAMAGES["truncated"](picture)

    def keep(directory: Path) -> None:
        (picture,) = (directory / "run" / "images").glob("*.png")
        pictures.append(picture.read_bytes())

    script, arguments = hostile_files._command(hostile_files.RUN)
    warm()
    case = Case(script, arguments, setup=damaged)
    assert answer(case, keep).status == 0
    assert pictures[0] == pictures[1]


@pytest.mark.slow
def test_a_finished_training_whose_draft_is_gone_writes_it_again() -> None:
    def lost(directory: Path) -> None:
        hostile_files._after(hostile_files.TRAINED, "train")(directory)
        for file in (directory / "train" / "draft").iterdir():
            file.unlink()

    left: list[str] = []

    def keep(directory: Path) -> None:
        left.extend(path.name for path in (directory / "train" / "draft").iterdir())

    script, arguments = hostile_files._command(hostile_files.TRAINED)
    warm()
    outcome = answer(Case(script, arguments, setup=lost), keep)
    assert outcome.status == 0, outcome.err
    assert "its best draft is missing, so a later one takes its place" in outcome.out
    assert {"model.safetensors", "config.json", "metrics.json"} <= set(left)


def test_of_runs_that_claim_a_directory_at_once_one_gets_it(tmp_path: Path) -> None:
    got: list[int] = []
    ready = threading.Barrier(8)

    def one(seed: int, directory: Path) -> None:
        ready.wait()
        try:
            claim(directory, {"seed": seed}, {})
        except TemperaError:
            return
        got.append(seed)

    for turn in range(20):
        directory = tmp_path / str(turn)
        threads = [threading.Thread(target=one, args=(seed, directory)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == turn + 1
        assert json.loads((directory / "run.json").read_text())["identity"] == {"seed": got[-1]}


@pytest.mark.slow
def test_an_unknown_mode_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(TemperaError, match="WANDB_MODE=nonsense is unknown: set it to one of"):
        wandb_tracker(directory=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("eval/run.py", ("model=lumina",)),
        ("eval/run.py", ("model=mar_base", "method=ar")),
        ("eval/run.py", ("data=parti",)),
        ("eval/run.py", (*EVAL[:2], "metrics=real", "batch_size=1", "tracking=none")),
        ("eval/calibrate.py", ("model=anole",)),
        ("eval/bench.py", ("model=llamagen_xl_stage1",)),
        ("train_draft/main.py", ("model=llamagen_xl_stage1",)),
        ("train_draft/prepare.py", ("source=laion_coco", "model=llamagen_xl_stage1")),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else given,
)
def test_nothing_is_looked_up_offline(
    script: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases run with HF_HUB_OFFLINE and WANDB_MODE=offline, in forks of this process."""
    looked_up = tmp_path / "looked up"

    def refuse(*given: object, **options: object) -> None:
        if not (isinstance(given[0], socket.socket) and given[0].family == socket.AF_UNIX):
            with looked_up.open("a") as file:
                print(*map(str, given), file=file)
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when imported
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    answer(Case(script, arguments))
    assert not looked_up.exists(), looked_up.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (
            "eval/run.py",
            ["limit=640", "method=ar"],
            "interrupted; the same command with hydra.run.d",
        ),
        ("eval/calibrate.py", ["limit=640"], "interrupted; the same command starts again"),
        ("eval/tune.py", ["limit=640"], "interrupted; the same command goes on"),
        ("eval/bench.py", ["repeats=1000"], "interrupted; the same command starts again"),
        ("train_draft/main.py", [], "interrupted; the same command goes on"),
        ("train_draft/prepare.py", [], "interrupted; the same command goes on"),
        (
            "train_draft/build_shapes.py",
            ["stages=[tokenizer]"],
            "interrupted; the same command goes on",
        ),
    ],
)
def test_control_c(script: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    tracking = ["tracking=none"] if script in ("eval/run.py", "train_draft/main.py") else []
    command = [sys.executable, str(ROOT / script), *arguments, *tracking]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_interrupts,
    )
    try:
        until_busy(started.pid)
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=60)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert "Traceback" not in err
    assert started.returncode == 130, err
    assert err.rstrip().splitlines()[-1].startswith(said)
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)


@pytest.mark.slow
def test_no_space_left_where_hydra_writes_its_configuration(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval/run.py"), "method=ar", "limit=1", "tracking=none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot write the run's files: File too large; free some space, and run the "
        "command again\n"
    )


@pytest.mark.slow
def test_control_c_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["limit=64", "batch_size=2", "method=ar", "metrics=none", "tracking=none"]
    started = subprocess.Popen(
        [*launcher, str(ROOT / "eval/run.py"), *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_interrupts,
    )
    try:
        for _ in range(1200):
            if list(tmp_path.glob("outputs/eval/*/records/*.parquet")):
                break
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=60)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    (directory,) = tmp_path.glob("outputs/eval/*")
    said = [line for line in err.splitlines() if line.startswith("interrupted; ")]
    assert said == [f"interrupted; the same command with hydra.run.dir={directory} goes on"]
    assert "eval/run.py" not in err.partition("interrupted")[2]  # torchrun shows its own traceback


def listen_to_interrupts() -> None:
    """A shell's background jobs, and what they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until_busy(process: int) -> None:
    """Wait until a script has imported what it needs and begun to work."""
    for _ in range(1200):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 14:
            return
        time.sleep(0.1)
