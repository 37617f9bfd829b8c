"""FID's Inception and VGG-16 on random checkpoints in the official layouts."""

from pathlib import Path

import pytest
import torch
import torchvision
from tiny_metrics import write_inception
from torch import Tensor

from tempera.errors import TemperaError
from tempera.metrics import fidelity
from tempera.metrics.distances import inception_score, precision, recall
from tempera.metrics.evaluators import Networks
from tempera.metrics.fidelity import VGG, Inception
from tempera.metrics.quality import quality

CPU = torch.device("cpu")


def features(networks: Networks, pictures: Tensor) -> Tensor:
    assert networks.features is not None
    with torch.inference_mode():
        return networks.features(pictures)


@pytest.mark.slow
def test_inception_reads_the_published_layout_and_no_other(tmp_path: Path) -> None:
    file = write_inception(tmp_path)
    networks = Inception(str(file.parent)).load(CPU)
    pictures = torch.randint(0, 256, (2, 3, 40, 40)).to(torch.uint8)
    found = features(networks, pictures)
    assert found.shape == (2, 2048 + 1008) and found.isfinite().all()
    assert not found[0].equal(found[1])
    pool, logits = found.split([2048, 1008], 1)  # without bias
    torch.testing.assert_close(logits, pool @ torch.load(file)["fc.weight"].T)
    assert set(networks.distances) == {"fid", "kid", "precision", "recall"}
    path = tmp_path / "weights.pth"
    for content, words in (
        ({"other": torch.ones(2, 2)}, "does not hold the weights of torch-fidelity's Inception"),
        ({"other": torch.full((2, 2), torch.nan)}, "holds infinite numbers or NaN in other"),
    ):
        torch.save(content, path)
        with pytest.raises(TemperaError, match=words):
            Inception(str(path)).load(CPU)
    path.write_bytes(b"junk")
    with pytest.raises(TemperaError, match="not a file of weights"):
        Inception(str(path)).load(CPU)


@pytest.mark.slow
def test_inceptions_features_come_before_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 2,048 are compared; the others are logits."""
    monkeypatch.setattr(fidelity, "extractor", lambda *_: torch.nn.Identity())
    networks = Inception("no file").load(CPU)
    left, right = torch.randn(20, 2060), torch.randn(20, 2060)
    rows = [{"features": row.tolist()} for row in left]
    found = quality(rows, networks, right.double().numpy(), 5)
    assert found["precision"] == precision(left[:, :2048], right[:, :2048], 5)
    assert found["inception_score"] == inception_score(left[:, 2048:].double(), 5)


@pytest.mark.slow
def test_vgg_is_torch_fidelitys(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = torchvision.models.vgg16(init_weights=False)
    torch.save(network.state_dict(), tmp_path / "vgg16-397923af.pth")
    networks = VGG(str(tmp_path)).load(CPU)
    found = features(networks, torch.randint(0, 256, (2, 3, 40, 40)).to(torch.uint8))
    assert found.shape == (2, 4096) and (found < 0).any()  # before the ReLU
    left, right = torch.randn(20, 4), torch.randn(20, 4)
    assert networks.distances["recall_vgg"](left, right, 5) == recall(left, right, 5)
    torch.save({"other": torch.ones(1)}, tmp_path / "vgg16-397923af.pth")
    with pytest.raises(TemperaError, match=r"does not hold the weights of torch-fidelity's VGG16"):
        VGG(str(tmp_path)).load(CPU)
