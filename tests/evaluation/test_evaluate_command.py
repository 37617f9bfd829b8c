"""What `tempera-eval` makes of its options, on a tiny model and one prompt."""

import contextlib
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from paths import ROOT
from tiny_evaluation import ToyEvaluator, network, tiny_evaluate, tiny_options

from tempera.commands import evaluate, export, score
from tempera.commands.asked import reader
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.decoding import compiled, loop
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_network import EagleModel
from tempera.errors import TemperaError
from tempera.evaluation import latency
from tempera.evaluation.pipeline import Pipeline
from tempera.metrics.evaluators import Networks
from tempera.reporting import run_report
from tempera.runtime.network_directory import weights_hash
from tempera.runtime.processor import peak_memory

pytestmark = pytest.mark.usefixtures("no_figures")


def test_words_that_are_not_read_scores_of_ones_own_and_a_failed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are told and recorded, the scores measured, and the report's failure is a
    sentence.
    """
    monkeypatch.setattr(run_report, "write", Mock(side_effect=OSError("full")))
    (tmp_path / "mine.txt").write_text("an astronaut\na red ring\n")
    scores = "id,name,value\nmine-000001,pick,3\nmine-000002,pick,4\n"
    (tmp_path / "scores.csv").write_text(scores)
    given = ["data=file", f"data.path={tmp_path / 'mine.txt'}", f"scores={tmp_path / 'scores.csv'}"]
    options = ["method=eagle", *tiny_options(tmp_path), *given, "speed.prompts=0", "depth=2"]
    auto = ["batch_size=auto", "family.batch_size=1"]  # the first batch of a GPU has 256
    cfg = composed("eval", [*options, *auto], tmp_path / "run")
    assert evaluate.main(cfg)["pick"] == 3.5
    assert pd.read_parquet(tmp_path / "run" / "results.parquet")["batch"].tolist() == [1, 1]
    told = capsys.readouterr().out.splitlines()
    assert f"the report could not be written (full): the results are in {tmp_path / 'run'}." in told
    (warning,) = [line for line in told if line.startswith("warning: ")]
    data = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert [f"warning: {one}." for one in data["warnings"]] == [warning]
    assert "does not know words such as astronaut" in warning


def test_a_start_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """Else its pictures would be scored and exported with the texts that were refused."""
    file = tmp_path / "mine.txt"
    given = [*tiny_options(tmp_path), "method=eagle", "data=file", f"data.path={file}", "depth=2"]
    for text, quick in (("a red ring", []), ("a blue ring", ["speed.prompts=0"])):
        file.write_text(f"{text}\na green star\n")
        cfg = composed("eval", [*given, *quick], tmp_path / "run")
        refused = pytest.raises(TemperaError, match="which is now 'a blue ring'")
        with refused if quick else contextlib.nullcontext():
            evaluate.main(cfg)
    scores = tmp_path / "scores.csv"
    scores.write_text("id,name,value\nmine-000001,pick,3\nmine-000002,pick,4\n")
    place = [f"runs={tmp_path / 'run'}", f"output={tmp_path / 'out'}", "device=cpu"]
    ((_, metrics),) = score.main(composed("score", [*place, f"scores={scores}"])).items()
    assert "speedup" in metrics and metrics["pick"] == 3.5
    export.main(composed("export", [*place[:2], "layout=folder"]))
    assert "a red ring" in (tmp_path / "out/run/metadata.jsonl").read_text()


def test_of_several_processes_the_main_one_tells_what_a_run_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "Processes", lambda cpu: SimpleNamespace(is_main=False))
    dry = ["prompt=a red ring", "metrics=none", "dry_run=true", "device=cpu", "tracking=none"]
    assert evaluate.main(composed("eval", dry)) == {}
    assert capsys.readouterr().out == ""


def test_one_prompt_is_timed_on_demand_after_a_first_line_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    measure = latency.measure

    def spy(*arguments: Any) -> Any:
        told.append(capsys.readouterr().out.splitlines()[-1])
        return measure(*arguments)

    monkeypatch.setattr(latency, "measure", spy)
    tiny = tiny_options(tmp_path)
    timed = ["method=ar", *(one for one in tiny if "drafter" not in one), "prompt=a red ring"]
    quick = [option for option in timed if option != "speed.prompts=1"]
    assert "speedup" in evaluate.main(composed("eval", timed, tmp_path / "timed"))
    images = tmp_path / "timed" / "images"
    assert told == [f"1 image, 1.00 tokens per round, in {images}; next: timing and quality"]
    assert "speedup" not in evaluate.main(composed("eval", quick, tmp_path / "quick"))
    assert len(told) == 1 and "next: timing" not in capsys.readouterr().out


def test_the_picture_of_one_prompt_is_scored_on_demand(tmp_path: Path) -> None:
    tiny = [one for one in tiny_options(tmp_path) if not one.startswith("metrics")]
    picture = [*tiny, "method=eagle", "prompt=a red ring", "speed.prompts=0", "depth=2"]
    assert "clip_score" not in evaluate.main(composed("eval", picture, tmp_path / "picture"))
    assert not (tmp_path / "picture" / "scores").exists()
    asked = [*picture, "metrics=none", "metrics._target_=tiny_evaluation.ToyEvaluator"]
    assert "clip_score" in evaluate.main(composed("eval", asked, tmp_path / "asked"))


def test_a_relaxation_stricter_than_exact_decoding_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [*tiny_options(tmp_path), "method=uniform_rsd", "depth=2", "speed.prompts=0"]
    for options, told in ((["delta=0.5"], 1), (["delta=0.5", "floor=1"], 0), (["delta=1"], 0)):
        evaluate.main(composed("eval", [*shared, *options], tmp_path / ",".join(options)))
        assert capsys.readouterr().out.count("warning: the relaxation ω = 0.5, 0.5") == told


def test_rounds_stay_compiled_while_a_batch_that_fits_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the memory of a device that holds two images at a time."""
    sizes: list[tuple[int, bool]] = []
    rounds = loop.rounds

    def full(target: Any, *given: Any) -> Any:
        rows = given[-1]
        sizes.append((rows, target.compiled))
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return rounds(target, *given)

    monkeypatch.setattr("tempera.evaluation.pipeline.rounds", full)
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)  # a CPU takes a minute
    given = [*tiny_options(tmp_path), "depth=2", "speed.prompts=0", "compile=true", "data.limit=4"]
    auto = ["method=eagle", *given, "batch_size=auto", "family.batch_size=4"]
    evaluate.main(composed("eval", auto, tmp_path / "run"))
    compiled.forget()
    assert sizes == [(4, True), (2, True)]
    assert json.loads((tmp_path / "run/run.json").read_text())["identity"]["compiled"] is True


