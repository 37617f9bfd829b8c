"""`dry_run=true` of evaluation and training: what it tells is what a real run takes."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hub import Hub
from paths import ROOT, SUPPORT
from tiny_targets import FAMILIES, composed, write_llamagen_text, write_lumina, write_mar

from tempera.commands import costs
from tempera.commands import evaluate as evaluation_command
from tempera.commands import train as training_command
from tempera.commands.evaluate import main as evaluate
from tempera.commands.prepare import main as prepare
from tempera.commands.train import main as train
from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.data.laion_coco import LaionCoco
from tempera.data.prompts import Prompt
from tempera.decoding.timing import batch_seconds
from tempera.errors import (
    DiskTooSmall,
    MemoryTooSmall,
    MemoryUnknown,
    MissingWeights,
    TemperaError,
)
from tempera.evaluation import run_time as timing
from tempera.evaluation.estimate import estimate
from tempera.metrics.standard import StandardEvaluator
from tempera.runtime import cost as costing
from tempera.runtime.cost import Cost, Time
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.rehearsal import META, Meter, Rehearsal
from tempera.targets import packed_linear
from tempera.training import estimate as training
from tempera.training.recipe import Recipe
from tempera.training.run_time import Drawing
from tempera.training.trainer import TrainingRun
from tempera.training.validation import accepted_length, imitation

WORDS = "a large green star left of a small white ring"
CPU = torch.device("cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Only the tests of the time measure it."""

    def refuse(*_: Any) -> Time:
        raise TemperaError("this test needs no time.")

    if "the_time" not in request.node.name:
        monkeypatch.setattr(evaluation_command, "_measured", refuse)
        monkeypatch.setattr(training_command, "_measured", refuse)


@pytest.fixture
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in PyTorch's own tensors, as on a GPU, where a meter counts them."""
    monkeypatch.setattr(packed_linear, "packs", lambda weight: False)


def test_a_meter_counts_a_storage_once_and_until_it_is_freed() -> None:
    with Meter() as meter:
        first = torch.zeros(10, 10, device=META)
        second = first + 1
        view = second.view(-1)[:5]
        assert (meter.live, meter.peak) == (800, 800)
        del second
        assert meter.live == 800  # the view holds it
        del view
        assert (meter.live, meter.peak) == (400, 800)


def test_a_rehearsal_answers_reads_of_meta_tensors_alone() -> None:
    blank, real = torch.zeros(3, device=META), torch.zeros(3)
    with Rehearsal(7):
        assert bool(blank.any()) and int(blank.sum()) == 7 and float(blank.sum()) == 7.0
        assert not bool(real.any()) and int(real.sum()) == 0
        out = torch.nn.functional.scaled_dot_product_attention(*[blank[None, None]] * 3)
        assert out.shape == (1, 1, 3)


