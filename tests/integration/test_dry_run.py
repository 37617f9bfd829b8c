"""`dry_run=true` of evaluation and training, `batch_size=auto`, and memory that runs out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import slow_but
from hub import Hub
from live_bytes import LiveBytes
from omegaconf import DictConfig
from paths import ROOT
from tiny_evaluation import tiny_pipeline
from tiny_targets import DISTINCT, FAMILIES, composed, write_lumina

from tempera.commands import costs
from tempera.commands.bench import main as bench
from tempera.commands.evaluate import main as evaluate
from tempera.commands.prepare import main as prepare
from tempera.commands.train import main as train
from tempera.commands.tune import main as tune
from tempera.config import compose
from tempera.config.messages import sentence
from tempera.config.parts import Parts
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.evaluation import run
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import RunPlan
from tempera.runtime.distributed import Processes
from tempera.runtime.pretrained import PretrainedFiles, sizes_only
from tempera.shapes.scenes import world_prompts
from tempera.targets import packed_linear

DRY = ("device=cpu", "dry_run=true", "directory=.")


@pytest.mark.parametrize(
    "method",
    slow_but(
        ["coolsd", "coolsd drafter.dtype=bfloat16", "parallel_block", "sjd"], "parallel_block"
    ),
)
def test_the_memory_of_an_evaluation_is_what_a_decode_holds(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "packs", lambda weight: False)  # as on a GPU
    cfg = composed(f"method={method.split()[0]}", *method.split()[1:], "device=cpu")
    prompts = [Prompt(str(number), "a red ring") for number in range(2)]
    with Parts.of(cfg).sized() as (sized, _):
        target = sized.fast_target()
        told = costs.decoding_memory(target, sized, ["a red ring"] * 2)
    with LiveBytes() as held:
        pipeline = Parts.of(cfg).pipeline(Parts.of(cfg).fast_target(), Parts.of(cfg).rule())
        assert told["weights"] == pytest.approx(held.live, rel=0.03)
    pipeline.tokens(prompts)
    assert told["KV cache"] == pipeline.target.runner.cache.nbytes()
    nodes = pipeline.method.drafter.nodes
    assert told["logits"] == 4 * 4 * (1 + nodes) * pipeline.target.vocab_size
    assert told["image decoder"] >= 3 * 48 * 48 * 4  # a picture


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_every_family_is_weighed_without_its_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = FAMILIES[name].write(tmp_path)
    for path in tmp_path.rglob("*.*"):
        path.unlink()  # nothing of them is read
    drawn = ["method=eagle", "drafter.path=random", f"prompt={FAMILIES[name].prompts[0]}"]
    cfg = composed(*options, *drawn, *DRY)
    cfg.directory = str(tmp_path / "run")
    before = cfg.copy()
    assert evaluate(cfg)["memory"] > 0 and cfg == before
    cfg = composed(*options, "training.batch_size=2", *DRY, config="train_draft")
    cfg.directory = str(tmp_path / "run")
    assert train(cfg)["memory"] > 0 and not (tmp_path / "run").exists()
    told = capsys.readouterr().out
    assert "to do: 1 image of" in told
    assert re.search(r"to do: \d+ epochs of [\d,]+ images, [\d,]+ tokens each, 2 at a time\n", told)
    assert told.count("in float32 on cpu") == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_fits_one_card_is_what_dry_runs_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens and the memory of docs/published_models.md."""
    page = (ROOT / "docs/published_models.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `(\w+)` \| \S+ \| ([\d,]+) \| ([\d.]+) GB", page)
    assert {"janus_pro_7b", "lumina", "simplear_05b", "glm_image"} < {name for name, *_ in rows}
    with Hub(tmp_path / "cache") as hub:
        hub.here(monkeypatch, offline=True)
        for name, tokens, memory in rows:
            options = ["device=cuda", "batch_size=1", "dry_run=true", "metrics=none"]
            cfg = composed(f"model={name}", "method=scd", "prompt=a red bicycle", *options)
            assert evaluate(cfg)["memory"] / 1e9 == pytest.approx(float(memory), abs=0.06), name
            told = capsys.readouterr().out
            assert f"1 image of {tokens} tokens" in told
            unweighed = {"simplear_05b": "Cosmos", "simplear_15b": "Cosmos", "glm_image": "7B"}
            assert unweighed.get(name, "") in told
            assert ("not included" in told) == (name in unweighed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_dry_run_for_a_gpu_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["method=eagle", "prompt=a red ring", "data.limit=1", "metrics=none", "dry_run=true"]
    given += ["directory=."]
    cfg, memory = (
        composed(*given, "device=cuda"),
        evaluate(composed(*given, "device=cpu"))["memory"],
    )
    assert 0 < evaluate(cfg)["memory"] < memory
    assert (
        evaluate(composed(*given, "device=cuda", "dtype=float32"))["memory"] > memory
    )  # the cache
    dry = ["training.mixed_precision=auto", "dry_run=true", "device=cuda", "directory=."]
    averaged, plain = (
        train(composed(*dry, f"training.ema={ema}", config="train_draft"))["memory"]
        for ema in (0.9, 0)
    )
    assert averaged > plain
    assert capsys.readouterr().out.count("in bfloat16 on cuda") == 3
    cfg.dry_run = False
    with pytest.raises(TemperaError, match="device=cuda"):
        evaluate(cfg)


@pytest.mark.slow
def test_sizes_come_from_config_json_and_downloads_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [option for option in write_lumina(tmp_path) if "num_hidden_layers" not in option]
    sizes = []
    for layers in (1, 3):
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
        sizes.append(evaluate(composed(*options, "method=ar", "prompt=a cat", *DRY))["memory"])
    assert sizes[0] < sizes[1]
    with Hub(tmp_path / "cache") as hub:
        assert isinstance(hub, Hub)
        hub.here(monkeypatch)
        hub.add("x/y", {"a.safetensors": b"12345", "config.json": b'{"width": 3}'})
        files = PretrainedFiles("x/y", ["a.safetensors"], "x/y")
        assert costs.to_download([files, files]) == 17
        with sizes_only():
            assert files.stated({"width": 2}, "x") == {"width": 3}
        assert costs.to_download([files]) == 5 and files.find()
        assert costs.to_download([files]) == 0
        hub.here(monkeypatch, offline=True)
        other = PretrainedFiles("x/z", ["a.safetensors"], "x/z")
        assert costs.to_download([other]) is None


@pytest.mark.parametrize(
    ("config", "main"),
    slow_but(
        [
            ("eval", evaluate),
            ("bench", bench),
            ("tune", tune),
            ("prepare", prepare),
            ("train_draft", train),
        ],
        ("eval", evaluate),
    ),
)
def test_a_dry_run_answers_without_the_hub_and_names_the_commands(
    config: str,
    main: Callable[[DictConfig], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Hub(tmp_path / "cache") as hub:
        hub.here(monkeypatch, offline=True)
        main(compose.composed(config, ["model=llamagen_xl_stage1", *DRY], tmp_path / "run"))
    told = capsys.readouterr().out
    assert "to do: " in told and "HF_HUB_OFFLINE is set" in told
    assert "hf download peizesun/llamagen_t2i --include" in told
    assert config != "eval" or "hf download phiyodr/coco2017 " in told  # its prompts
    stops = "the run would stop: metrics=real cannot measure all" in told
    assert stops == (config in ("eval", "tune")) and "left out: http" not in told
    assert config == "prepare" or "memory: about " in told


def test_a_dry_run_tells_the_draft_that_the_run_would_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["method=parallel", f"drafter.path={tmp_path / 'none'}", "data.limit=1", "metrics=none"]
    assert evaluate(composed(*given, *DRY))["memory"] > 0
    told = capsys.readouterr().out
    assert f"the run would stop: there is no directory {tmp_path / 'none'}: train a draft" in told


@pytest.mark.slow
def test_a_dry_run_of_tuning_tells_the_drafts_that_it_would_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model=lumina", f"outputs={tmp_path}", "metrics=none", *DRY]
    cfg = compose.composed("tune", given, tmp_path / "run")
    tune(cfg)
    told = capsys.readouterr().out
    assert "to do: " in told and "eagle: left out: " in told and "parallel: left out: " in told
    stops = f"the run would stop: there is no directory {tmp_path}/train_draft/lumina-medusa"
    assert told.count("the run would stop: ") == told.count(stops) == 1
    assert "++model.medusa=DIR" in told
    named = [f"++model.parallel={tmp_path / 'none'}", f"outputs={tmp_path}", "metrics=none", *DRY]
    tune(compose.composed("tune", named, tmp_path / "run"))
    told = capsys.readouterr().out
    assert told.count(f"the run would stop: there is no directory {tmp_path / 'none'}: ") == 1
    cfg.dry_run = False
    with pytest.raises(TemperaError, match="lumina-medusa"):
        tune(cfg)


@pytest.mark.slow
def test_files_that_cannot_be_had_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["peizesun/llamagen_t2i", "google/flan-t5-xl", "jadohu/llamagen_drafter"]
    names = "t2i_XL_stage1_256.pt", "vq_ds16_t2i.pt", "tokenizer.json", "model.safetensors"
    given = ["method=eagle", "device=cpu", "data=file", "data.path=none.txt", "directory=."]
    given += ["metrics=none"]
    cfg = composed("model=llamagen_xl_stage1", *given)
    with Hub(tmp_path / "cache") as hub:
        assert isinstance(hub, Hub)
        hub.here(monkeypatch, offline=True)
        with pytest.raises(TemperaError) as problem:
            evaluate(cfg)
        said = str(sentence(problem.value, "eval", []))
        assert all(f"hf download {name}" in said for name in wanted) and "none.txt" in said
        assert all(f'--include "{name}"' in said for name in names)
        hub.here(monkeypatch)
        with pytest.raises(TemperaError) as problem:
            evaluate(cfg)
        assert str(problem.value).count("does not exist or is private") == 3
        for name in wanted:
            hub.add(name, dict.fromkeys(names, b"0"), gate="closed")
        with pytest.raises(TemperaError) as problem:
            evaluate(cfg)
        assert str(problem.value).count("is gated") == 3 and "\n" not in str(problem.value)


def test_a_batch_that_does_not_fit_is_made_smaller_only_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the memory ends when a prompt is started beside others: what is complete stays."""
    ids: list[str] = []
    decoded = Pipeline.decoded

    def small(self: Pipeline, prompts: Any, rows: int, **options: Any) -> Any:
        for number, done in enumerate(decoded(self, prompts, rows, **options)):
            if rows > 5 and number == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            ids.extend(prompt.id for prompt in done.prompts)
            yield done

    def generated(name: str, **options: Any) -> list[list[int]]:
        plan = RunPlan(tmp_path / name, {}, 8, False, 0, **options)
        rows = run._generated(plan, tiny_pipeline(), world_prompts(20), Processes(cpu=True))
        return [list(row["tokens"]) for row in rows]

    whole = generated("whole")
    monkeypatch.setattr(Pipeline, "decoded", small)
    assert generated("auto", shrinks=True) == whole
    assert len(ids) == len({*ids}) == 20
    with pytest.raises(torch.OutOfMemoryError) as problem:
        generated("fixed")
    said = sentence(problem.value, "eval", [])
    assert said is not None and "batch_size" in said and "\n" not in said


def test_the_image_decoder_takes_the_memory_that_the_logits_leave() -> None:
    place: Any = SimpleNamespace(dtype_name="float32", device="cpu")
    for logits, decoder in ((5, 7), (7, 5)):
        memory = {"weights": 10, "KV cache": 1, "logits": logits, "image decoder": decoder}
        assert costs._shown("", place, memory, [])["memory"] == 18


def test_networks_in_objects_of_a_users_package_are_counted() -> None:
    class Own:
        def __init__(self, part: object) -> None:
            self.part = part

    network = torch.nn.Linear(2, 3)
    assert list(costs.networks(Own(Own(network)))) == [network]
    assert list(costs.networks(Own(network.forward))) == [network]
