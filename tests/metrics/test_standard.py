"""`metrics=real`: which networks are taken, what is said before anything is downloaded, and
pictures to numbers; on networks of this file, and a hub on loopback.
"""

import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub import Hub
from hydra import compose, initialize_config_dir
from paths import CONF
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from tempera.config.instantiate import instantiate
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import reference as references
from tempera.metrics import table
from tempera.metrics import weights as weight_files
from tempera.metrics.distances import frechet
from tempera.metrics.evaluators import Networks
from tempera.metrics.inception import Inception
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.metrics.reference import Reference
from tempera.metrics.standard import USUAL, Adapter, StandardEvaluator, standard_evaluator
from tempera.metrics.vgg import VGG
from tempera.metrics.weights import WeightsFile, filled
from tempera.runtime.hub import Repository
from tempera.runtime.row_store import Store

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Brightness(Adapter):
    """A network of one number, by which pictures are scored and compared."""

    weights: str

    metrics = ("clip_score", "fid")
    distances = ("fid",)

    @property
    def files(self) -> tuple[WeightsFile, ...]:
        return (WeightsFile(self.weights, ("brightness.safetensors", "brightness.bin")),)

    def network(self) -> nn.Module:
        path = self.files[0].path()
        return filled(nn.Linear(1, 1), load_file(path), path, "the brightness")

    def load(self, device: torch.device) -> Networks:
        network = self.network().to(device)

        def values(pictures: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = network(pictures.float().mean((1, 2, 3))[:, None])
            return found

        return Networks(
            values, [lambda pictures, _: {"clip_score": values(pictures)[:, 0]}], {"fid": frechet}
        )


def weights(scale: float = 2.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), scale), "bias": torch.zeros(1)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(weights(), tmp_path / "brightness.safetensors")
    return tmp_path / "brightness.safetensors"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    directory = tmp_path / "real" / "deeper"
    directory.mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (40 + number, 30), (10 * number,) * 3).save(directory / f"{number:02}.png")
    return tmp_path / "real"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as made:
        made.here(monkeypatch)
        yield made


def test_pictures_to_numbers(file: Path, images: Path, tmp_path: Path) -> None:
    evaluator = standard_evaluator(["own"], str(images), own=Brightness(str(file)))
    evaluator.check("large")
    evaluator.fetch()
    assert evaluator.to_download() == 0
    (networks,) = evaluator.load(CPU)
    prompts = [Prompt(str(number), "") for number in range(16)]
    pictures = {prompt.id: np.full((3, 8, 8), 10 * place, np.uint8)
                for place, prompt in enumerate(prompts)}  # fmt: skip
    store = Store(tmp_path / "store")
    rows = score_pictures(networks, prompts, lambda prompt: pictures[prompt.id], store)
    reference = reference_features(evaluator, networks, 8, tmp_path / "cache")
    assert reference is not None
    assert reference[:, 0].tolist() == [20.0 * number for number in range(20)]
    found = quality([rows[prompt.id] for prompt in prompts], networks, reference, 20)
    assert set(found) == {"clip_score", "fid"}
    assert found["clip_score"].value == pytest.approx(2 * 75)
    mine, real = 20 * np.arange(16.0), 20 * np.arange(20.0)
    gap = (mine.mean() - real.mean()) ** 2 + (mine.std(ddof=1) - real.std(ddof=1)) ** 2
    assert found["fid"].value == pytest.approx(gap)


def test_the_reference_has_the_pictures_own_size(images: Path) -> None:
    for edge in (24, 45):
        (batch,) = Reference(str(images)).pictures(edge)
        assert batch.shape == (20, 3, edge, edge)
    assert [batch.shape for batch in Reference(str(images), 12).pictures(24)] == [(20, 3, 12, 12)]
    one = Reference(str(images)).identity
    assert one != Reference(str(images), 12).identity
    Image.new("I;16", (30, 30), 128 * 257).save(images / "grey.png")
    assert one != Reference(str(images)).identity
    (batch,) = Reference(str(images)).pictures(8)
    assert batch[-1].min() == batch[-1].max() == 128


