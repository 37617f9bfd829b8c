"""The commands of published models as they are typed, from the hub to the report, on tiny weights
in official layouts: with the network once, and again without it.
"""

import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from hub import Hub
from image_server import ImageServer
from paths import ROOT
from tiny_targets import (
    composed,
    llamagen_state,
    script,
    write_anole,
    write_emu3,
    write_janus,
    write_llamagen_classes,
    write_llamagen_text,
    write_lumina,
)

from tempera.data import benchmarks
from tempera.runtime.hub import Repository

pytestmark = pytest.mark.slow


def evaluation() -> Any:
    """The entry function of eval/run.py."""
    spec = importlib.util.spec_from_file_location("eval_run", ROOT / "eval" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With MS-COCO's captions, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub(tmp_path / "cache") as started:
        assert isinstance(started, Hub)
        started.here(monkeypatch)
        numbers = list(range(80))
        captions = parquet(
            image_id=numbers, ids=[[n] for n in numbers], captions=[[f"thing {n}"] for n in numbers]
        )
        files = {f"data/{split}-0.parquet": captions for split in ("train", "validation")}
        commit = started.add("phiyodr/coco2017", files, kind="datasets")
        monkeypatch.setattr(benchmarks, "COCO", Repository("phiyodr/coco2017", "dataset", commit))
        yield started


def on_hub(
    hub: Hub, write: Callable[[Path], list[str]], repository: str, directory: Path
) -> list[str]:
    """The tiny model on the hub, and the options of its size."""
    directory.mkdir()
    options = [option for option in write(directory) if not option.startswith("model.weights=")]
    hub.add_directory(repository, directory)
    return options


QUICK = ["batch_size=2", "validate_every=2", "holdout=2", "decodes=1", "depth=2", "tracking=none"]


def trained(options: list[str], *more: str) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    cfg = composed(*options, *QUICK, "device=cpu", *more, config="train_draft")
    cfg.directory = f"outputs/train_draft/{cfg.model.name}"
    return dict(script("main")(cfg))


def evaluated(options: list[str], name: str) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    small = ["limit=4", "speed.prompts=0", "tracking=none", "device=cpu", "depth=2"]
    cfg = composed(*options, "method=coolsd", "delta=2", *small)
    cfg.directory = f"outputs/eval/{name}"
    cfg.choices, cfg.overrides = {}, []
    evaluation()(cfg)
    return dict(json.loads(Path(cfg.directory, "metrics.json").read_text()))


def test_llamagen_trains_on_laion_coco_and_is_evaluated_on_coco(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = "peizesun/llamagen_t2i"
    options = on_hub(hub, write_llamagen_text, repository, tmp_path / "weights")
    small = ["source.shard_size=40", "source.min_side=8", "limit=70", "epochs=0.05", "steps=null"]
    with ImageServer() as web:
        kinds = ["missing" if number % 8 == 0 else "good" for number in range(120)]
        addresses = [f"{web.url}/{kind}/{number}" for number, kind in enumerate(kinds)]
        texts = [f"picture {number}" for number in range(120)]
        table = parquet(URL=addresses, TEXT=texts, top_caption=texts)
        hub.add("laion/relaion-coco", {"data/part-0.parquet": table}, kind="datasets")
        metrics = trained(options, *small)
        assert len(web.paths()) == len(set(web.paths())) <= 120
    assert metrics["finished"] and metrics["data"]["count"] == 70
    assert metrics["data"]["source"]["commit"] and "HTTP 404" in capsys.readouterr().out
    assert metrics["steps"] == 2  # 0.05 epochs of some 66 images in batches of 2
    readme = Path("outputs/train_draft/llamagen_xl_stage1/draft/README.md").read_text()
    assert "laion/relaion-coco" in readme and metrics["data"]["sha256"] in readme
    result = evaluated(options, "online")
    assert result["about"]["data"]["count"] == 4 and result["images"] == 4
    hub.here(monkeypatch, offline=True)
    before = len(hub.requests)
    assert trained(options, *small)["steps"] == metrics["steps"]
    again = evaluated(options, "offline")
    assert again["metrics"]["accepted_length"] == result["metrics"]["accepted_length"]
    assert again["about"]["data"] == result["about"]["data"] and len(hub.requests) == before


def write_imagenet(directory: Path) -> list[str]:
    """A tiny class-conditional LlamaGen of ImageNet's 1,000 classes."""
    options = write_llamagen_classes(directory)
    torch.save(llamagen_state(24, classes=1000), directory / "c2i_B_384.pt")
    kept = [option for option in options if not option.startswith("model.text_encoder")]
    return [option.replace("num_classes:10", "num_classes:1000") for option in kept]


OTHERS = {
    "anole": (write_anole, "GAIR/Anole-7b-v0.1"),
    "emu3": (write_emu3, "BAAI/Emu3-Gen"),
    "janus": (write_janus, "deepseek-community/Janus-Pro-1B"),
    "llamagen_classes": (write_imagenet, "FoundationVision/LlamaGen"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_train_on_images_that_they_draw(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, repository = OTHERS[name]
    options = on_hub(hub, write, repository, tmp_path / "weights")
    metrics = trained(options, "limit=60", "steps=2", "train_data.batch_size=30")
    assert metrics["finished"] and metrics["data"]["count"] == 60
    result = evaluated(options, "online")
    assert result["images"] == 4 and any(repository in path for path in hub.paths())
    hub.here(monkeypatch, offline=True)
    again = evaluated(options, "offline")
    assert again["metrics"]["accepted_length"] == result["metrics"]["accepted_length"]


def test_lumina_trains_on_images_that_it_draws_for_coco_captions(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = on_hub(hub, write_lumina, "Alpha-VLLM/Lumina-mGPT-7B-64", tmp_path / "weights")
    small = ["limit=60", "steps=2", "train_data.batch_size=30"]
    metrics = trained(options, *small)
    assert metrics["finished"] and metrics["data"]["count"] == 60
    assert metrics["data"]["encoder"]["kind"] == "target"
    result = evaluated(options, "online")
    assert result["images"] == 4
    hub.here(monkeypatch, offline=True)
    again = evaluated(options, "offline")
    assert again["metrics"]["accepted_length"] == result["metrics"]["accepted_length"]
