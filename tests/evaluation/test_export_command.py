"""`tempera-export`: pictures as the scorers of benchmarks read them, and what these write, read
back by `tempera-score`.
"""

import json
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from markdown_pages import blocks
from paths import ROOT
from PIL import Image

from tempera.commands import evaluate
from tempera.config.compose import composed
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.scores import GivenScores
from tempera.reporting.collect import collect, find_runs
from tempera.runtime.image_files import picture_path

pytestmark = pytest.mark.usefixtures("no_figures")
Run = Callable[..., str]
TEXTS = ["a photo of a bench", "a photo of two cows", "a red cube"]
TAGS = ["single_object", "counting", "single_object"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a script of eval/ in an empty directory; returns what it printed, errors included."""
    monkeypatch.chdir(tmp_path)

    def call(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        with suppress(SystemExit):
            runpy.run_path(str(ROOT / "eval" / script), run_name="__main__")
        shown = capsys.readouterr()
        told = shown.out + shown.err.rpartition("\r")[2]  # without bars of progress
        assert told.count("error:") <= 1 and "a bug" not in told
        return told

    return call


def draw(folder: Path, name: str, text: str, size: tuple[int, int] = (48, 48)) -> None:
    """A picture of its own with its caption."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(list(name.encode())).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / f"{name}.txt").write_text(text)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def scores(place: str) -> dict[str, float]:
    """The metrics of the run that was made of a folder."""
    content = json.loads(Path("outputs/scored", place, "metrics.json").read_text())
    return {name: one["value"] for name, one in content["metrics"].items()}


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def of_geneval(folder: Path) -> list[dict[str, Any]]:
    """Three prompts with two pictures each; and the benchmark's file."""
    rows = [
        {"tag": tag, "include": [{"class": "bench", "count": 1}], "prompt": text}
        for tag, text in zip(TAGS, TEXTS, strict=True)
    ]
    folder.with_name("metadata.jsonl").write_text(lines(*rows))
    for number, text in enumerate(TEXTS):
        for sample in range(2):
            draw(folder, f"{number:05d}-{sample:04d}", text)
    return rows


def results_of_geneval(rows: list[dict[str, Any]], wrong: set[tuple[int, int]]) -> list[Any]:
    """What the scorer writes of its folders: in no order, with keys that are not read here too."""
    return [
        {
            "filename": f"/gpu/there/{number:05d}/samples/{sample:04d}.png",
            "tag": row["tag"],
            "prompt": row["prompt"],
            "correct": (number, sample) not in wrong,
            "reason": "",
            "metadata": json.dumps(row),
            "details": "{}",
        }
        for sample in (1, 0)
        for number, row in enumerate(rows)
    ]


def test_geneval_is_laid_out_and_read_back(run: Run) -> None:
    """Its loop: folders of digits, one JSON object in metadata.jsonl, samples of digits."""
    rows = of_geneval(Path("mine"))
    told = run("export.py", "runs=mine", "layout=geneval", "layout.path=metadata.jsonl")
    made = Path("outputs/exported/mine")
    assert "6 pictures" in told and f"evaluate_images.py {made.resolve()} --outfile" in told
    assert sorted(one.name for one in made.iterdir()) == ["00000", "00001", "00002"]
    for number, row in enumerate(rows):
        assert json.loads((made / f"{number:05d}/metadata.jsonl").read_text()) == row
        for sample in range(2):
            shown = pixels(made / f"{number:05d}/samples/{sample:04d}.png")
            assert np.array_equal(shown, pixels(Path(f"mine/{number:05d}-{sample:04d}.png")))
    results = results_of_geneval(rows, wrong={(0, 0), (1, 1), (2, 0), (2, 1)})
    Path("results.jsonl").write_text(lines(*results))
    assert "geneval" in run("score.py", "runs=mine", "scores=results.jsonl", "device=cpu")
    found = scores("mine")
    assert found["geneval_single_object"] == 1 / 4 and found["geneval_counting"] == 1 / 2
    assert found["geneval"] == pytest.approx((1 / 4 + 1 / 2) / 2)  # of tasks, as the scorer's
    (one,), _ = collect(find_runs([Path("outputs/scored/mine")])[0])
    assert {metric.key: metric.higher_is_better for metric in one.described}["geneval"]


def change(results: list[Any], **update: Any) -> list[Any]:
    return [{**results[0], **update}, *results[1:]]


WRONG: dict[str, Callable[[list[Any]], list[Any]]] = {
    "has no row for 00000-0001 (1 in all)": lambda rows: rows[1:],
    "more than one row for 00000-0001 (1 in all)": lambda rows: [*rows, rows[0]],
    "not of this run, such as 00007-0000": lambda rows: [
        *rows, {**rows[0], "filename": "00007/samples/0000.png"}
    ],
    "not of this run, such as -x": lambda rows: [*rows, {**rows[0], "filename": "x.png"}],
    "of 'a dog', not 'a photo of a bench'": lambda rows: change(rows, prompt="a dog"),
    "has no filename, tag, prompt and correct in line 1": lambda rows: change(
        rows, correct="yes"
    ),
}  # fmt: skip


def refusal(file: Path, prompts: list[Prompt]) -> str:
    """Why a scorer's file is not read."""
    with pytest.raises(TemperaError) as caught:
        GivenScores(str(file)).check_prompts(prompts)
    return str(caught.value)


@pytest.mark.parametrize("told", WRONG)
def test_results_of_other_pictures_are_refused(told: str, tmp_path: Path) -> None:
    rows = [{"prompt": text, "tag": tag} for text, tag in zip(TEXTS, TAGS, strict=True)]
    prompts = [
        Prompt(f"{number:05d}-{sample:04d}", text)
        for number, text in enumerate(TEXTS)
        for sample in range(2)
    ]
    file = tmp_path / "results.jsonl"
    file.write_text(lines(*WRONG[told](results_of_geneval(rows, set()))))
    assert told in refusal(file, prompts)


DPG = "/a, b/p.png, 1.0, 0.5, 0.0, 0.5, 0.5\n/a, b/q.png, 1.0, 1.0, 1.0, 0.6, 0.9\nModel: mine\n"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("1.0, 0.5, 0.0, 0.5, 0.5", "1.0, 1.0", "have the scores of 4 pictures and their mean for"),
        ("0.6, 0.9", "0.6, 0.8", "have the scores of 4 pictures and their mean for q"),
        ("p.png", "r.png", "has no row for p (1 in all)"),
        ("p.png", "q.png", "more than one row for q (1 in all)"),
        ("Model", "/r.png, 1, 1, 1, 1, 1\nModel", "not of this run, such as r"),
    ],
)
def test_a_file_of_dpg_that_does_not_fit(
    before: str, after: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "results.txt"
    file.write_text(DPG.replace(before, after))
    prompts = [Prompt(f"{name}-{number}", "a cow") for name in "pq" for number in range(4)]
    assert told in refusal(file, prompts)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([[1.0]], "scores of 1 prompts, but the run has 3"),
        ([[1.0], [], [1.0]], "no scores from 0 to 1 for b"),
        ([[1.0], [1.0], [7.0]], "no scores from 0 to 1 for c"),
        ({"a": 1}, "not a JSON list of lists"),
    ],
)
def test_a_file_of_geneval2_that_does_not_fit(content: object, told: str, tmp_path: Path) -> None:
    file = tmp_path / "lists.json"
    file.write_text(json.dumps(content))
    assert told in refusal(file, [Prompt(name, "a cow") for name in "abc"])