def cut_off(path: Path) -> None:
    made = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(made, "JPEG")
    path.write_bytes(made.getvalue()[: len(made.getvalue()) // 2])


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("z.png", lambda path: path.write_bytes(b"junk"), "cannot identify image"),
        ("z.jpg", cut_off, "truncated"),
        ("z.png", os.mkfifo, "is a pipe or a device"),
        ("z.png", Path.mkdir, "is a directory"),
        ("z.png", lambda path: path.symlink_to("nowhere"), "there is no file"),
        ("z.PNG", lambda path: Image.new("1", (20_000, 20_000)).save(path), "pixels"),
        ("z.webp", lambda path: Image.new("F", (9, 9)).save(path, "TIFF"), "floating-point values"),
    ],
)
def test_every_image_of_a_reference_is_opened_first(
    name: str, write: Callable[[Path], None], words: str, images: Path
) -> None:
    Reference(str(images)).check()
    write(images / name)
    with pytest.raises(TemperaError, match=f"{name} cannot be read as an image .*{words}"):
        Reference(str(images)).check()


PICTURES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), np.uint8)


def test_the_reference_from_a_batch_of_adms(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "batch.npz", PICTURES, np.arange(60))
    reference = Reference(str(tmp_path / "batch.npz"))
    reference.check()
    batches = list(reference.pictures(8))
    assert [len(batch) for batch in batches] == [50, 10]
    assert np.array_equal(np.concatenate(batches), PICTURES.transpose(0, 3, 1, 2))


