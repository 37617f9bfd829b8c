"""Scores from another program: read, checked, and shown with those of the run."""

import json
from pathlib import Path

import pytest
import torch
from tiny_evaluation import tiny_evaluate, tiny_pipeline

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.quality import quality, score_pictures
from tempera.metrics.scores import GivenScores, read_scores
from tempera.reporting.baseline import compare
from tempera.reporting.collect import collect
from tempera.reporting.report import all_metrics
from tempera.runtime.row_store import Store

IDS = ["a", "b"]
GOOD = "id,name,value\na,pick,1\nb,pick,3\na,other,\nb,other,-2.5\n"


def written(directory: Path, text: str | bytes) -> str:
    path = directory / "scores.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@pytest.mark.parametrize("text", [GOOD, "\ufeff" + GOOD.replace("\n", "\r\n")])
def test_values_and_means(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    assert read_scores(path, IDS)["pick"] == {"a": 1, "b": 3}
    scorer = GivenScores(path)
    prompts = [Prompt(name, "a text") for name in IDS]
    scorer.check_prompts(prompts)
    (networks,) = scorer.load(torch.device("cpu"))
    store = Store(tmp_path / "store", "run")
    rows = score_pictures(networks, prompts, lambda _: pytest.fail("no picture is read"), store)
    scored = [rows[name] for name in IDS]
    means = quality(scored, networks, None, scorer.resamples, own=scorer.metrics)
    assert (means["pick"].value, means["pick"].n) == (2, 2)
    assert (means["other"].value, means["other"].n) == (-2.5, 1)
    assert 1 <= means["pick"].low <= means["pick"].high <= 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,value\na,1\n", "begins with id,value"),
        (GOOD + "c,pick,1\n", "differ in c"),
        (GOOD + "a,pick,1\n", "duplicate"),
        (GOOD.replace("b,pick,3\n", ""), "differ in b"),
        (GOOD.replace("3", "three"), "three"),
        (GOOD.replace("3", "inf"), "infinite"),
        (GOOD.replace("pick", "fid"), "has a score named 'fid', which is already taken"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_what_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match=words) as problem:
        read_scores(written(tmp_path, text), IDS)
    assert problem.value.option == "scores"


@pytest.mark.slow
def test_the_scores_of_two_runs_are_shown_and_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"timed": 0, "model": "tiny", "seed": 0}
    tiny_evaluate(tmp_path / "ar", tiny_pipeline(plain=True), method="ar", delta=None, **options)
    tiny_evaluate(tmp_path / "cool", **options)
    ids = [path.stem for path in sorted((tmp_path / "cool" / "images").glob("*.png"))]
    for shift, name in ((0, "ar"), (5, "cool")):
        rows = [f"{prompt},pick,{place + shift}" for place, prompt in enumerate(ids)]
        file = written(tmp_path, "\n".join(["id,name,value", *rows]))
        plain = tiny_pipeline(plain=True) if name == "ar" else tiny_pipeline()
        own = {"method": "ar", "delta": None} if name == "ar" else {}
        tiny_evaluate(tmp_path / name, plain, scores=file, report=True, **own, **options)
    assert "pick" in capsys.readouterr().out
    found = json.loads((tmp_path / "cool" / "metrics.json").read_text())["metrics"]["pick"]
    assert found["value"] == 5 + (len(ids) - 1) / 2 and found["n"] == len(ids)
    rows, damaged = collect([tmp_path / "ar", tmp_path / "cool"])
    assert not damaged
    compare(rows)
    (paired,) = [row.differences["pick"] for row in rows if row.differences]
    assert [paired[end] for end in ("value", "low", "high")] == pytest.approx([5, 5, 5])
    assert "pick" in all_metrics(rows).numbers
