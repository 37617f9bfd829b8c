import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_evaluation import Blocks, ToyEvaluator, tiny_evaluate, tiny_pipeline

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.evaluation import run_directory
from tempera.evaluation.latency import machine
from tempera.evaluation.pipeline import Pipeline, pictures_of
from tempera.evaluation.run_directory import made_by
from tempera.metrics.distances import frechet
from tempera.runtime.row_store import Store
from tempera.shapes.scenes import world_prompts

RECORDED = """id text batch seconds rounds tested accepted tested_by_tenth accepted_by_tenth depth
tokens accepted_length tau logprob logprob_squares perplexity tv tv_bound kl_per_token
top1 top10 entropy collision memory"""
"""Columns of the records; a run with others cannot go on: raise its `FORMAT`."""
TIMED = ("latency", "latency_ar", "speedup", "efficiency", "throughput")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def results(directory: Path) -> dict[str, Any]:
    """What does not depend on the clock."""
    metrics = json.loads((directory / "metrics.json").read_text())
    rows = pq.read_table(directory / "results.parquet").to_pylist()
    for row in rows:
        for name in ("seconds", "memory", "latency", "latency_ar"):
            row.pop(name)
    pictures = {path.name: path.read_bytes() for path in (directory / "images").iterdir()}
    untimed = {name: value for name, value in metrics["metrics"].items() if name not in TIMED}
    return {"metrics": untimed, "rows": rows, "pictures": pictures}


def test_a_run_writes_all_documented_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, calls = Mock(), count()
    monkeypatch.setattr(Pipeline, "now", lambda _: float(next(calls) ** 2))  # ever slower
    metrics = tiny_evaluate(tmp_path / "run", tiny_pipeline(before=decoded), report=True, batch=8)
    # 20 pictures, 3 timed; one timed batch of 8
    assert decoded.call_count == 20 + 3 + 8 and metrics["speedup_8"] > 0
    place = machine(torch.device("cpu"))
    names = {path.name for path in (tmp_path / "run" / "timings").iterdir()}
    assert names == {place, f"{place}-batch-8"}
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = "run.json metrics.json results.parquet images report.html scores"
    assert names >= set(f"{files} grid.png acceptance.png".split())
    content = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert content["images"] == 20
    assert content["name"] == "coolsd δ=1.5"
    assert [content["scorers"][key] for key in ("fid", "clip_score")] == [["toy", "toy"], ["toy"]]
    shares = content["rounds_by_tokens"]
    tau = sum(accepted * share for accepted, share in enumerate(shares))
    assert (sum(shares), tau) == pytest.approx((1, content["metrics"]["tau"]["value"]))
    quality = {"fid", "kid", "precision", "recall", "clip_score", "shape_accuracy"}
    expected = quality | {"accepted_length", "tau", "speedup", "tv", "tv_bound"}
    assert set(metrics) == set(content["metrics"]) >= expected
    for name, interval in content["metrics"].items():
        assert interval["low"] <= interval["value"] <= interval["high"], name
    assert {*pq.read_table(tmp_path / "run" / "records").column_names} == {*RECORDED.split()}
    found = pq.read_table(tmp_path / "run" / "results.parquet").to_pylist()
    rows = {row["id"]: row for row in found}
    assert set(rows) == {prompt.id for prompt in world_prompts(20)}
    row = rows["world-000003"]
    assert row["text"] == world_prompts(4)[3].text
    assert "tokens" not in row  # they are in records/
    assert row["accepted_length"] == pytest.approx(6 / row["rounds"])
    rounds = sum(row["rounds"] for row in found)
    assert metrics["accepted_length"] == pytest.approx(6 * 20 / rounds)
    assert metrics["tau"] == pytest.approx(sum(sum(row["accepted"]) for row in found) / rounds)
    seconds = [row["seconds"] for row in found]
    assert min(seconds) > 0
    assert metrics["throughput"] == pytest.approx(6 * 20 / sum(seconds))
    kept = sum(sum(row["accepted"]) for row in found)
    assert np.mean(content["acceptance_by_place"]) == pytest.approx(kept / (6 * 20))
    assert all(0 <= share <= 1 for share in content["acceptance_by_tenth"] if share is not None)
    for row in found:
        assert sum(row["tested_by_tenth"]) == sum(row["tested"])
        assert row["logprob_squares"] < row["logprob"] ** 2 < 6 * row["logprob_squares"]
    scored = Store(tmp_path / "run" / "scores" / "toy", made_by(content["settings"])).rows()
    real = next(ToyEvaluator().reference(48))[:, 0, 0, ::8].astype(float)
    fid = frechet(np.array([scored[row["id"]]["features"] for row in found]), real)
    assert [row["fid"] for row in found] == pytest.approx(fid.pseudovalues)
    for name in ("fid", "kid", "precision"):  # pseudo-values
        assert np.mean([row[name] for row in found]) == pytest.approx(metrics[name])
    assert "recall" not in row
    grey = np.asarray(Image.open(tmp_path / "run" / "images" / "world-000003.png"))
    assert grey.shape == (8, 48, 3) and {*grey.flatten().tolist()} <= {0, 96, 191, 255}
    one, two, _ = timed = [row for row in found if row["latency"] is not None]
    assert one["latency_ar"] < one["latency"] and two["latency"] < two["latency_ar"]  # in turn
    each = [row["latency_ar"] / row["latency"] * row["rounds"] / 6 for row in timed]
    assert metrics["efficiency"] == pytest.approx(np.median(each))
    parts = content["time"]["parts"].values()
    assert sum(part["share"] for part in parts) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path: Path) -> None:
    tiny_evaluate(tmp_path / "whole")
    for call in range(1, 12):  # pictures, then timings
        with pytest.raises(KeyboardInterrupt):
            timing = (tmp_path / "broken" / "timings").exists()
            calls = [None] * (1 if call < 4 or timing else 7) + [KeyboardInterrupt()]
            tiny_evaluate(tmp_path / "broken", tiny_pipeline(before=Mock(side_effect=calls)))
        assert not (tmp_path / "broken" / "metrics.json").exists()
        if len(list((tmp_path / "broken").glob("timings/*/*"))) == 2:
            break
    else:
        pytest.fail("the run made no progress between interruptions")
    tiny_evaluate(tmp_path / "broken")
    assert results(tmp_path / "broken") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_finished_run_does_nothing_again(tmp_path: Path) -> None:
    tiny_evaluate(tmp_path)
    before = results(tmp_path)
    timings = json.loads((tmp_path / "metrics.json").read_text())["metrics"]["speedup"]

    tiny_evaluate(tmp_path, tiny_pipeline(before=lambda: pytest.fail("generated again")))
    assert results(tmp_path) == before
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["speedup"] == timings
    half = tmp_path / "images" / "world-000007.png"
    half.write_bytes(half.read_bytes()[:-20])  # and is generated from its tokens
    tiny_evaluate(tmp_path)
    assert results(tmp_path) == before


