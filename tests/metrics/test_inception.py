"""FID's Inception and VGG-16 on random checkpoints in the official layouts, against a second
writing of both networks.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_metrics import write_inception
from torch import Tensor
from torch.nn.functional import (
    avg_pool2d,
    batch_norm,
    conv2d,
    linear,
    max_pool2d,
)

from tempera.errors import TemperaError
from tempera.metrics import vgg
from tempera.metrics.distances import inception_score, precision, recall
from tempera.metrics.evaluators import Networks
from tempera.metrics.inception import Inception
from tempera.metrics.vgg import VGG
from tempera.runtime.torchvision import import_torchvision

CPU = torch.device("cpu")
POOLS = {"Mixed_5": "average", "Mixed_6": "average", "Mixed_7b": "average", "Mixed_7c": "largest"}
BRANCHES: dict[str, tuple[str, ...]] = {
    "A": ("branch1x1", "branch5x5_1 branch5x5_2",
          "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3", "pool"),
    "B": ("branch3x3/2", "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3/2", "reduce"),
    "C": ("branch1x1", "branch7x7_1 branch7x7_2 branch7x7_3",
          "branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 branch7x7dbl_4 branch7x7dbl_5", "pool"),
    "D": ("branch3x3_1 branch3x3_2/2",
          "branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4/2", "reduce"),
    "E": ("branch1x1", "branch3x3_1 (branch3x3_2a|branch3x3_2b)",
          "branch3x3dbl_1 branch3x3dbl_2 (branch3x3dbl_3a|branch3x3dbl_3b)", "pool"),
}  # fmt: skip
ORDER = {"5b": "A", "5c": "A", "5d": "A", "6a": "B", "6b": "C", "6c": "C", "6d": "C", "6e": "C",
         "7a": "D", "7b": "E", "7c": "E"}  # fmt: skip


class Second:
    """Inception v3, as FID uses it, from the tensors of torch-fidelity's file."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def convolve(self, x: Tensor, name: str, stride: int = 1, padded: bool = True) -> Tensor:
        part = {key[len(name) + 1 :]: one for key, one in self.state.items()
                if key.startswith(f"{name}.")}  # fmt: skip
        high, wide = part["conv.weight"].shape[2:]
        padding = (high // 2, wide // 2) if padded else (0, 0)
        x = conv2d(x, part["conv.weight"], stride=stride, padding=padding)
        keys = ("running_mean", "running_var", "weight", "bias")
        return batch_norm(x, *(part[f"bn.{key}"] for key in keys), eps=0.001).relu()

    def branch(self, x: Tensor, block: str, steps: str) -> Tensor:
        if steps == "reduce":
            return max_pool2d(x, 3, 2)
        if steps == "pool":
            if block == "Mixed_7c":
                x = max_pool2d(x, 3, 1, 1)
            else:
                x = avg_pool2d(x, 3, 1, 1, count_include_pad=False)
            return self.convolve(x, f"{block}.branch_pool")
        for step in steps.split():
            if step.startswith("("):
                names = step[1:-1].split("|")
                x = torch.cat([self.convolve(x, f"{block}.{name}") for name in names], 1)
                continue
            name, _, stride = step.partition("/")
            x = self.convolve(x, f"{block}.{name}", int(stride or 1), padded=not stride)
        return x

    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        x = (resized(pictures.float(), 299) - 128) / 128
        x = self.convolve(x, "Conv2d_1a_3x3", 2, padded=False)
        x = self.convolve(x, "Conv2d_2a_3x3", padded=False)
        x = max_pool2d(self.convolve(x, "Conv2d_2b_3x3"), 3, 2)
        x = self.convolve(x, "Conv2d_3b_1x1")
        x = max_pool2d(self.convolve(x, "Conv2d_4a_3x3", padded=False), 3, 2)
        for block, kind in ORDER.items():
            name = f"Mixed_{block}"
            x = torch.cat([self.branch(x, name, steps) for steps in BRANCHES[kind]], 1)
        pooled = x.mean((2, 3))
        return pooled, linear(pooled, self.state["fc.weight"])


def resized(x: Tensor, size: int) -> Tensor:
    """TensorFlow 1's bilinear resizing: the first pixels' corners meet, not their centres."""
    for axis in (2, 3):
        places = np.arange(size) * (x.shape[axis] / size)
        low = torch.from_numpy(places.astype(int))
        high = (low + 1).clamp(max=x.shape[axis] - 1)
        share = torch.tensor(places - places.astype(int), dtype=torch.float32)
        share = share[:, None] if axis == 2 else share
        x = x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share
    return x


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inception(tmp_path_factory.mktemp("inception"))


def features(networks: Networks, pictures: Tensor) -> Tensor:
    assert networks.features is not None
    with torch.inference_mode():
        return networks.features(pictures)


@pytest.mark.slow
def test_inception(inception_file: Path) -> None:
    networks = Inception(str(inception_file.parent)).load(CPU)
    pictures = torch.randint(0, 256, (2, 3, 40, 40)).to(torch.uint8)
    found = features(networks, pictures)
    pooled, logits = Second(torch.load(inception_file))(pictures)
    assert torch.allclose(found[:, :2048], pooled, rtol=1e-3, atol=1e-4)
    assert torch.allclose(found[:, 2048:], logits, rtol=1e-3, atol=1e-4)
    assert set(networks.distances) == {"fid", "kid", "precision", "recall"}
    left, right = torch.randn(20, 3056), torch.randn(20, 3056)
    right[:, :2048] = left[:, :2048]  # the logits do not enter FID
    assert networks.distances["fid"](left, right, 2).value == pytest.approx(0, abs=1e-3)
    assert networks.statistics["inception_score"](left, 2).value > 1


class Given(torch.nn.Module):
    """Returns what it is given."""

    def forward(self, images: Tensor) -> Tensor:
        return images


def test_inceptions_features_come_before_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 2,048 are compared; the others are logits, whose score has 10 parts."""
    monkeypatch.setattr(Inception, "network", lambda self: Given())
    left, right = torch.randn(20, 2060), torch.randn(20, 2060)
    for adapter, neighbours, splits in ((Inception(), 3, 10), (Inception("", 2, 4), 2, 4)):
        networks = adapter.load(CPU)
        near = networks.distances["precision"](left, right, 5)
        assert near == precision(left[:, :2048], right[:, :2048], neighbours, 5)
        score = networks.statistics["inception_score"](left, 5)
        assert score == inception_score(left[:, 2048:], 5, splits)
    monkeypatch.setattr(Given, "forward", lambda self, pictures: (pictures, 2 * pictures))
    pictures = torch.arange(6.0).view(2, 3)
    assert features(Inception().load(CPU), pictures).equal(torch.cat([pictures, 2 * pictures], 1))


def test_vgg_sees_224_pixels_that_are_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VGG, "network", lambda self: Given())
    networks = VGG("").load(CPU)
    found = features(networks, torch.full((2, 3, 10, 12), 51, dtype=torch.uint8))
    expected = (0.2 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(found, expected[:, None, None].expand(2, 3, 224, 224))
    left, right = torch.randn(20, 4), torch.randn(20, 4)
    assert networks.distances["recall_vgg"](left, right, 5) == recall(left, right, 3, 5)


def test_vgg_ends_after_its_second_fully_connected_layer() -> None:
    with torch.device("meta"):
        state = import_torchvision().models.vgg16().state_dict()
        network = vgg._until_second_layer()
    kinds = [type(layer).__name__ for layer in network.classifier]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear"]
    left = state.keys() - network.state_dict().keys()
    assert left == {"classifier.6.weight", "classifier.6.bias"}


@pytest.mark.slow
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"other": torch.zeros(1)}, path)
    with pytest.raises(TemperaError, match=r"torch-fidelity's Inception \(it holds other\)"):
        Inception(str(path)).network()
    with pytest.raises(TemperaError, match=r"does not hold the weights of torchvision's VGG-16"):
        VGG(str(path)).network()
    path.write_bytes(b"junk")
    with pytest.raises(TemperaError, match="or no PyTorch file"):
        Inception(str(path)).network()