def of_dpg(folder: Path, **sizes: tuple[int, int]) -> None:
    """Two prompts with four pictures each; and the benchmark's prompts."""
    for name, text in (("diffusiondb3", "a cow"), ("partiprompts12", "a bench")):
        for number in range(4):
            own = f"{name}-{number:04d}"
            draw(folder, own, text, sizes.get(f"{name}_{number}", (48, 48)))
        Path("prompts").mkdir(exist_ok=True)
        Path("prompts", f"{name}.txt").write_text(text + "\n")


def test_dpg_is_laid_out_and_read_back(run: Run) -> None:
    of_dpg(Path("mine"))
    told = run("export.py", "runs=mine", "layout=dpg", "layout.path=prompts", "output=there")
    made = Path("there/mine")
    assert f"PIC_NUM=4 bash dpg_bench/dist_eval.sh {made.resolve()} 48" in told
    assert sorted(one.name for one in made.iterdir()) == ["diffusiondb3.png", "partiprompts12.png"]
    whole = pixels(made / "partiprompts12.png")
    for number, (top, left) in enumerate(((0, 0), (0, 48), (48, 0), (48, 48))):
        own = pixels(Path(f"mine/partiprompts12-{number:04d}.png"))
        assert np.array_equal(whole[top : top + 48, left : left + 48], own)
    text = (
        "/a, b/partiprompts12.png, 1.0, 0.5, 0.0, 0.5, 0.5\n"
        "/a, b/diffusiondb3.png, 1.0, 1.0, 1.0, 0.6, 0.9\n"
        "Model: mine\nL1 category scores:\n\tentity: 70.0\nDPG-Bench score: 70.0\n"
    )
    Path("results.txt").write_text(text)
    run("score.py", "runs=mine", "scores=results.txt", "device=cpu")
    assert scores("mine")["dpg"] == pytest.approx(70)
    grids = ("runs=there/mine", "captions=prompts", "grid=2", "device=cpu", "output=cut")
    run("score.py", *grids, "scores=results.txt")
    assert json.loads(Path("cut/metrics.json").read_text())["metrics"]["dpg"]["n"] == 8
    cut = pixels(picture_path(Path("cut"), "partiprompts12-2"))
    assert np.array_equal(cut, pixels(Path("mine/partiprompts12-0002.png")))