@pytest.mark.slow
def test_results_do_not_depend_on_batches_or_order_and_a_run_can_grow(tmp_path: Path) -> None:
    prompts = world_prompts(20)
    tiny_evaluate(tmp_path / "a", prompts=prompts)
    tiny_evaluate(tmp_path / "b", prompts=prompts[::-1], batch_size=3)
    tiny_evaluate(tmp_path / "b", prompts=prompts, batch_size=8)
    tiny_evaluate(tmp_path / "c", prompts=prompts[:9])
    nine = results(tmp_path / "c")
    tiny_evaluate(tmp_path / "c", prompts=prompts)
    a, b, c = (results(tmp_path / name) for name in "abc")
    assert [row["batch"] for row in c["rows"]] == [8] * 20
    for row in [*a["rows"], *b["rows"], *c["rows"]]:
        row.pop("batch")
    assert a == b
    assert a == c
    tiny_evaluate(tmp_path / "c", prompts=prompts[:9])  # and be looked at in part
    assert results(tmp_path / "c") == nine | {"pictures": a["pictures"]}


def test_a_run_is_finished_when_all_its_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("tempera.evaluation.summary.write_table", stopped)
    with pytest.raises(KeyboardInterrupt):
        tiny_evaluate(tmp_path)
    assert not (tmp_path / "metrics.json").exists()


def test_other_settings_texts_and_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_evaluate(tmp_path, prompts=[Prompt("a", "a red ring")])
    with pytest.raises(TemperaError, match=r"made with delta=1\.5, but this run has delta=2"):
        tiny_evaluate(tmp_path, prompts=[Prompt("a", "a red ring")], delta=2)
    with pytest.raises(
        TemperaError, match="holds 'a red ring' under the id a, which is now 'a blue ring'"
    ):
        tiny_evaluate(tmp_path, prompts=[Prompt("a", "a blue ring")])
    monkeypatch.setattr(run_directory, "FORMAT", 0)
    with pytest.raises(TemperaError, match="started by another version of tempera: give another"):
        tiny_evaluate(tmp_path, prompts=[Prompt("a", "a red ring")], delta=2)