def cost(**changes: Any) -> Cost:
    values = {"weights": 10**9, "cache": 0, "peak": 2 * 10**9, "written": 5, "download": None}
    return Cost("2 images", **{**values, **changes})


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(costing, "free_memory", lambda device: 10**9)
    with pytest.raises(MemoryTooSmall, match=r"about 2 GB of memory and cuda:1 has 1 GB"):
        cost().check(torch.device("cuda:1"), tmp_path)
    cost(peak=10**9 - 1).check(CPU, tmp_path)
    monkeypatch.setattr(costing, "free_disk", lambda place: 10**6)
    with pytest.raises(DiskTooSmall, match=r"absent will hold 2 MB more"):
        cost(peak=0, written=2 * 10**6).check(CPU, tmp_path / "absent")
    with pytest.raises(DiskTooSmall, match=r"hub will hold 5 GB"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        cost(peak=0, download=5 * 10**9).check(CPU, tmp_path)


def test_what_one_disk_will_hold_is_added_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(costing, "free_disk", lambda place: 10**9)
    images = {tmp_path / "images": 7 * 10**8}
    cost(peak=0, written=2 * 10**8, stored=images).check(CPU, tmp_path)
    with pytest.raises(DiskTooSmall, match=r"will hold 1\.2 GB more"):
        cost(peak=0, download=6 * 10**8, metrics=6 * 10**8).check(CPU, tmp_path)
    with pytest.raises(DiskTooSmall, match=r"images will hold 1\.1 GB more"):
        cost(peak=0, written=4 * 10**8, stored=images).check(CPU, tmp_path)
    monkeypatch.setattr(costing, "_existing", lambda place: Path("/dev" if place.suffix else "/"))
    cost(peak=0, written=4 * 10**8, stored={tmp_path / "a.b": 7 * 10**8}).check(CPU, tmp_path)


def test_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return 1000 + 100 * size

    def fitting(free: int, most: int = 50, device: str = "cuda", sharing: int = 1) -> int:
        monkeypatch.setattr(costing, "free_memory", lambda device: free)
        return costing.largest_batch(peak, most, torch.device(device), sharing)

    assert fitting(2000) == 8 and tried == [1, 4, 8]  # 1,800 bytes may be filled
    assert fitting(10**9) == 50 and fitting(10**9, most=1) == 1
    assert fitting(4000, device="cpu", sharing=2) == fitting(2000)
    assert fitting(4000, sharing=2) == fitting(4000) == 26  # every process has its own GPU
    with pytest.raises(MemoryTooSmall, match=r"about 1\.1 kB of memory and cuda has"):
        fitting(1200)


def test_a_batch_that_grows_faster_than_expected_is_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costing, "free_memory", lambda device: 100_000)
    size = costing.largest_batch(lambda size: 100 * size + size**2, 500, CPU, 1)
    assert size > 200 and 100 * size + size**2 <= 90_000


def test_without_known_memory_no_batch_is_chosen() -> None:
    assert costing.free_memory(torch.device("mps")) is None
    with pytest.raises(MemoryUnknown, match="how much memory mps has free is not known"):
        costing.largest_batch(lambda size: 0, 4, torch.device("mps"), 1)
    cost().check(torch.device("mps"), Path())


def test_the_free_disk_of_a_directory_to_be(tmp_path: Path) -> None:
    assert costing.free_disk(tmp_path / "a" / "b") > 0


def test_the_sentences_of_a_cost() -> None:
    text = str(cost(cache=5 * 10**8, download=0))
    assert "memory: about 2 GB (weights 1 GB, KV cache 500 MB, the rest 500 MB)" in text
    assert "to download: nothing" in text and "unknown" in str(cost())
    assert "to download: nothing, and 2 MB for metrics" in str(cost(download=0, metrics=2 * 10**6))
    assert "disk: at most 5 B, and about 3 GB in images;" in str(
        cost(stored={Path("images"): 3 * 10**9})
    )


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_on_a_processor_that_is_slow_at_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fast: bool
) -> None:
    monkeypatch.setattr(costs, "computes_bfloat16", lambda device: fast)
    dry = ["dry_run=true", "device=cpu", f"directory={tmp_path}"]
    train(composed(*dry, "mixed_precision=bf16", config="train_draft"))
    evaluate(composed(*dry, "dtype=bfloat16", "limit=2", "batch_size=2"))
    said = capsys.readouterr().out
    assert ("mixed_precision=bf16 is several times as slow as mixed_precision=no" in said) != fast
    assert ("dtype=bfloat16 is several times as slow as dtype=float32" in said) != fast


@pytest.mark.slow
def test_float32_is_never_called_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(costs, "computes_bfloat16", lambda device: False)
    train(composed("dry_run=true", "device=cpu", f"directory={tmp_path}", config="train_draft"))
    assert "slow" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coolsd", "coolsd drafter.dtype=bfloat16", "sjd"])