def damaged(path: Path) -> None:
    np.savez_compressed(path, PICTURES)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 255
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"other": PICTURES}, "holds no pictures .*arr_0"),
        ({"arr_0": PICTURES[:15]}, "holds 15 images: give a directory of 16 or more"),
        ({"arr_0": PICTURES / 255}, r"arr_0 is float64 \[60, 8, 8, 3\], not uint8"),
        ({"arr_0": PICTURES[..., 0]}, r"arr_0 is uint8 \[60, 8, 8\], not uint8"),
        ({"arr_0": PICTURES[..., [0, 0, 0, 0]]}, r"uint8 \[60, 8, 8, 4\], not"),
        ({"arr_0": PICTURES[:, :0]}, r"uint8 \[60, 0, 8, 3\], not"),
        ({"arr_0": np.array([{}])}, "arr_0 is object"),
        (lambda path: path.write_bytes(b"junk"), "File is not a zip file"),
        (damaged, "damaged|invalid|Error"),
        (os.mkfifo, "is a pipe or a device"),
        (str, "there is no file"),
    ],
)
def test_a_batch_of_adms_is_opened_first(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    np.savez(path, **content) if isinstance(content, dict) else content(path)
    with pytest.raises(TemperaError, match=words):
        Reference(str(path)).check()


def test_the_reference_is_its_central_square(tmp_path: Path) -> None:
    levels = np.arange(10, dtype=np.uint8) * 20
    for number in range(16):
        wide = np.broadcast_to(levels[None, :, None], (4, 10, 3))
        picture = wide if number % 2 else wide.transpose(1, 0, 2)
        Image.fromarray(picture.copy()).save(tmp_path / f"{number:02}.png")
    reference = Reference(str(tmp_path))
    reference.check()
    (batch,) = reference.pictures(4)
    assert batch[1, 0, 0].tolist() == batch[0, 0, :, 0].tolist() == levels[3:7].tolist()


def test_a_server_is_asked_for_the_size_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    there = WeightsFile("https://example.org/a.pth", ("b.pth",))
    request, headers = httpx.Request("HEAD", there.place), {"Content-Length": "17"}

    def head(*_: object, **__: object) -> httpx.Response:
        return httpx.Response(200, headers=headers, request=request)

    monkeypatch.setattr(httpx, "head", head)
    monkeypatch.setattr(weight_files.constants, "HF_HUB_OFFLINE", False)
    assert there.local is None and there.size() == 17
    headers.clear()
    assert there.size() == 0
    monkeypatch.setattr(weight_files.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TemperaError, match=r"a.pth.*cannot be downloaded .*HF_HUB_OFFLINE=1"):
        there.size()


def test_a_url_has_its_own_place_unless_its_name_states_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(url: str, path: str, hash_prefix: str | None) -> None:
        asked.append(hash_prefix)
        Path(path).write_text(url)

    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr(weight_files.constants, "HF_HUB_OFFLINE", False)
    official = WeightsFile("https://a.org/vgg16-397923af.pth", ("vgg16-397923af.pth",))
    for _ in range(2):
        assert official.path() == tmp_path / "checkpoints" / "vgg16-397923af.pth"
    for url in ("https://a.org/mine.pth", "https://b.org/mine.pth", "https://b.org/mine.pth?v=2"):
        there = WeightsFile(url, official.names)
        assert there.local is None
        assert there.path().read_text() == url and there.path() == there.local
    assert asked == ["397923af", None, None, None]


def test_a_full_disk_is_not_an_unreachable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    monkeypatch.setattr(weight_files.constants, "HF_HUB_OFFLINE", False)
    for problem, words in (
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write .*free some space"),
        (TimeoutError(), r"cannot be downloaded \(TimeoutError\)"),
    ):
        monkeypatch.setattr(torch.hub, "download_url_to_file", Mock(side_effect=problem))
        with pytest.raises(TemperaError, match=words):
            WeightsFile("https://a.org/b.pth", ("b.pth",)).path()


def test_the_first_name_that_a_repository_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(self: Repository, name: str) -> int:
        if name != "other.bin":
            raise TemperaError(f"{self.id} at {self.revision} has no {name}")
        return 5

    monkeypatch.setattr(Repository, "size", size)
    monkeypatch.setattr(Repository, "cached", lambda self, name: None)
    there = WeightsFile("some/model@v2", ("usual.bin", "other.bin"))
    there.size()
    assert there.size() == 5
    with pytest.raises(TemperaError, match=r"some/model at v2 has no usual.bin"):
        WeightsFile("some/model@v2", ("usual.bin", "older.bin")).size()


def test_names(file: Path, images: Path) -> None:
    """By network or by metric; the others' numbers are left out."""
    named = {"own": Brightness(str(file))}
    one = standard_evaluator(["clip_score"], None, **named)
    (networks,) = one.load(CPU)
    assert networks.distances == {} and one.scores_clip
    assert re.fullmatch("own-[0-9a-f]{16}", networks.identity)
    assert re.fullmatch("[0-9a-f]{16}", one.identity)
    assert not standard_evaluator(["fid"], str(images), **named).scores_clip
    assert one.resamples == StandardEvaluator(named).resamples == 200
    both = standard_evaluator(["fid", "own"], str(images), **named)
    assert [set(networks.distances) for networks in both.load(CPU)] == [{"fid"}]
    assert networks.identity == next(both.load(CPU)).identity
    with pytest.raises(TemperaError, match="no metric owm: did you mean own.*own, clip_score"):
        standard_evaluator(["owm"], None, **named).check("large")
    with pytest.raises(TemperaError, match="no real images for FID"):
        standard_evaluator(["own"], None, **named).check("large")
    with pytest.raises(TemperaError):  # before what else is wrong
        standard_evaluator(["own"], None, own=Brightness("no.pt")).check("large")
    with pytest.raises(TemperaError, match="holds 0 images: give a directory of 16 or more"):
        standard_evaluator(["own"], str(file.parent / "none"), **named).check("large")


def test_options_out_of_range(file: Path, images: Path) -> None:
    own = Brightness(str(file))
    with pytest.raises(TemperaError, match="names lists no metric"):
        standard_evaluator([], own=own).check("large")
    with pytest.raises(TemperaError, match="resamples=0 is too small"):
        standard_evaluator(["own"], resamples=0, own=own).check("large")
    with pytest.raises(TemperaError, match="size=0 is too small"):
        standard_evaluator(["own"], str(images), 0, own=own).check("large")
    with pytest.raises(TemperaError, match="splits=0 is too small"):
        Inception(splits=0)
    with pytest.raises(TemperaError, match="neighbours=-1 is too small"):
        VGG(neighbours=-1)


def test_weights_of_another_model_are_refused_first(file: Path) -> None:
    save_file({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}, file)
    with pytest.raises(TemperaError, match=r"brightness.* does not hold the weights of the bright"):
        standard_evaluator(["clip_score"], own=Brightness(str(file))).check("large")
    with pytest.raises(TemperaError, match="brightness.safetensors, which a metric reads, is not"):
        standard_evaluator(["clip_score"], own=Brightness("no.pt")).check("large")


@pytest.mark.slow
def test_files_of_the_hub(hub: Hub, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for first, downloaded once, and found again without a network."""
    hub.add("some/brightness", {"brightness.bin": file})
    hub.add("some/closed", {"brightness.safetensors": file}, gate="closed")

    def evaluator(repository: str) -> StandardEvaluator:
        return standard_evaluator(["clip_score"], own=Brightness(repository))

    with pytest.raises(TemperaError, match="some/closed of the hub is gated"):
        evaluator("some/closed").check("large")
    with pytest.raises(TemperaError, match="some/nothing of the hub does not exist or"):
        evaluator("some/nothing").check("large")
    first = evaluator("some/brightness")
    first.check("large")
    assert first.to_download() == file.stat().st_size
    assert hub.downloads().count("brightness.bin") == 0
    first.fetch()
    assert hub.downloads().count("brightness.bin") == 1
    hub.here(monkeypatch, offline=True)
    again = evaluator("some/brightness")
    again.check("large")
    assert len(list(again.load(CPU))) == 1 and again.to_download() == 0
    with pytest.raises(TemperaError, match="some/other is not in the hub's cache.*run `hf"):
        evaluator("some/other").check("large")


def coco_parts(images: Path, folder: Path) -> dict[str, Path]:
    """The pictures in two Parquet files as the hub's COCO has them, every other one in each."""
    rows = [{"image": {"bytes": path.read_bytes(), "path": path.name}, "answer": [""]}
            for path in sorted(images.rglob("*.png"))]  # fmt: skip
    parts = {}
    for number in range(2):
        name = f"data/val-0000{number}-of-00002.parquet"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows[number::2]), folder / name)
        parts[name] = folder / name
    return parts