def test_pictures_that_dpg_would_cut_wrong_are_refused(run: Run) -> None:
    of_dpg(Path("odd"), partiprompts12_3=(48, 64))
    told = run("export.py", "runs=odd", "layout=dpg", "layout.path=prompts")
    assert "partiprompts12-0003 has 64 × 48 pixels, the first one 48 × 48" in told
    of_dpg(Path("few"))
    for suffix in (".png", ".txt"):
        Path(f"few/partiprompts12-0003{suffix}").unlink()
    assert "partiprompts12 has 3 pictures" in run(
        "export.py", "runs=few", "layout=dpg", "layout.path=prompts"
    )
    assert not Path("outputs/exported/few").exists()
    assert not [one for one in Path("outputs/exported").iterdir() if one.name.startswith(".")]


def test_geneval2_is_laid_out_and_read_back(run: Run) -> None:
    """Its evaluation.py takes each line's picture from the JSON file by the prompt."""
    rows = [{"prompt": text, "vqa_list": [["Is it?", "Yes"]]} for text in [*TEXTS, "a  pig "]]
    Path("data.jsonl").write_text(lines(*rows))
    for name, number in (("a", 3), ("b", 0), ("c", 2)):
        draw(Path("mine"), name, str(rows[number]["prompt"]))
    run("export.py", "runs=mine", "layout=geneval2", "layout.path=data.jsonl")
    made = Path("outputs/exported/mine")
    paths = json.loads((made / "image_paths.json").read_text())
    asked = [json.loads(line) for line in (made / "benchmark_data.jsonl").read_text().splitlines()]
    assert asked == [rows[3], rows[0], rows[2]]
    for row, name in zip(asked, "abc", strict=True):
        assert np.array_equal(pixels(made / paths[row["prompt"]]), pixels(Path(f"mine/{name}.png")))
    Path("lists.json").write_text(json.dumps([[0.25, 1.0], [1.0], [0.0, 0.5, 1.0]]))
    run("score.py", "runs=mine", "scores=lists.json", "device=cpu")
    found = scores("mine")
    assert found["geneval2_am"] == pytest.approx(100 * (0.625 + 1 + 0.5) / 3)
    assert found["geneval2_gm"] == pytest.approx(100 * (0.5 + 1 + 0) / 3)
    draw(Path("mine"), "d", TEXTS[0])
    assert "another picture of 'a photo of a bench'" in run(
        "export.py", "runs=mine", "layout=geneval2", "layout.path=data.jsonl", "output=again"
    )