RULE = """
from tempera.rules.standard import Exact

class Plain(Exact):
    def __init__(self, alpha: float = 1.0, near: str = "") -> None:
        pass
"""


def test_a_rule_that_is_a_plain_class_resumes_and_differs_by_its_options_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.txt").write_text("first")
    rule = ["rule._target_=plain_rule.Plain", "+rule.alpha=2", "+rule.near=table.txt"]
    given = ["method=eagle", *tiny_options(tmp_path), *rule, "depth=2", "hydra.run.dir=run"]

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["run.py", *given, *options])
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
        return capsys.readouterr().err

    assert "error" not in run("data.limit=2")
    assert "error" not in run("data.limit=3")
    assert json.loads((tmp_path / "run/metrics.json").read_text())["images"] == 3
    assert "rule.alpha=2, but this run has rule.alpha=3" in run("rule.alpha=3")
    (tmp_path / "table.txt").write_text("second")
    assert "was made with verification.rule.near=" in run()


def test_another_text_encoder_does_not_go_on_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["method=eagle", *tiny_options(tmp_path), "depth=2", "hydra.run.dir=run"]

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["run.py", *given, *options])
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
        return capsys.readouterr().err

    assert "error" not in run("data.limit=1", "model.text_encoder.directory=first")
    assert "error" not in run("data.limit=2", "model.text_encoder.directory=first")
    assert "was made with text_encoder=" in run("model.text_encoder.directory=second")


def test_a_draft_that_one_trained_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [one for one in tiny_options(tmp_path) if not one.startswith("drafter.path")]
    given = ["method=eagle", *tiny, "depth=2", "speed.prompts=0", "data.limit=1"]
    trained = Path("outputs/train_draft/shapes/draft")
    save_draft(EagleModel.of(network(), "tiny"), trained)
    evaluate.main(composed("eval", given, tmp_path / "run"))
    assert f"draft: {trained} (on this machine)" in capsys.readouterr().out.splitlines()
    content = json.loads((tmp_path / "run/run.json").read_text())
    assert content["draft_from"] == {"path": str(trained), "origin": "on this machine"}
    assert content["identity"]["draft"] == weights_hash(trained)


