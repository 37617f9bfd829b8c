"""`metrics=real`: which networks are taken, what is said before anything is downloaded, and
pictures to numbers; on a network of this file, and a hub on loopback.
"""

import os
import re
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
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
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.metrics.standard import USUAL, Adapter, StandardEvaluator
from tempera.metrics.weights import WeightsFile
from tempera.runtime.row_store import Store
from tempera.runtime.tensor_files import fill

evaluator_of = partial(StandardEvaluator, resamples=200)

CPU = torch.device("cpu")
NAME = "brightness.safetensors"


@dataclass(frozen=True)
class Brightness(Adapter):
    """A network of one number, by which pictures are scored and compared."""

    weights: str

    metrics = ("clip_score", "fid")
    distances = ("fid",)
    name = NAME

    def load(self, device: torch.device) -> Networks:
        network, path = nn.Linear(1, 1), self.files[0].path()
        fill(network, load_file(path), path)
        network.requires_grad_(False)

        def values(pictures: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = network(pictures.float().mean((1, 2, 3))[:, None])
            return found

        return Networks(
            values, [lambda pictures, _: {"clip_score": values(pictures)[:, 0]}], {"fid": frechet}
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {"weight": torch.full((1, 1), 2.0), "bias": torch.zeros(1)}
    save_file(state, tmp_path / NAME)
    return tmp_path / NAME


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "real").mkdir()
    for number in range(20):
        picture = Image.new("RGB", (40 + number, 30), (10 * number,) * 3)
        picture.save(tmp_path / "real" / f"{number:02}.png")
    return tmp_path / "real"


@pytest.mark.parametrize("known", [True, False])
def test_fid_is_to_the_moments_that_a_batch_of_adms_holds(
    known: bool, file: Path, tmp_path: Path
) -> None:
    """They are of all training pictures, its own pictures are 10,000 of them."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (20, 8, 8, 3), np.uint8)
    own = 2.0 * pictures.mean((1, 2, 3))[:, None]
    moments = {"mu": np.array([300.0]), "sigma": np.array([[25.0]])} if known else {}
    np.savez(tmp_path / "adm.npz", arr_0=pictures, **moments)
    evaluator = evaluator_of(["fid"], str(tmp_path / "adm.npz"), own=Brightness(str(file)))
    (networks,) = evaluator.load(CPU)
    reference = reference_features(evaluator, networks, 8, tmp_path / "cache")
    rows = [{"features": [value]} for value in rng.normal(250, 9, 40)]
    found = quality(rows, networks, reference, 20)["fid"].value
    made = np.array([row["features"] for row in rows])
    mean, variance = (300, 25) if known else (own.mean(), own.var(ddof=1))
    apart = (made.mean() - mean) ** 2 + (made.std(ddof=1) - variance**0.5) ** 2
    assert found == pytest.approx(apart, rel=1e-5)


def test_pictures_to_numbers(file: Path, images: Path, tmp_path: Path) -> None:
    evaluator = evaluator_of(["own"], str(images), own=Brightness(str(file)))
    evaluator.check("large")
    evaluator.fetch()
    assert evaluator.to_download() == 0
    (networks,) = evaluator.load(CPU)
    prompts = [Prompt(str(number), "") for number in range(16)]
    pictures = {prompt.id: np.full((3, 8, 8), 10 * place, np.uint8)
                for place, prompt in enumerate(prompts)}  # fmt: skip
    store = Store(tmp_path / "store", "run")
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


def test_names(file: Path, images: Path) -> None:
    """By network or by metric; the others' numbers are left out."""
    named = {"own": Brightness(str(file))}
    one = evaluator_of(["clip_score"], None, **named)
    (networks,) = one.load(CPU)
    assert networks.distances == {}
    assert re.fullmatch("own-[0-9a-f]{16}", networks.identity)
    both = evaluator_of(["fid", "own"], str(images), **named)
    assert [set(networks.distances) for networks in both.load(CPU)] == [{"fid"}]
    assert networks.identity == next(both.load(CPU)).identity
    os.utime(file, ns=(1, 1))  # another file of the same size at the same place
    assert networks.identity != next(both.load(CPU)).identity


def test_fetching_loads_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But it says what is missing."""
    monkeypatch.setattr(Brightness, "load", lambda *_: pytest.fail("it is loaded"))
    evaluator_of(["clip_score"], own=Brightness(str(file))).fetch()
    evaluator = evaluator_of(["clip_score"], own=Brightness(str(file)))
    evaluator.check("large")
    file.unlink()
    with pytest.raises(TemperaError, match=f"{NAME}, which a metric reads, is not at"):
        evaluator.fetch()


def test_images_whose_features_are_cached_are_not_read_again(
    file: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        evaluator_of(["fid"], str(images), own=Brightness(str(file))).check("large")

    monkeypatch.setattr(references, "cache_directory", lambda: tmp_path / "cache")
    evaluator = evaluator_of(["fid"], str(images), own=Brightness(str(file)))
    (networks,) = evaluator.load(CPU)
    reference_features(evaluator, networks, 8, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(references, "decode_picture", lambda _: pytest.fail("it is read"))
        check()
    (images / "20.png").write_bytes(b"no picture")  # the images have changed
    with pytest.raises(TemperaError, match=r"20.png cannot be read"):
        check()


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["owm"], {}, "no metric owm: the names are own, clip_score"),
        (["own"], {}, "no real images to compare with"),
        (["own"], {"reference": "nowhere"}, "nowhere does not exist"),
        (["clip_score"], {"own": Brightness("no.pt")}, f"{NAME}, which a metric reads, is not at"),
        ([], {}, "names is empty"),
    ],
)
def test_what_cannot_be_measured(names: list[str], options: dict, words: str, file: Path) -> None:
    with pytest.raises(TemperaError, match=words):
        evaluator_of(names, **{"own": Brightness(str(file)), **options}).check("large")


def test_usual_metrics_that_cannot_be_had_end_the_run(file: Path, tmp_path: Path) -> None:
    at_hand = {name: Brightness(str(file)) for name in USUAL}
    evaluator_of(None, None, **at_hand).check("large")
    for reference, missing in ((None, Alone("no.pt")), (tmp_path / "no", at_hand["fid"])):
        evaluator = evaluator_of(None, reference and str(reference), **at_hand | {"fid": missing})
        with pytest.raises(TemperaError, match="=\\[...\\] or metrics=none\\): .*(not|no) "):
            evaluator.check("large")


@dataclass(frozen=True)
class Alone(Brightness):
    """It compares with nothing."""

    distances = ()


def test_usual_metrics_that_compare_are_left_out_without_a_reference(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {name: Brightness("no.pt") for name in USUAL} | {"clip": Alone(str(file))}
    evaluator = evaluator_of(None, None, **usual)
    evaluator.check("large")
    assert evaluator.to_download() == 0  # a dry run asks for no more
    left_out = ", ".join(name for name in USUAL if name != "clip")
    assert capsys.readouterr().out == f"left out without metrics.reference: {left_out}\n"
    evaluator.fetch()
    assert [one.identity.partition("-")[0] for one in evaluator.load(CPU)] == ["clip"]


def test_the_preset_names_networks_whose_metrics_are_in_the_table() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        evaluator = instantiate(compose("eval", ["metrics=real"]).metrics)
    assert isinstance(evaluator, StandardEvaluator)
    for adapter in evaluator.networks.values():
        assert all(table.find(key) for key in adapter.metrics)
        assert set(adapter.distances) <= set(adapter.metrics)


def test_a_url_is_asked_first_and_its_content_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = WeightsFile("https://a.org/vgg16-397923af.pth", "vgg16.pth")
    answer = httpx.Response(
        200, headers={"Content-Length": "17"}, request=httpx.Request("HEAD", there.location)
    )

    def download(url: str, path: str, digest: str) -> None:
        Path(path).write_text(f"{url} {digest}")

    monkeypatch.setattr(httpx, "head", lambda *_, **__: answer)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr(weight_files, "unreachable", lambda _: None)
    assert there.local is None and there.size() == 17
    assert there.path() == there.local == tmp_path / "checkpoints" / "vgg16-397923af.pth"
    assert there.path().read_text() == f"{there.location} 397923af"
    with pytest.raises(TemperaError, match="give the file"):  # of unknown content
        WeightsFile("https://a.org/mine.pth", "mine.pth").size()


def test_a_server_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(weight_files, "unreachable", lambda _: None)
    monkeypatch.setattr(weight_files, "SECONDS", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}/b-01234567.pth"
        with pytest.raises(TemperaError, match="cannot be downloaded .*timed out"):
            WeightsFile(place, "b.pth").path()
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (TimeoutError(), r"cannot be downloaded \(TimeoutError\)"),
        (None, r"cannot be downloaded \(HF_HUB_OFFLINE is set\)"),
    ],
)
def test_a_file_that_cannot_be_downloaded(
    problem: OSError | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    if problem is not None:
        monkeypatch.setattr(weight_files, "unreachable", lambda _: None)
    monkeypatch.setattr(torch.hub, "download_url_to_file", Mock(side_effect=problem))
    with pytest.raises(TemperaError, match=words):
        WeightsFile("https://a.org/b-01234567.pth", "b.pth").path()
