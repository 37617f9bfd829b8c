"""The commands of published models as they are typed, from the hub to the report, on tiny weights
in official layouts: with the network once, and again without it.
"""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from hub import Hub
from hydra.utils import get_class
from image_server import ImageServer
from PIL import Image
from tiny_metrics import (
    image_reward_state,
    image_reward_tokenizer,
    shrink_image_reward,
    tiny_clip,
    write_clip,
    write_inception,
)
from tiny_targets import (
    T5_SIZES,
    composed,
    flow,
    published_draft,
    write_anole,
    write_emu3,
    write_images,
    write_janus,
    write_llamagen_classes,
    write_llamagen_text,
    write_lumina,
    write_mar,
    write_t5,
    write_words,
)

from tempera.commands.evaluate import main as evaluate
from tempera.commands.report import main as write_report
from tempera.commands.scripts import train
from tempera.config.instantiate import instantiate
from tempera.metrics import reference as references
from tempera.runtime import tracking
from tempera.runtime.hub import Repository

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_figures")]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With MS-COCO's captions, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub(tmp_path / "cache") as started:
        assert isinstance(started, Hub)
        started.here(monkeypatch)
        started.add_captions()
        yield started


def on_hub(
    hub: Hub, write: Callable[[Path], list[str]], repository: str, directory: Path
) -> list[str]:
    """The tiny model on the hub, and the options of its size."""
    directory.mkdir()
    options = [option for option in write(directory) if not option.startswith("model.weights=")]
    hub.add_directory(repository, directory)
    return options


QUICK = [
    "training.batch_size=2",
    "training.validate_every=2",
    "training.holdout=2",
    "training.decodes=1",
    "training.depth=2",
    "tracking=none",
]


def trained(options: list[str], *more: str) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    cfg = composed(*options, *QUICK, "device=cpu", *more, config="train_draft")
    cfg.directory = f"outputs/train_draft/{cfg.model.name}"
    return dict(train(cfg))


COOLSD = ("method=coolsd", "delta=2", "depth=2")


def evaluated(
    options: list[str], name: str, method: Sequence[str] = COOLSD, *more: str
) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    small = ["data.limit=2", "speed.prompts=0", "tracking=none", "device=cpu"]
    cfg = composed(*options, *method, *small, *(more or ("metrics=none",)))  # on no hub here
    cfg.directory = f"outputs/eval/{name}"
    evaluate(cfg)
    return dict(json.loads(Path(cfg.directory, "metrics.json").read_text()))