@pytest.mark.usefixtures("_unpacked")
def test_the_memory_of_an_evaluation_is_what_a_decode_takes(method: str) -> None:
    cfg = composed(*f"method={method}".split(), "device=cpu", "batch_size=3")
    prompts = [Prompt(str(number), WORDS) for number in range(3)]
    with build.without_weights(cfg) as (sized, _):
        told = estimate(lambda: build.build_sized_pipeline(sized), prompts, 3, diagnostics=True)
    with Meter("cpu") as meter, torch.inference_mode():
        pipeline = build.build_pipeline(cfg, build.build_fast_target(cfg))
        pipeline = replace(pipeline, method=replace(pipeline.method, graphs=None))
        weights = meter.live
        output = pipeline.tokens(prompts, diagnostics=True)
        pipeline.pictures(output.tokens)
    cache = pipeline.target.session.cache.nbytes()
    assert told.cache == cache
    assert told.weights == pytest.approx(weights, rel=1e-4)
    assert told.peak == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "cspd trials=99", "cspd_published", "cspd_exact"])
def test_the_memory_of_continuous_tokens_is_what_a_decode_takes(
    method: str, tmp_path: Path
) -> None:
    """A round verifies all drafts at once, each with a context of its own."""
    options = [*write_mar(tmp_path), *f"method={method}".split(), "denoising_steps=8"]
    options += ["gamma=4"] * (method != "ar")
    cfg = composed(*options, "device=cpu", "batch_size=16")
    prompts = [Prompt(str(number), "3") for number in range(16)]
    with build.without_weights(cfg) as (sized, _):
        told = estimate(lambda: build.build_sized_pipeline(sized), prompts, 16, diagnostics=True)
    with Meter("cpu") as meter, torch.inference_mode():
        pipeline = build.build_pipeline(cfg, build.build_fast_target(cfg))
        weights = meter.live
        pipeline.pictures(pipeline.tokens(prompts).tokens)
    assert told.weights == pytest.approx(weights, rel=0.01)
    assert told.peak - told.weights == pytest.approx(meter.peak - weights, rel=0.15)