def test_hpsv2_and_a_plain_folder(run: Run) -> None:
    """hpsv2 looks for <style>/<number>.jpg, and takes all folders for styles."""
    Path("texts").mkdir()
    Path("texts/photo.json").write_text(json.dumps(TEXTS))
    draw(Path("mine"), "photo-00002", TEXTS[2])
    told = run("export.py", "runs=mine", "layout=hpsv2", "layout.path=texts")
    made = Path("outputs/exported/mine")
    (command,) = [line for line in told.splitlines() if "python -c" in line]
    _, _, code = shlex.split(command)
    assert code == f"import hpsv2; hpsv2.evaluate('{made.resolve()}', hps_version='v2.1')"
    assert [one.relative_to(made).as_posix() for one in made.rglob("*.*")] == ["photo/00002.jpg"]
    with Image.open(made / "photo/00002.jpg") as picture:
        assert picture.format == "JPEG" and picture.size == (48, 48)
    run("export.py", "runs=mine", "layout=folder", "output=flat")
    assert json.loads(Path("flat/mine/metadata.jsonl").read_text()) == {
        "file_name": "photo-00002.png", "text": TEXTS[2]
    }  # fmt: skip
    assert np.array_equal(
        pixels(Path("flat/mine/photo-00002.png")), pixels(made.parents[2] / "mine/photo-00002.png")
    )


def test_scores_of_hpsv2s_own_code_are_read_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the page's Python, with a stand-in for the package."""
    names = ["photo-00001", "anime-00000"]
    for name, text in zip(names, TEXTS, strict=False):
        draw(Path("RUN"), name, text)
    run("export.py", "runs=RUN", "layout=folder", "output=pictures")

    def score(path: str, text: str, hps_version: str) -> list[np.float32]:
        assert hps_version == "v2.1"
        assert Path(f"RUN/{Path(path).stem}.txt").read_text() == text
        return [np.float32(brightness(pixels(Path(path))))]

    monkeypatch.setitem(sys.modules, "hpsv2", SimpleNamespace(score=score))
    (code,) = blocks(ROOT / "docs" / "metrics.md", "python")
    exec(compile(code, "metrics.md", "exec"), {})
    run("score.py", "runs=RUN", "scores=hps.csv", "device=cpu")
    found = [100 * brightness(pixels(Path(f"RUN/{name}.png"))) for name in names]
    assert scores("RUN")["hps_own"] == pytest.approx(np.mean(found))


def test_what_cannot_be_laid_out(run: Run) -> None:
    of_geneval(Path("mine"))
    options = ("layout=geneval", "layout.path=metadata.jsonl")
    assert "give runs=DIR" in run("export.py", *options)
    assert "give layout=" in run("export.py", "runs=mine")
    assert "no is not a directory" in run("export.py", "runs=no", *options)
    run("export.py", "runs=mine", *options)
    assert "outputs/exported/mine already exists" in run("export.py", "runs=mine", *options)
    Path("metadata.jsonl").write_text(lines({"prompt": "a dog", "tag": "t"}))
    again = ("output=again", *options)
    assert "metadata.jsonl has 'a dog' there" in run("export.py", "runs=mine", *again)
    draw(Path("other"), "photo", "a dog")
    assert "'photo' is not of the form <name>-<number>" in run("export.py", "runs=other", *again)
    draw(Path("third"), "a-1", "a dog")
    assert "'a-1' is not one of GenEval" in run("export.py", "runs=third", *again)
    assert "'a-1' is not one of HPSv2" in run("export.py", "runs=third", "output=h", "layout=hpsv2")
    picture_path(Path("outputs/scored/mine"), "00001-0000").unlink()
    assert "no pictures for 1 of 6 prompts" in run("export.py", "runs=outputs/scored/mine", *again)
    assert not list(Path("again").glob("*"))