def test_one_prompt_and_plain_autoregression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"report": True, "method": "ar", "delta": None}
    metrics = tiny_evaluate(
        tmp_path, tiny_pipeline(plain=True), [Prompt("a", "a red ring")], **options
    )
    assert metrics["accepted_length"] == metrics["speedup"] == 1
    assert "fid" not in metrics
    lines = capsys.readouterr().out.splitlines()
    assert "1.00 tokens per round: 6 rounds per image." in lines
    assert lines[-2:] == [
        f"pictures: {tmp_path / 'images' / 'a.png'}",
        f"report: {tmp_path / 'report.html'}",
    ]


def test_the_tracker_gets_numbers_pictures_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempera.reporting.run_report.paper_values", lambda _: {"paper/a/fid": 9})
    tracker = Mock()
    metrics = tiny_evaluate(tmp_path, tracker=tracker)
    summary = tracker.summary.call_args.args[0]
    assert summary.items() >= {**metrics, "images": 20, "paper/a/fid": 9}.items()
    assert summary["tv_low"] < summary["tv"] < summary["tv_high"]
    assert tracker.log.call_args.args[0].items() <= metrics.items()
    images = {call.args[0]: call.args[1].is_file() for call in tracker.image.call_args_list}
    assert images == {"grid": True, "acceptance": True}
    _, _, rows = tracker.table.call_args.args
    assert len(rows) == 20 and rows[0][-1].is_file()
    name, kind, files = tracker.artifact.call_args.args
    assert (name, kind) == ("-coolsd δ=1.5", "evaluation")
    assert {"metrics.json", "report.html", "grid.png"} <= {path.name for path in files}
    assert all(path.is_file() for path in files)


class Dependent(Blocks):
    """A decoder whose pictures depend on how many it decodes at a time, as rounding does."""

    def decode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return super().decode_codes(codes) + 0.1 * (len(codes) - 1)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_picture_does_not_depend_on_those_that_are_decoded_beside_it(
    lost: int, tmp_path: Path
) -> None:
    """So those that a resumed run lacks are the ones that it lost, and so are their scores."""
    pipeline = replace(tiny_pipeline(), image_decoder=Dependent())
    before = tiny_evaluate(tmp_path, pipeline)
    paths = sorted((tmp_path / "images").iterdir())
    pictures = [path.read_bytes() for path in paths]
    for path in paths[:lost]:
        path.unlink()
    shutil.rmtree(tmp_path / "scores" / "toy")
    assert tiny_evaluate(tmp_path, pipeline) == before
    assert [path.read_bytes() for path in paths] == pictures


def fails() -> None:
    raise RuntimeError("the decoder is broken. Really")


def test_tokens_and_numbers_outlive_an_image_decoder_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are stored first, and the next start makes the pictures."""
    metrics = tiny_evaluate(tmp_path / "cut", tiny_pipeline(before=fails), report=True)
    assert metrics["speedup"] > 0 and not metrics.keys() & {"fid", "clip_score"}
    told = [line for line in capsys.readouterr().out.splitlines() if "could not be made" in line]
    assert told == [
        "20 pictures could not be made (the decoder is broken): their tokens are in "
        f"{tmp_path / 'cut'}; run the command again to retry."
    ]
    assert not (tmp_path / "cut" / "images").exists()
    tiny_evaluate(tmp_path / "cut", tiny_pipeline(), report=True)
    tiny_evaluate(tmp_path / "whole", tiny_pipeline())
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


class Large(torch.nn.Module):
    """An image decoder that has no memory on its first device, `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, device=device))

    def to(self, device: Any) -> "Large":  # type: ignore[override]
        self.weight = torch.nn.Parameter(torch.empty(1, device=device))
        return self

    def decode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        if codes.device.type == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return codes[:, None].expand(-1, 3, -1, -1) / 2 - 1


def test_an_image_decoder_without_memory_goes_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, meta = torch.arange(30).reshape(5, 6) % 4, torch.device("meta")
    decoder = Large("meta")
    pictures = pictures_of(decoder, (1, 6), meta, tokens)
    assert np.array_equal(pictures[:, 0, 0] // 60, tokens.numpy())
    assert capsys.readouterr().out.count("the CPU decodes the images") == 1
    full = torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(Large, "decode_codes", Mock(side_effect=full))
    with pytest.raises(torch.OutOfMemoryError):
        pictures_of(decoder, (1, 6), meta, tokens)


@pytest.mark.parametrize("part", ["_draw_grid", "page.write", "_track"])
def test_a_report_that_fails_leaves_the_results_and_one_sentence(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"tempera.reporting.run_report.{part}", Mock(side_effect=OSError("full")))
    tiny_evaluate(tmp_path, report=True)
    told = capsys.readouterr().out
    assert "tokens per round" in told and told.count("(full): the results are in") == 1