def test_llamagen_trains_on_laion_coco_and_is_evaluated_on_coco(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reported; what W&B would record names the data and the settings."""
    recorded: dict[str, Any] = {}

    def no_tracker(*, job_type: str, config: Any, **_: Any) -> tracking.Tracker:
        recorded[job_type] = config
        return tracking.Tracker()

    monkeypatch.setattr(tracking, "no_tracker", no_tracker)
    options = on_hub(hub, write_llamagen_text, "peizesun/llamagen_t2i", tmp_path / "weights")
    small = [
        "source.shard_size=40",
        "source.min_side=8",
        "train_data.limit=70",
        "training.epochs=0.05",
        "training.steps=null",
    ]
    with ImageServer() as web:
        hub.add_pictures(web)
        metrics = trained(options, *small)
        assert len(web.paths()) == len(set(web.paths())) <= 120
    assert metrics["finished"] and metrics["data"]["count"] == 70
    assert metrics["data"]["source"]["commit"]
    assert metrics["steps"] == 2  # 0.05 epochs of some 66 images in batches of 2
    assert recorded["train_draft"]["data"]["sha256"] == metrics["data"]["sha256"]
    assert metrics["data"]["source"]["repository"] == "laion/relaion-coco"
    result = evaluated(options, "online")
    assert result["about"]["data"]["count"] == 2 and result["images"] == 2
    config = recorded["eval"]
    assert (config["data"]["prompts"]["limit"], config["data"]["count"]) == (2, 2)
    assert config["model"] == "llamagen_xl_stage1"
    hub.here(monkeypatch, offline=True)
    before = len(hub.requests)
    assert trained(options, *small)["steps"] == metrics["steps"]
    again = evaluated(options, "offline")
    assert again["metrics"]["accepted_length"] == result["metrics"]["accepted_length"]
    assert again["about"]["data"] == result["about"]["data"] and len(hub.requests) == before
    alone = evaluated(options, "ar", ("method=ar",))
    assert alone["metrics"]["accepted_length"]["value"] == 1
    lines = reported("outputs/eval")["report.md"].splitlines()
    for run in (result, alone):
        rows = (line for line in lines if line.startswith(f"| {run['name']} "))
        assert f"{run['metrics']['accepted_length']['value']:.2f}" in next(rows)


ANOLE, CLASSES = "GAIR/Anole-7b-v0.1", "FoundationVision/LlamaGen"
T2I, JANUS = "peizesun/llamagen_t2i", "deepseek-community/Janus-Pro-1B"
PLACES = {
    "stage2": (write_llamagen_text, T2I, (T2I, "vq_ds16_t2i.pt"), "google/flan-t5-xl"),
    "classes": (partial(write_llamagen_classes, classes=1000), CLASSES,
                (CLASSES, "vq_ds16_c2i.pt"), None),
    "anole": (write_anole, ANOLE, (ANOLE, "tokenizer/vqgan.ckpt"), ANOLE),
    "lumina": (write_lumina, "Alpha-VLLM/Lumina-mGPT-7B-64", (ANOLE, "tokenizer/vqgan.ckpt"),
               "Alpha-VLLM/Lumina-mGPT-7B-768"),
    "emu3": (write_emu3, "BAAI/Emu3-Gen", ("BAAI/Emu3-VisionTokenizer", "model.safetensors"),
             "BAAI/Emu3-Gen-hf"),
    "janus": (write_janus, JANUS, None, JANUS),
}  # fmt: skip
"""Where the hub has a network, its image tokenizer (Janus's is in the file of the network) and its
text tokenizer.
"""
PUBLIC = {"stage2": ("jadohu/llamagen2_drafter", 24, "llama"),
          "anole": ("jadohu/anole_drafter", 8832, "chameleon")}  # fmt: skip


def published(hub: Hub, name: str, directory: Path) -> list[str]:
    """A tiny model on the hub, each file in its repository and layout; the options of its size."""
    write, network, images, text = PLACES[name]
    for part in (network, text or network):
        (directory / part).mkdir(parents=True, exist_ok=True)
    options = [
        option
        for option in write(directory / network)
        if not option.startswith("model.weights=") and not option.endswith("_weights=random")
    ]
    if name == "stage2":
        options += ["model=llamagen_xl_stage2", f"+model.text_encoder.sizes={flow(T5_SIZES)}"]
        (directory / network / "t2i_XL_stage1_256.pt").rename(
            directory / network / "t2i_XL_stage2_512.pt"
        )
    if text is not None:
        (write_t5 if name == "stage2" else write_words)(directory / text)
    if name == "anole":
        (directory / ANOLE / "tokenizer").mkdir()
        (directory / ANOLE / "tokenizer.json").rename(
            directory / ANOLE / "tokenizer/text_tokenizer.json"
        )
    if images is not None:
        made = instantiate(composed(*options).model.tokenizer, weights="random")
        write_images(made, directory / images[0] / images[1])
    if name in PUBLIC:
        repository, vocab, family = PUBLIC[name]
        published_draft(directory / repository, vocab, family)
    for place in directory.glob("*/*"):
        hub.add_directory(place.relative_to(directory).as_posix(), place)
    return options


METHODS = {"coolsd": COOLSD, "lantern": ("method=lantern", "tree=chain", "depth=2", "k=4")}
"""With a draft; and with the codebook of the image tokenizer."""


@pytest.mark.parametrize("name", PLACES)
def test_a_model_goes_from_the_hub_to_the_report(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With a public draft, or with one that is trained on images that the target draws; and again
    without the network.
    """
    options = published(hub, name, tmp_path / "published")
    if name not in PUBLIC:
        metrics = trained(
            options, "train_data.limit=40", "training.steps=2", "train_data.batch_size=20"
        )
        assert metrics["data"]["count"] == 40 and metrics["data"]["encoder"]["kind"] == "target"
    found = {key: evaluated(options, key, method) for key, method in METHODS.items()}
    assert {result["images"] for result in found.values()} == {2}
    report = reported("outputs/eval")["report.md"]
    assert all(f"| {result['name']} " in report for result in found.values())
    assert "Fetching" not in capsys.readouterr().err
    fetched = [path for path in hub.paths() if "/resolve/" in path]
    assert len(fetched) == len(set(fetched)) > 1
    hub.here(monkeypatch, offline=True)
    again = evaluated(options, "offline")
    assert again["metrics"]["accepted_length"] == found["coolsd"]["metrics"]["accepted_length"]


CONTINUOUS = {
    "large": ("method=cspd_exact", "gamma=2", "denoising_steps=4"),
    "huge": ("method=cspd", "gamma=2", "denoising_steps=4"),
    "base": ("method=ar", "steps=4", "denoising_steps=4"),
}


@pytest.mark.parametrize("size", CONTINUOUS)
def test_a_mar_and_its_draft_come_from_the_hub(
    size: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAR-B, which has no smaller model, is evaluated alone."""
    options = on_hub(
        hub, lambda place: write_mar(place, size), "jadechoghari/mar", tmp_path / "weights"
    )
    result = evaluated(options, "online", CONTINUOUS[size])
    assert result["images"] == 2 and result["grid"] == [3, 4]
    wanted = {f"mar-{size}.safetensors", "mar-base.safetensors", "kl16.safetensors"}
    assert wanted <= set(hub.downloads())
    if size != "base":
        hub.here(monkeypatch, offline=True)
        again = evaluated(options, "offline", CONTINUOUS[size])
        assert again["metrics"]["accepted_length"] == result["metrics"]["accepted_length"]


def reported(*runs: str) -> dict[str, str]:
    """The texts of a report of these runs, by file."""
    cfg = composed(f"runs=[{','.join(runs)}]", "output=outputs/report", config="report")
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in write_report(cfg)
        if path.suffix in (".md", ".csv", ".html")
    }


NETWORKS = ("inception", "clip", "hps", "image_reward")


def test_all_published_metrics_from_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny checkpoints in official layouts; Inception has its size. VGG-16 is left out, since it is
    read as Inception is.
    """
    shrink_image_reward(monkeypatch)
    name = "tiny-measured"
    state = tiny_clip(tmp_path, name)
    places = {}
    for network in (*NETWORKS, "coco"):
        places[network] = tmp_path / network
        places[network].mkdir()
    write_inception(places["inception"])
    write_clip(places["clip"], state)
    torch.save({"state_dict": state}, places["hps"] / "HPS_v2.1_compressed.pt")
    torch.save(image_reward_state(), places["image_reward"] / "ImageReward.pt")
    image_reward_tokenizer(places["image_reward"])
    for network in NETWORKS:
        hub.add_directory(f"some/{network}", places[network])
    rows = [
        {"image": {"bytes": picture(number), "path": f"{number}.png"}, "answer": [""]}
        for number in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), places["coco"] / "val.parquet")
    files = {"data/val-00000-of-00001.parquet": places["coco"] / "val.parquet"}
    commit = hub.add("some/coco", files, kind="datasets")
    monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", commit))
    prompts = [f"a photo of {count} {noun}s" for count in ("two", "four") for noun in NOUNS]
    Path("prompts.txt").write_text("\n".join(prompts))
    options = on_hub(hub, write_llamagen_text, "peizesun/llamagen_t2i", tmp_path / "weights")
    clip = "hf-hub:some/clip"
    chosen = [
        f"metrics.names=[{','.join(NETWORKS)}]",
        "metrics.inception.weights=some/inception",
        f"metrics.clip.model={clip}", "metrics.clip.weights=null",
        "metrics.hps.weights=some/hps", f"+metrics.hps.model={name}",
        "metrics.image_reward.weights=some/image_reward",
        "metrics.image_reward.tokenizer=some/image_reward",
        "data=file", "data.path=prompts.txt", "data.limit=null", "truncate=true",
    ]  # fmt: skip
    result = evaluated(options, "measured", ("method=ar",), "metrics=real", *chosen)
    found = result["metrics"]
    adapters = composed("metrics=real").metrics
    wanted = {
        metric for network in NETWORKS for metric in get_class(adapters[network]._target_).metrics
    }
    assert wanted <= set(found)
    assert all(found[key]["n"] == len(prompts) for key in ("fid", "clip_score", "hpsv2"))
    text = reported("outputs/eval/measured")["report.md"]
    for title in ("CLIP score", "HPSv2.1", "ImageReward"):
        assert title in text
    for title in ("FID", "KID", "inception score"):  # too few images to tell
        assert f"{title} ↓" not in text and f"{title} ↑" not in text


NOUNS = ("cat", "dog", "bus", "bench", "chair", "clock", "vase", "boat", "bear", "train")


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (10 * number, 99, 5 * number)).save(file, "PNG")
    return file.getvalue()