BENCHMARKS = ("geneval", "geneval2", "dpg")


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_from_its_prompts_to_its_score(name: str, run: Run) -> None:
    """The shipped model draws a fixture's prompts; scores are of each picture's own brightness."""
    texts = ["a large green star", "a small white ring"]
    rows = [
        {"prompt": text, "tag": tag, "vqa_list": [["Is it?", "Yes"]]}
        for text, tag in zip(texts, TAGS, strict=False)
    ]
    Path("rows.jsonl").write_text(lines(*rows))
    Path("prompts").mkdir()
    for number, text in enumerate(texts):
        Path(f"prompts/p{number}.txt").write_text(text)
    path = "path=prompts" if name == "dpg" else "path=rows.jsonl"
    own = ["data.limit=null", "speed.prompts=0", "replays=0", "tracking=none", "device=cpu"]
    given = ["method=parallel_block", f"data={name}", f"data.{path}", *own]
    evaluate.main(composed("eval", given, Path("run")))
    assert " pictures of run are in outputs/exported/run" in run(
        "export.py", "runs=run", f"layout={name}", f"layout.{path}"
    )
    value, file = SCORERS[name](Path("outputs/exported/run"), rows)
    run("score.py", "runs=run", f"scores={file}", "device=cpu")
    content = json.loads(Path("run/metrics.json").read_text())
    found = content["metrics"]["geneval2_am" if name == "geneval2" else name]
    assert found["value"] == pytest.approx(value)
    assert found["n"] == (2 if name == "geneval2" else 8)


def brightness(picture: np.ndarray) -> float:
    return float(picture.mean() / 255)


def geneval_scorer(made: Path, rows: list[dict[str, Any]]) -> tuple[float, str]:
    found = []
    for place in made.glob("*/samples/*.png"):
        row = json.loads((place.parents[1] / "metadata.jsonl").read_text())
        right = brightness(pixels(place)) > 0.4
        kept = {name: row[name] for name in ("tag", "prompt")}
        found.append({"filename": str(place), "correct": right, **kept})
    Path("results.jsonl").write_text(lines(*found))
    tasks = [[one["correct"] for one in found if one["tag"] == row["tag"]] for row in rows]
    return float(np.mean([np.mean(task) for task in tasks])), "results.jsonl"


def geneval2_scorer(made: Path, rows: list[dict[str, Any]]) -> tuple[float, str]:
    paths = json.loads((made / "image_paths.json").read_text())
    asked = [json.loads(line) for line in (made / "benchmark_data.jsonl").read_text().splitlines()]
    found = [[brightness(pixels(made / paths[row["prompt"]]))] for row in asked]
    Path("lists.json").write_text(json.dumps(found))
    return 100 * float(np.mean(found)), "lists.json"


def dpg_scorer(made: Path, rows: list[dict[str, Any]]) -> tuple[float, str]:
    means, text = [], ""
    for place in made.iterdir():
        whole = pixels(place)
        edge = len(whole) // 2
        cut = [
            whole[top : top + edge, left : left + edge] for top in (0, edge) for left in (0, edge)
        ]
        found = [brightness(one) for one in cut]
        means.append(np.mean(found))
        text += ", ".join(map(str, [place, *found, np.mean(found)])) + "\n"
    Path("results.txt").write_text(text + "Model: run\n")
    return 100 * float(np.mean(means)), "results.txt"


SCORERS = dict(zip(BENCHMARKS, (geneval_scorer, geneval2_scorer, dpg_scorer), strict=True))
