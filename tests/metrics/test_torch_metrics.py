"""Metrics of torchmetrics by name: of pictures, of pairs, and of sets by our features."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.metrics.distances import frechet, inception_score
from tempera.metrics.evaluators import Evaluator, Networks, NoEvaluator, Pictures
from tempera.metrics.quality import quality, score_pictures
from tempera.metrics.torch_metrics import TorchMetrics
from tempera.runtime.files import fingerprint, write_json
from tempera.runtime.image_files import picture_path, write_picture
from tempera.runtime.row_store import Store, write_table
from tempera.runtime.torchvision import import_torchvision

import_torchvision()
from torchmetrics.image import (  # noqa: E402
    PeakSignalNoiseRatio,
    StructuralSimilarityIndexMeasure,
    TotalVariation,
)
from torchmetrics.image.fid import FrechetInceptionDistance  # noqa: E402
from torchmetrics.image.inception import InceptionScore  # noqa: E402
from torchmetrics.image.kid import KernelInceptionDistance  # noqa: E402

CPU = torch.device("cpu")
PROMPTS = [Prompt(f"p{number}", f"text {number}") for number in range(16)]
PICTURES = np.random.default_rng(0).integers(0, 256, (16, 3, 24, 24), np.uint8)
OTHERS = np.random.default_rng(1).integers(0, 256, (16, 3, 24, 24), np.uint8)
REAL = np.random.default_rng(2).normal(size=(30, 6))


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "METRICS", table.METRICS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Another run of these prompts."""
    for prompt, picture in zip(PROMPTS, OTHERS, strict=True):
        path = picture_path(tmp_path / "run", prompt.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_picture(path, picture, fingerprint({"method": "ar"}))
    write_json(tmp_path / "run" / "run.json", {"identity": {"method": "ar"}})
    rows = [{"id": prompt.id, "text": prompt.text} for prompt in PROMPTS]
    write_table(tmp_path / "run" / "results.parquet", rows, fingerprint({"method": "ar"}))
    return tmp_path / "run"


class Means(Evaluator):
    """Features of pictures: means of the colours, in two parts."""

    resamples = 20

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        def features(pictures: Tensor) -> Tensor:
            return torch.cat([pictures.double().mean((2, 3)), pictures.double().std((2, 3))], 1)

        yield Networks(scores=[lambda pictures, _: {"clip_score": torch.zeros(len(pictures))}])
        yield Networks(features, distances={}, identity="means")

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        yield np.zeros((2, 3, edge, edge), np.uint8)


def measured(evaluator: TorchMetrics, store: Path) -> dict[str, Any]:
    pictures = {prompt.id: one for prompt, one in zip(PROMPTS, PICTURES, strict=True)}
    found: dict[str, Any] = {}
    for networks in evaluator.load(CPU):
        place = Store(store / networks.identity, "run")
        rows = score_pictures(networks, PROMPTS, lambda prompt: pictures[prompt.id], place)
        found |= quality([rows[one.id] for one in PROMPTS], networks, REAL, evaluator.resamples)
    return found


def test_pictures_and_pairs_have_intervals_over_prompts(run: Path, tmp_path: Path) -> None:
    makers = {"ssim": StructuralSimilarityIndexMeasure, "psnr": PeakSignalNoiseRatio,
              "variation": partial(TotalVariation, reduction="sum")}  # fmt: skip
    evaluator = TorchMetrics(NoEvaluator(), makers, str(run))
    evaluator.check("any")
    evaluator.check_prompts(PROMPTS)
    found = measured(evaluator, tmp_path)
    assert found.keys() == makers.keys() and table.find("variation").key == "variation"
    left, right = (torch.tensor(one).float() / 255 for one in (PICTURES, OTHERS))
    errors = (left - right).square().mean((1, 2, 3))
    assert found["psnr"].value == pytest.approx(float((-10 * errors.log10()).mean()), rel=1e-4)
    values = [StructuralSimilarityIndexMeasure(data_range=1.0)(one[None], other[None])
              for one, other in zip(left, right, strict=True)]  # fmt: skip
    assert found["ssim"].value == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert found["ssim"].low < found["ssim"].value < found["ssim"].high
    assert found["variation"].value == pytest.approx(float(TotalVariation()(left)) / 16, rel=1e-4)
    fewer = TorchMetrics(NoEvaluator(), {"ssim": makers["ssim"]}, str(run))
    fewer.check("any")
    identities = {next(one.load(CPU)).identity for one in (evaluator, fewer, evaluator)}
    assert len(identities) == 2


def test_sets_are_compared_by_our_features(tmp_path: Path) -> None:
    makers = {"mine": FrechetInceptionDistance, "score": partial(InceptionScore, splits=10),
              "subsets": partial(KernelInceptionDistance, subsets=3, subset_size=9)}  # fmt: skip
    evaluator = TorchMetrics(Means(), makers)
    evaluator.check("any")
    found = measured(evaluator, tmp_path)
    pictures = torch.tensor(PICTURES).double()
    features = torch.cat([pictures.mean((2, 3)), pictures.std((2, 3))], 1)
    assert found["mine"].value == pytest.approx(frechet(features, REAL, 2).value)
    assert found["score"].value == pytest.approx(inception_score(features, 2).value)
    assert found["subsets"].value == measured(evaluator, tmp_path / "again")["subsets"].value
    assert np.isnan(found["mine"].low)
    few = partial(KernelInceptionDistance, subset_size=1000)
    with pytest.raises(TemperaError, match="torchmetrics cannot compute"):
        measured(TorchMetrics(Means(), {"subsets": few}), tmp_path)


def without_pictures(run: Path) -> None:
    picture_path(run, "p3").unlink()


def with_other_texts(run: Path) -> None:
    rows = [{"id": one.id, "text": "other"} for one in PROMPTS]
    write_table(run / "results.parquet", rows, fingerprint({"method": "ar"}))


@pytest.mark.parametrize("change", [without_pictures, with_other_texts])
def test_another_run_must_have_the_prompts(change: Callable[[Path], None], run: Path) -> None:
    change(run)
    with pytest.raises(TemperaError, match="no picture of the prompt p") as problem:
        TorchMetrics(NoEvaluator(), {}, str(run)).check_prompts(PROMPTS)
    assert problem.value.option == "against"


def test_what_cannot_be_measured(run: Path, tmp_path: Path) -> None:
    pair = {"ssim": StructuralSimilarityIndexMeasure}
    with pytest.raises(TemperaError, match=r"torchmetrics.ssim cannot.*give against=RUN"):
        TorchMetrics(NoEvaluator(), pair).check("any")
    with pytest.raises(TemperaError, match=r"torchmetrics.tv cannot.*the name is taken"):
        TorchMetrics(NoEvaluator(), {"tv": TotalVariation})  # a divergence of ours
    sets = TorchMetrics(NoEvaluator(), {"mine": FrechetInceptionDistance})
    with pytest.raises(TemperaError, match=r"torchmetrics.mine cannot.*no real images"):
        sets.check("any")
    with pytest.raises(TemperaError, match="it needs features"):
        list(sets.load(CPU))
    wrong = TorchMetrics(NoEvaluator(), {"noise": partial(TotalVariation, reduction="no")})
    with pytest.raises(TemperaError, match=r"torchmetrics.noise cannot.*cannot make it"):
        wrong.check("any")
    large = partial(StructuralSimilarityIndexMeasure, sigma=99.0)
    evaluator = TorchMetrics(NoEvaluator(), {"ssim": large}, str(run))
    evaluator.check("any")
    with pytest.raises(TemperaError, match=r"torchmetrics.ssim cannot.*cannot compute it"):
        measured(evaluator, tmp_path)
