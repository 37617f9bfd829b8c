"""`tempera-score`: scores of a finished run, and of pictures that other code made."""

import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from paths import ROOT
from PIL import Image
from tiny_evaluation import tiny_evaluate, tiny_options

from tempera.commands import evaluate, score
from tempera.config.compose import composed
from tempera.errors import TemperaError
from tempera.evaluation import summary
from tempera.metrics.scores import GivenScores
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.verdict import verdict
from tempera.runtime.image_files import picture_path
from tempera.runtime.tracking import Tracker

pytestmark = pytest.mark.usefixtures("no_figures")
VARIATION = [
    "+torchmetrics.variation.kind=picture",
    "+torchmetrics.variation.metric._target_=torchmetrics.image.TotalVariation",
]
"""A metric that reads no file."""
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command in an empty directory; returns what it printed, errors included."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["score.py", "device=cpu", *arguments])
        capsys.readouterr()
        with suppress(SystemExit):
            runpy.run_path(str(ROOT / "eval/score.py"), run_name="__main__")
        shown = capsys.readouterr()
        assert shown.err.count("error:") <= 1 and "a bug" not in shown.err
        return shown.out + shown.err

    return call


def draw(path: Path, seed: int = 0, size: tuple[int, int] = (48, 48)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def texts(directory: Path) -> dict[str, str]:
    frame = pd.read_parquet(directory / "results.parquet")
    return dict(zip(frame["id"], frame["text"], strict=True))


def metrics(directory: Path) -> dict[str, float]:
    content = json.loads((directory / "metrics.json").read_text())
    return {name: one["value"] for name, one in content["metrics"].items()}


def test_a_finished_run_is_scored_without_its_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its networks and its draft are gone; what it had stays, and the order of prompts too."""
    options = ["method=eagle", *tiny_options(tmp_path), "depth=2", "data.limit=3"]
    evaluate.main(composed("eval", options, tmp_path / "run"))
    before = json.loads((tmp_path / "run/metrics.json").read_text())
    shutil.rmtree(tmp_path / "draft")
    for part in ("network", "text_encoder", "tokenizer"):
        monkeypatch.setattr(f"tiny_evaluation.{part}", lambda *_: pytest.fail("a model is read"))
    ids = [*texts(tmp_path / "run")]
    rows = [f"{name},taste,{place}" for place, name in enumerate(ids)]
    (tmp_path / "taste.csv").write_text("\n".join(["id,name,value", *rows]))
    told = run("runs=run", *VARIATION, "scores=taste.csv")
    assert "taste" in told and "variation" in told
    after = json.loads((tmp_path / "run/metrics.json").read_text())
    assert after["metrics"].items() > before["metrics"].items()
    assert after["metrics"]["taste"]["value"] == 1 and after["time"] == before["time"]
    assert [*texts(tmp_path / "run")] == ids
    assert {one["key"] for one in after["described"]} == {"taste", "variation"}
    monkeypatch.undo()
    again = [*options, "data.limit=2", *tiny_options(tmp_path)]
    assert "taste" not in evaluate.main(composed("eval", again, tmp_path / "run"))


def test_corrected_scores_stay_the_latest_in_a_copy_of_the_run(run: Run, tmp_path: Path) -> None:
    """Whose files have other times; and scores without any value replace those before."""
    flat(tmp_path / "theirs")
    for name, value in (("first", "1"), ("second", "2")):
        rows = [f"{number},taste,{value}" for number in range(3)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,name,value", *rows]))
        run("runs=theirs", f"scores={name}.csv")
    (tmp_path / "none.csv").write_text("id,name,value\n0,taste,\n1,taste,\n2,taste,\n")
    shutil.copytree(tmp_path / "outputs/scored/theirs", tmp_path / "copy")
    second, first = sorted(
        (tmp_path / "copy/scores").glob("*/summary/metrics.json"),
        key=lambda file: -json.loads(file.read_text())["metrics"]["taste"]["value"],
    )
    os.utime(second, (1, 1))
    assert first.stat().st_mtime > second.stat().st_mtime
    run("runs=copy", *VARIATION)
    assert metrics(tmp_path / "copy")["taste"] == 2
    assert "taste" not in run("runs=copy", "scores=none.csv")
    assert "taste" not in metrics(tmp_path / "copy")


def test_a_tracked_run_keeps_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of its directory, which in a sweep is a number."""
    tiny_evaluate(tmp_path / "sweep/0", timed=0)
    named: list[str] = []
    monkeypatch.setattr(
        "tempera.runtime.tracking.csv_tracker", lambda *, name, **_: named.append(name) or Tracker()
    )
    run("runs=sweep", "tracking=csv", *VARIATION)
    assert named == ["coolsd δ=1.5"]


def test_all_runs_of_a_sweep_are_scored(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny_evaluate(tmp_path / "sweep" / name, timed=0)
    run("runs=sweep", *VARIATION)
    assert metrics(tmp_path / "sweep/a")["variation"] == metrics(tmp_path / "sweep/b")["variation"]


def flat(folder: Path) -> None:
    for number in range(3):
        draw(folder / f"{number}.png", number)
        (folder / f"{number}.txt").write_text(f"picture {number}\n")


def with_a_table(folder: Path) -> None:
    for number in range(3):
        draw(folder / f"{number}.png", number)
    rows = [json.dumps({"file_name": f"{n}.png", "text": f"picture {n}"}) for n in range(3)]
    (folder / "metadata.jsonl").write_text("\n".join(rows))


def geneval(folder: Path) -> None:
    for prompt, sample in ((0, 0), (0, 1), (1, 0)):
        place = folder / f"{prompt:05d}"
        draw(place / "samples" / f"{sample:05d}.png", sample)
        (place / "metadata.jsonl").write_text(json.dumps({"prompt": f"picture {prompt}"}))
        draw(place / "grid.png")


FLAT = {"0": "picture 0", "1": "picture 1", "2": "picture 2"}
LAYOUTS = {
    flat: FLAT,
    with_a_table: FLAT,
    geneval: {
        "00000-00000": "picture 0", "00000-00001": "picture 0", "00001-00000": "picture 1"
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_another_program_is_scored_and_reported(
    layout: Callable[[Path], None], run: Run, tmp_path: Path
) -> None:
    layout(tmp_path / "theirs")
    files = set((tmp_path / "theirs").rglob("*"))
    told = run("runs=theirs", *VARIATION)
    assert "variation" in told and "theirs" in told and "tokens per round" not in told
    made = tmp_path / "outputs/scored/theirs"
    assert texts(made) == LAYOUTS[layout]
    assert metrics(made).keys() == {"variation"}
    assert (made / "report.html").is_file() and (made / "grid.png").is_file()
    assert files == set((tmp_path / "theirs").rglob("*"))
    (found,), damaged = collect(find_runs([made])[0])
    assert not damaged and found.name == "theirs" and verdict([found]) == ""
    assert "an unknown model" in run("runs=theirs", "metrics=shapes")
    assert "CLIP score" in run("runs=theirs", "metrics=shapes", "drawn_by=shapes")
    assert "variation" in run("runs=theirs", *VARIATION)
    assert {"clip_score", "variation"} <= metrics(made).keys()


def test_grids_of_four_with_captions_elsewhere(run: Run, tmp_path: Path) -> None:
    """As DPG-Bench has them."""
    draw(tmp_path / "grids" / "cat.png", size=(96, 48))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "cat.txt").write_text("a cat")
    run("runs=grids", "captions=prompts", "grid=2", *VARIATION)
    made = tmp_path / "outputs/scored/grids"
    assert texts(made) == dict.fromkeys(("cat-0", "cat-1", "cat-2", "cat-3"), "a cat")
    whole = np.asarray(Image.open(tmp_path / "grids/cat.png"))
    cut = np.asarray(Image.open(picture_path(made, "cat-1")))
    assert np.array_equal(cut, whole[:48, 24:])
    assert "give another grid=" in run(
        "runs=grids", "captions=prompts", "grid=5", "output=o", *VARIATION
    )


def test_prompts_in_the_order_of_the_pictures(run: Run, tmp_path: Path) -> None:
    for number in range(11):
        draw(tmp_path / "theirs" / f"{number}.png")
    (tmp_path / "prompts.txt").write_text("\n".join(f"picture {number}" for number in range(11)))
    run("runs=theirs", "captions=prompts.txt", *VARIATION)
    assert texts(tmp_path / "outputs/scored/theirs")["10"] == "picture 10"


def without_captions(folder: Path) -> None:
    draw(folder / "0.png")


def without_a_picture(folder: Path) -> None:
    flat(folder)
    (folder / "1.png").unlink()


def without_a_caption(folder: Path) -> None:
    flat(folder)
    (folder / "1.txt").unlink()


def empty(folder: Path) -> None:
    folder.mkdir()


def damaged(folder: Path) -> None:
    flat(folder)
    (folder / "1.png").write_bytes(b"no picture")


WRONG = {
    without_captions: "captions=PATH",
    without_a_picture: "1 .txt files without a picture",
    without_a_caption: "1.png",
    empty: "there are no images in theirs",
    damaged: "1.png cannot be read as a picture",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_folder_that_cannot_be_scored(
    change: Callable[[Path], None], run: Run, tmp_path: Path
) -> None:
    change(tmp_path / "theirs")
    told = run("runs=theirs", *VARIATION)
    told = told.rpartition("\r")[2]  # without the bar of reading pictures
    assert told.lstrip().startswith("error: ") and WRONG[change] in told
    assert told.count("\n") == 1


def test_pictures_that_changed_or_are_missing(run: Run, tmp_path: Path) -> None:
    flat(tmp_path / "theirs")
    run("runs=theirs", *VARIATION)
    made = tmp_path / "outputs/scored/theirs"
    before = metrics(made)
    draw(tmp_path / "theirs/3.png", 3)
    (tmp_path / "theirs/3.txt").write_text("one more")
    run("runs=theirs", *VARIATION)
    assert len(texts(made)) == 4 and metrics(made) != before
    picture_path(made, "0").write_bytes(picture_path(made, "1").read_bytes())
    told = "0.png is not the picture that this run made: delete it, and repeat the command that"
    assert told in run("runs=theirs", *VARIATION)
    picture_path(made, "0").unlink()
    run("runs=theirs", *VARIATION)
    picture_path(made, "2").unlink()
    assert "has no pictures for 1 of 4 prompts, such as 2" in run(f"runs={made}", *VARIATION)
    draw(tmp_path / "theirs/1.png", 7)
    assert "1.png or its caption changed since" in run("runs=theirs", *VARIATION)
    assert len(texts(made)) == 4


def test_rows_of_a_scorer_that_fails_stay(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempera.metrics.quality.score_pictures.__wrapped__.__defaults__", (1,))
    flat(tmp_path / "theirs")
    seen: list[int] = []
    monkeypatch.setattr("torchmetrics.image.TotalVariation.compute", _failing_after(2, seen))
    assert "torchmetrics.variation cannot be measured" in run("runs=theirs", *VARIATION)
    assert len(seen) == 3
    run("runs=theirs", *VARIATION)
    assert len(seen) == 4
    assert metrics(tmp_path / "outputs/scored/theirs")["variation"] == 1


def _failing_after(most: int, seen: list[int]) -> Callable[..., float]:
    def compute(self: object) -> float:
        seen.append(0)
        if len(seen) == most + 1:
            raise RuntimeError("out of luck")
        return 1.0

    return compute


def test_a_directory_of_another_version_and_one_that_is_not_finished(
    run: Run, tmp_path: Path
) -> None:
    tiny_evaluate(tmp_path / "run", timed=0)
    path = tmp_path / "run/run.json"
    content = json.loads(path.read_text())
    for part in (tmp_path / "run/records").glob("*.parquet"):
        part.unlink()
    assert "20 of 20 prompts have no images" in run("runs=run", *VARIATION)
    content["identity"]["format"] = 2
    path.write_text(json.dumps(content))
    assert "made by another version of tempera" in run("runs=run", *VARIATION)


def test_two_processes_that_score_one_directory_leave_files_of_one_of_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat(tmp_path / "theirs")
    write = summary.write_json

    def beside(path: Path, content: object) -> None:
        monkeypatch.setattr(summary, "write_json", write)
        other = path.with_name("results.parquet")
        other.write_bytes(other.read_bytes() + b" ")  # the other's, whose metrics.json came before
        write(path, content)

    monkeypatch.setattr(summary, "write_json", beside)
    run("runs=theirs", *VARIATION)
    assert not collect([tmp_path / "outputs/scored/theirs"])[1]


def test_scores_that_another_process_adds_meanwhile_are_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins and ends between the reading and the writing of this one."""
    flat(tmp_path / "theirs")
    (tmp_path / "taste.csv").write_text("id,name,value\n0,taste,1\n1,taste,1\n2,taste,1\n")
    place = ["runs=theirs", "device=cpu"]
    write = summary.write_table

    def meanwhile(path: Path, *given: Any) -> None:
        monkeypatch.setattr(summary, "write_table", write)
        score.main(composed("score", [*place, "scores=taste.csv"]))
        write(path, *given)

    monkeypatch.setattr(summary, "write_table", meanwhile)
    score.main(composed("score", [*place, *VARIATION]))
    assert {"taste", "variation"} <= metrics(tmp_path / "outputs/scored/theirs").keys()


def test_what_is_to_be_scored_with_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match="no metric to score with"):
        score.main(composed("score", [f"runs={tmp_path}"]))
    with pytest.raises(TemperaError, match="give runs=DIR"):
        score.main(composed("score", []))
    with pytest.raises(TemperaError, match="not of an unknown model"):
        flat(tmp_path / "theirs")
        place = [f"runs={tmp_path / 'theirs'}", f"outputs={tmp_path}"]
        score.main(composed("score", [*place, "metrics=shapes", "device=cpu"]))
    with pytest.raises(TemperaError, match="not a directory"):
        score.main(composed("score", [f"runs={tmp_path / 'no'}", *VARIATION]))


def test_each_scorer_says_which_way_is_better(run: Run, tmp_path: Path) -> None:
    flat(tmp_path / "a")
    run("runs=a", *VARIATION)
    psnr = ["torchmetrics=psnr", "against=outputs/scored/a"]
    flat(tmp_path / "b")
    run("runs=b", *psnr)
    content = json.loads((tmp_path / "outputs/scored/b/metrics.json").read_text())
    (described,) = content["described"]
    assert described["key"] == "psnr" and described["higher_is_better"] is True
    assert GivenScores("no.csv").metrics == []