@pytest.mark.slow
@pytest.mark.usefixtures("_unpacked")
def test_the_memory_of_training_is_what_its_steps_take(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    cfg = composed("device=cpu", "batch_size=4", "decodes=2", config="train_draft")
    recipe, loss = Recipe(batch_size=4, decodes=2, ttt_steps=1, holdout=4), instantiate(cfg.loss)

    def made(cfg: Any) -> Any:
        target = build.build_target(cfg)
        with target.device:
            return target, instantiate(cfg.draft, target=target, model="shapes")

    with build.without_weights(cfg) as (sized, _):
        told = training.estimate(lambda: made(sized), loss, recipe, WORDS)
    with Meter("cpu") as meter:
        target, draft = made(cfg)
        weights = meter.live
        codes: Any = training.BlankCodes(WORDS, target.length)
        run = TrainingRun(
            target, draft, codes, loss, recipe, tmp_path, Accelerator(cpu=True), quiet=True
        )
        run.step(0)
        imitation(run.kept(), target, run.held)
        accepted_length(run.kept(), target, run.captions, recipe.depth)
        run.step(1)
    assert told.weights == pytest.approx(weights, rel=0.1)
    assert told.cache == target.session.cache.nbytes()
    assert told.peak == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.usefixtures("_unpacked")
def test_the_memory_of_a_split_target_is_what_each_process_holds(
    parts: int, tmp_path: Path
) -> None:
    """Of two processes under FSDP, with weights that outweigh the activations."""
    sizes = "hidden_size:256,intermediate_size:768,num_hidden_layers:6,num_attention_heads:2"
    config = (
        "{_target_:tempera.targets.llamagen.LlamaGenConfig,vocab_size:64,grid:[4,4],"
        f"prefix_length:6,caption_dim:8,{sizes}}}"
    )
    options = write_llamagen_text(tmp_path)
    options = [one for one in options if not one.startswith(("model.weights=", "+model.network"))]
    options += [f"+model.network.config={config}", "model.weights=random", "device=cpu"]
    recipe = {"batch_size": 2 * parts, "gradient_accumulation": parts, "holdout": 8, "decodes": 1}
    recipe |= {"ema": 0.9, "depth": 2}
    (tmp_path / "rows.json").write_text(json.dumps({"options": options, "recipe": recipe}))
    done = subprocess.run(
        [*TORCHRUN, str(SUPPORT / "split_memory.py"), str(tmp_path / "rows.json")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_USE_FSDP": "true",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    cfg = composed(*options, config="train_draft")
    loss = instantiate(cfg.loss)

    def peak(split: bool) -> int:
        def make() -> Any:
            target = build.build_target(sized)
            with target.device:
                return target, instantiate(sized.draft, target=target, model="sized")

        with build.without_weights(cfg) as (sized, _):
            caption = "two dogs on a red sofa"
            return training.estimate(make, loss, Recipe(**recipe), caption, 2, split=split).peak

    assert held == [pytest.approx(peak(split=True), rel=0.1)] * 2
    assert peak(split=False) > 1.3 * held[0]


def test_the_time_is_told_if_it_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    minute = Time({"decoding": 60.0}, "4 images", "metrics")

    def refused(problem: Exception) -> Any:
        raise problem

    def told(measure: Any, download: int | None = 0, tell: bool = True) -> tuple[Any, str]:
        found = costs.dry(cost(download=download), measure, tell)
        return found, capsys.readouterr().out

    known = {"memory": 2e9, "disk": 5.0}
    absent = "time: not measured, as the weights are not on this machine\n"
    assert told(lambda: minute) == (known | {"time": 60.0}, f"time: {minute}\n")
    assert told(lambda: minute, None)[1] == f"time: {minute}\n"  # the cache may have all
    assert told(lambda: minute, tell=False)[1] == ""
    assert told(lambda: minute, download=1) == (known, absent)
    assert told(lambda: refused(MissingWeights("none", "get"))) == (known, absent)
    assert told(lambda: refused(TemperaError("no draft."))) == (
        known, "time: not measured: no draft.\n",
    )  # fmt: skip


@pytest.mark.slow
def test_the_time_of_an_evaluation_whose_weights_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_llamagen_text(tmp_path), "method=lantern", "k=4", "drafter.path=random"]
    monkeypatch.chdir(tmp_path)
    cfg = composed(*options, "prompt=a cat", "device=cpu", "dry_run=true")
    cfg.directory, before = str(tmp_path / "run"), sorted(tmp_path.rglob("*"))
    assert evaluate(cfg)["time"] > 0
    assert "speed timing" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    for changes, reason in (
        ({"expected_length": 3.0}, "expected_length= is found by decoding"),
        ({"compile": True}, "compile=true compiles rounds first"),
        ({"drafter": {**cfg.drafter, "path": "absent"}}, "there is no directory absent"),
        ({"metrics": {**cfg.metrics, "names": []}}, "names lists no metric"),
    ):
        changed = copy.deepcopy(cfg)
        changed.update(changes)
        assert "time" not in evaluate(changed)
        assert f"time: not measured: {reason}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_time_of_continuous_tokens_is_that_of_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*write_mar(tmp_path), "method=cspd", "gamma=2", "denoising_steps=4"]
    cfg = composed(*options, "prompt=3", "device=cpu", "dry_run=true", "speed.prompts=0")
    cfg.directory = str(tmp_path / "run")
    limits = []

    def seen(decode: Any, tokens: int, clock: Any, limit: float) -> float:
        limits.append((tokens, limit))
        return batch_seconds(decode, tokens, clock, limit)

    monkeypatch.setattr(timing, "batch_seconds", seen)
    assert evaluate(cfg)["time"] > 0
    assert limits == [(12, math.inf)] * 2


@pytest.mark.slow
def test_the_time_of_a_training_whose_weights_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_llamagen_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    seen = {}

    def run_time(target: Any, draft: Any, codes: Any, *rest: Any, processes: Any) -> Time:
        seen.update(codes=codes, recipe=rest[1], drawing=rest[2])
        return Time({"steps": 60.0}, "1 step", rest[3])

    monkeypatch.setattr(training_command, "run_time", run_time)

    def told(*more: str, **parts: Any) -> str:
        drawn = [*more, "steps=null", "epochs=2", "limit=40", "batch_size=4", "dry_run=true"]
        cfg = composed(*options, *drawn, "device=cpu", config="train_draft")
        cfg.directory, before = str(tmp_path / "run"), sorted(tmp_path.rglob("*"))
        assert train(cfg)["time"] == 60
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().out

    out = told("train_data=generated", "source=coco_captions", "train_data.batch_size=8")
    assert seen["drawing"] == Drawing(40, WORDS, 8) and seen["recipe"].steps == 19
    assert "not included: downloads\n" in out
    assert isinstance(seen["codes"], training.BlankCodes)
    assert "downloads and encoding of training images" in told("train_data=laion_coco")
    assert seen["drawing"] is None


def test_the_time_of_the_shapes_models_own_images_is_that_of_drawing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run_time(*args: Any, processes: Any) -> Time:
        seen.append(args[5])
        return Time({"training images": 60.0}, "1 step", args[6])

    monkeypatch.setattr(training_command, "run_time", run_time)
    monkeypatch.setattr(training_command, "_weigh", lambda *_: cost(download=0))
    drawn = ["train_data=shapes_mixed", "train_data.limit=40", "train_data.batch_size=8"]
    cfg = composed(*drawn, "device=cpu", "dry_run=true", config="train_draft")
    cfg.directory = str(tmp_path / "run")
    assert train(cfg)["time"] == 60
    assert seen == [Drawing(40, WORDS, 8)]
    assert "not included: downloads\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("split", ["false", "true"], ids=["whole", "FSDP"])
def test_the_time_of_two_training_processes(split: str, tmp_path: Path) -> None:
    options = ["dry_run=true", "device=cpu", "batch_size=2", "holdout=2", "decodes=1", "depth=1"]
    done = subprocess.run(
        [*TORCHRUN, str(ROOT / "train_draft/main.py"), *options, "matrix_lr=0", "ttt_steps=0"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_USE_FSDP": split,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall("time: about .* with 2 processes \\(steps .*, validation", done.stdout)
    assert done.stdout.count("time:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_weighed_without_its_files_and_the_time_is_unknown(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = FAMILIES[name].write(tmp_path)
    prompt = FAMILIES[name].prompts[0]
    for path in tmp_path.rglob("*.*"):
        path.unlink()  # nothing of them is read
    drawn = ["method=eagle", "drafter.path=random", f"prompt={prompt}"]
    cfg = composed(*options, *drawn, "device=cpu", "dry_run=true")
    cfg.directory = str(tmp_path / "run")
    found = evaluate(cfg)
    assert found["memory"] > 0 and not (tmp_path / "run").exists()
    out = capsys.readouterr().out
    assert "to do: 1 images of" in out
    assert "time: not measured, as the weights are not on this machine" in out
    cfg = composed(*options, "batch_size=2", "device=cpu", "dry_run=true", config="train_draft")
    cfg.directory = str(tmp_path / "run")
    assert train(cfg)["memory"] > 0 and not (tmp_path / "run").exists()
    assert "steps of 2 images" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = write_llamagen_text(tmp_path)
    monkeypatch.setattr(costing, "free_memory", lambda device: 1000)
    monkeypatch.setattr(build, "build_fast_target", None)
    cfg = composed(*options, "method=sjd", "window=4", "prompt=a cat", "metrics=none", "device=cpu")
    cfg.directory = str(tmp_path / "run")
    with pytest.raises(MemoryTooSmall, match="this takes about"):
        evaluate(cfg)


@pytest.mark.slow
def test_training_that_does_not_fit_ends_before_images_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = write_llamagen_text(tmp_path)
    monkeypatch.setattr(costing, "free_memory", lambda device: 1000)
    monkeypatch.setattr(training_command, "fetch", None)
    cfg = composed(*options, "device=cpu", "tracking=none", config="train_draft")
    cfg.directory = str(tmp_path / "run")
    with pytest.raises(MemoryTooSmall, match="this takes about"):
        train(cfg)


@pytest.mark.slow
def test_images_without_room_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_llamagen_text(tmp_path), "device=cpu", "source.images=images"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LaionCoco, "fetch", None)

    def cfg(config: str, *more: str) -> Any:
        made = composed(*options, *more, config=config)
        made.directory = str(tmp_path / "run")
        return made

    training_options = ["train_data=laion_coco", "tracking=none"]
    train(cfg("train_draft", *training_options, "dry_run=true"))
    size = r"28\.3 GB"  # 100,000 photographs of 1024×768 pixels
    assert re.search(rf"disk: at most .*, and about {size} in images;", capsys.readouterr().out)
    assert prepare(cfg("prepare", "source=laion_coco", "dry_run=true")) == {"done": 0, "sampled": 0}
    assert re.search(rf"disk: about {size} in images\ntime: not", capsys.readouterr().out)
    monkeypatch.setattr(costing, "free_disk", lambda place: 10**10)
    for run in (
        lambda: train(cfg("train_draft", *training_options)),
        lambda: train(cfg("train_draft", *training_options, "dry_run=true")),
        lambda: prepare(cfg("prepare", "source=laion_coco")),
        lambda: prepare(cfg("prepare", "source=laion_coco", "dry_run=true")),
    ):
        with pytest.raises(DiskTooSmall, match=rf"images will hold {size} more"):
            run()


@pytest.mark.slow
def test_a_batch_is_chosen_for_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_llamagen_text(tmp_path), "device=cpu", "dry_run=true"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{number} cats" for number in range(9)))
    drawn = ["method=sjd", "window=4", "data=file", f"path={prompts}"]

    def weighed(batch_size: Any) -> tuple[float, int]:
        cfg = composed(*options, *drawn, f"batch_size={batch_size}")
        cfg.directory = str(tmp_path / "run")
        return evaluate(cfg)["memory"], cfg.batch_size

    five = weighed(5)[0]
    monkeypatch.setattr(costing, "free_memory", lambda device: int(1.01 * five / 0.9))
    assert weighed("auto") == (pytest.approx(five, rel=1e-3), 5)
    assert "batch_size=auto: 5 prompts at a time" in capsys.readouterr().out
    monkeypatch.setattr(costing, "free_memory", lambda device: 10**12)
    assert weighed("auto")[1] == 9  # all prompts
    monkeypatch.setattr(StandardEvaluator, "memory", lambda *_: 10**12)
    with pytest.raises(MemoryTooSmall):  # for the networks of metrics
        weighed("auto")
    with pytest.raises(TemperaError, match="`batch_size=many` is not possible; it must be"):
        weighed("many")


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "FSDP"])
def test_a_batch_of_training_is_split_into_the_fewest_parts_that_fit(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_llamagen_text(tmp_path), "device=cpu", "dry_run=true", "batch_size=12"]

    def weighed(parts: Any) -> float:
        chosen = f"gradient_accumulation={parts}"
        cfg = composed(*options, "decodes=0", chosen, config="train_draft")
        cfg.directory = str(tmp_path / "run")
        return float(train(cfg)["memory"])

    monkeypatch.setattr(training_command, "uses_fsdp", lambda: split)
    four_at_a_time = weighed(3)
    monkeypatch.setattr(costing, "free_memory", lambda device: int(1.01 * four_at_a_time / 0.9))
    assert weighed("auto") == pytest.approx(four_at_a_time, rel=1e-3)
    assert "gradient_accumulation=auto: 3, 4 images at a time" in capsys.readouterr().out


@pytest.mark.slow
def test_sizes_of_config_json_are_weighed_and_downloads_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [option for option in write_lumina(tmp_path) if "num_hidden_layers" not in option]
    sizes = []
    for layers in (1, 3):
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
        cfg = composed(*options, "method=ar", "prompt=a cat", "device=cpu", "dry_run=true")
        cfg.directory = "run"
        sizes.append(evaluate(cfg)["memory"])
    assert sizes[0] < sizes[1]
    with Hub(tmp_path / "cache") as hub:
        assert isinstance(hub, Hub)
        hub.here(monkeypatch)
        hub.add("x/y", {"a.safetensors": b"12345", "other.bin": b"1"})
        files = PretrainedFiles("x/y", ["a.safetensors"], "x/y")
        assert costs.to_download([files, files]) == 5 and files.find()
        assert costs.to_download([files]) == 0
        hub.here(monkeypatch, offline=True)
        other = PretrainedFiles("x/z", ["a.safetensors"], "x/z")
        assert costs.to_download([other]) is None