@pytest.mark.parametrize("method", ["parallel", "medusa"])
def test_other_drafts_that_one_trained_come_before_the_models_own(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Parts.of(composed("eval", [f"method={method}"])).draft_from()
    assert own is not None and own["origin"] == "comes with tempera"
    trained = Path(f"outputs/train_draft/shapes-{method}/draft")
    trained.mkdir(parents=True)
    (trained / "config.json").touch()
    found = Parts.of(composed("eval", [f"method={method}"])).draft_from()
    assert found == {"path": str(trained), "origin": "on this machine"}


def test_all_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    """Draft, prompts and real pictures; of published models the weights, too."""
    draft, prompts, photos = (tmp_path / name for name in ("draft", "prompts.txt", "photos"))
    options = ["method=eagle", f"drafter.path={draft}", "data=file", f"data.path={prompts}"]
    options += ["metrics=real", f"metrics.reference={photos}", "tracking=none", "device=cpu"]
    with pytest.raises(TemperaError) as problem:
        evaluate.main(composed("eval", options, tmp_path / "run"))
    assert all(str(place) in str(problem.value) for place in (draft, prompts, photos))
    assert not (tmp_path / "run").exists()


def test_the_peak_of_memory_is_that_of_decoding(tmp_path: Path) -> None:
    """Not of the networks that score the pictures."""
    result = tiny_evaluate(tmp_path, evaluator=Heavy())
    assert "clip_score" in result
    memory = json.loads((tmp_path / "metrics.json").read_text())["memory"]
    assert 0 < memory < peak_memory(torch.device("cpu")) - 2**26


class Heavy(ToyEvaluator):
    """It takes more than the process ever had."""

    def load(self, device: torch.device) -> Iterator[Networks]:
        torch.ones(peak_memory(device) + 2**27, dtype=torch.uint8)
        yield from super().load(device)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "timed"), [([], 1), (["speed.paired=true"], 2)])
def test_plain_autoregression_is_timed_once_in_a_sweep(
    options: list[str], timed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain: list[str] = []
    tokens = Pipeline.tokens

    def spy(self: Pipeline, prompts: Any, method: Any = None, **given: Any) -> Any:
        if (method or self.method).is_plain:
            plain.append(prompts[0].id)
        return tokens(self, prompts, method, **given)

    monkeypatch.setattr(Pipeline, "tokens", spy)
    given = ["-m", "method=coolsd", "delta=1.1,2", *tiny_options(tmp_path), "depth=2", *options]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, "data.limit=1", "hydra.sweep.dir=s"])
    runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
    assert len(plain) == timed
    for job in ("0", "1"):
        assert "speedup" in json.loads((tmp_path / f"s/{job}/metrics.json").read_text())["metrics"]


PROMPTS = """
from tempera.data.prompts import Prompt

def texts():
    return ["a red ring"]

def nothing():
    return []

def one_by_one():
    yield Prompt("a", "a red ring")

def right():
    return [Prompt("a", "a red ring")]
"""


def test_prompts_of_a_function_of_ones_own_are_a_list_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_prompts.py").write_text(PROMPTS)
    monkeypatch.syspath_prepend(tmp_path)

    def read(name: str) -> int:
        data = {"_target_": f"own_prompts.{name}", "limit": 64, "offset": 0}  # as conf/ adds
        return len(reader(OmegaConf.create({"data": data, "prompt": None}))())

    assert read("right") == 1
    for name, returned in (("texts", "['a red ring']"), ("nothing", "[]"), ("one_by_one", "<gen")):
        with pytest.raises(
            TemperaError, match=f"own_prompts.{name} returned {re.escape(returned)}"
        ):
            read(name)


@pytest.mark.slow
def test_a_job_tells_the_load_under_which_an_earlier_one_timed_plain_autoregression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would seem fast: beside other work plain autoregression takes longer."""
    monkeypatch.chdir(tmp_path)
    for load, delta in ((99.0, "1.1"), (0.0, "1.1,2")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        given = ["-m", "method=coolsd", f"delta={delta}", *tiny_options(tmp_path), "depth=2"]
        monkeypatch.setattr(sys, "argv", ["run.py", *given, "data.limit=1", "hydra.sweep.dir=s"])
        runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
    (told,) = re.findall("speed was measured, so it may be wrong: .*δ=2", capsys.readouterr().out)
    assert "δ=1.1" in told