def test_pictures_of_coco_are_read_part_by_part(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coco_parts(images, tmp_path / "coco")
    monkeypatch.setattr(Repository, "snapshot", lambda self, patterns: tmp_path / "coco")
    (batch,) = Reference("coco").pictures(8)
    assert batch[:, 0, 0, 0].tolist() == [*range(0, 200, 20), *range(10, 200, 20)]


@pytest.mark.slow
def test_the_reference_from_the_hub(
    hub: Hub, images: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = coco_parts(images, tmp_path)
    commit = hub.add("some/coco", {**parts, "data/test-0.parquet": b""}, kind="datasets")
    monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", commit))
    evaluator = standard_evaluator(["fid"], "coco", own=Brightness(str(file)))
    evaluator.check("large")
    size = sum(part.stat().st_size for part in parts.values())
    assert evaluator.to_download() == size and hub.downloads() == []
    evaluator.fetch()
    assert sorted(hub.downloads()) == sorted(parts) and evaluator.to_download() == 0
    hub.here(monkeypatch, offline=True)
    again = standard_evaluator(["fid"], "coco", own=Brightness(str(file)))
    again.check("large")
    assert again.to_download() == 0
    (batch,) = evaluator.reference(8)
    assert batch[:, 0, 0, 0].tolist() == [*range(0, 200, 20), *range(10, 200, 20)]
    monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", "0" * 40))
    with pytest.raises(TemperaError, match="some/coco is not in the hub's cache"):
        Reference("coco").check()


@pytest.mark.slow
def test_files_behind_a_url(
    hub: Hub, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "own"))
    hub.add("some/brightness", {"brightness.safetensors": file})
    url = f"{hub.url}/some/brightness/resolve/main/brightness.safetensors"
    there = WeightsFile(url, ("brightness.safetensors",))
    there.size()
    assert there.local is None and there.size() == file.stat().st_size
    assert load_file(there.path()).keys() == weights().keys()
    there.path()
    assert len(hub.downloads()) == 1
    missing = WeightsFile(f"{hub.url}/gone/weights-2015-6726825d.pth", ("any.pth",))
    with pytest.raises(TemperaError, match="cannot be downloaded .*put it at .*checkpoints"):
        missing.size()
    hub.add("some/other", {"weights-00000000.pth": file})
    named = WeightsFile(f"{hub.url}/some/other/resolve/main/weights-00000000.pth", ("any",))
    with pytest.raises(TemperaError, match="invalid hash value"):
        named.path()
    assert named.local is None


def test_usual_metrics_are_measured_as_far_as_they_are_at_hand(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = {name: Brightness("no.pt") for name in USUAL if name != "clip"}
    evaluator = standard_evaluator(None, clip=Brightness(str(file)), **nowhere)
    evaluator.check("large")
    evaluator.fetch()
    said = capsys.readouterr().out
    assert "left out: brightness.safetensors, which a metric reads, is not at no.pt" in said
    assert "left out: there are no real images for FID" in said
    (networks,) = evaluator.load(CPU)
    assert networks.identity.startswith("clip-")
    none = standard_evaluator(None, **nowhere, clip=Brightness("no.pt"))
    none.check("large")
    assert list(none.load(CPU)) == [] and none.to_download() == 0


def test_the_preset_names_networks_whose_metrics_are_in_the_table() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        evaluator = instantiate(compose("eval", ["metrics=real"]).metrics)
    assert isinstance(evaluator, StandardEvaluator)
    for adapter in evaluator.networks.values():
        assert all(table.find(key) for key in adapter.metrics)
        assert set(adapter.distances) <= set(adapter.metrics)
    named = [name for name in USUAL if evaluator._find(name)]
    assert named == list(USUAL)
