"""Metrics of torchmetrics by name: of pictures, and of pairs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.image import (
    MultiScaleStructuralSimilarityIndexMeasure,
    PeakSignalNoiseRatio,
    StructuralSimilarityIndexMeasure,
    TotalVariation,
)

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.quality import quality, score_pictures
from tempera.metrics.torch_metrics import TorchMetric, TorchMetrics
from tempera.runtime.files import fingerprint, write_json
from tempera.runtime.image_files import picture_path, write_picture
from tempera.runtime.row_store import Store, write_table

CPU = torch.device("cpu")
PROMPTS = [Prompt(f"p{number}", f"text {number}") for number in range(16)]
PICTURES = np.random.default_rng(0).integers(0, 256, (16, 3, 24, 24), np.uint8)
OTHERS = np.random.default_rng(1).integers(0, 256, (16, 3, 24, 24), np.uint8)
SSIM = TorchMetric("pair", partial(StructuralSimilarityIndexMeasure, data_range=1.0))


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


def measured(evaluator: TorchMetrics, store: Path) -> dict[str, Any]:
    pictures = {prompt.id: one for prompt, one in zip(PROMPTS, PICTURES, strict=True)}
    found: dict[str, Any] = {}
    for networks in evaluator.load(CPU):
        place = Store(store / networks.identity, "run")
        rows = score_pictures(networks, PROMPTS, lambda prompt: pictures[prompt.id], place)
        scored = [rows[one.id] for one in PROMPTS]
        own = evaluator.metrics
        found |= quality(scored, networks, None, evaluator.resamples, own=own)
    return found


def test_pictures_and_pairs_have_intervals_over_prompts(run: Path, tmp_path: Path) -> None:
    metrics = {
        "ssim": SSIM,
        "psnr": TorchMetric("pair", partial(PeakSignalNoiseRatio, data_range=1.0)),
        "variation": TorchMetric("picture", partial(TotalVariation, reduction="sum")),
    }
    evaluator = TorchMetrics(metrics, str(run))
    evaluator.check("any")
    evaluator.check_prompts(PROMPTS)
    found = measured(evaluator, tmp_path)
    assert found.keys() == metrics.keys()
    left, right = (torch.tensor(one).float() / 255 for one in (PICTURES, OTHERS))
    errors = (left - right).square().mean((1, 2, 3))
    assert found["psnr"].value == pytest.approx(float((-10 * errors.log10()).mean()), rel=1e-4)
    values = [StructuralSimilarityIndexMeasure(data_range=1.0)(one[None], other[None])
              for one, other in zip(left, right, strict=True)]  # fmt: skip
    assert found["ssim"].value == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert found["ssim"].low < found["ssim"].value < found["ssim"].high
    assert found["variation"].value == pytest.approx(float(TotalVariation()(left)) / 16, rel=1e-4)
    fewer = TorchMetrics({"ssim": SSIM}, str(run))
    fewer.check("any")
    (alone,) = fewer.load(CPU)  # whatever is measured beside it
    assert alone.identity == next(evaluator.load(CPU)).identity


def test_a_class_with_an_argument_of_another_meaning(run: Path, tmp_path: Path) -> None:
    """`normalize` of MS-SSIM is not that of LPIPS, which says that pictures are in [0, 1]."""
    make = partial(
        MultiScaleStructuralSimilarityIndexMeasure,
        data_range=1.0,
        kernel_size=3,
        sigma=0.5,
        betas=(0.4, 0.6),
    )
    evaluator = TorchMetrics({"ms_ssim": TorchMetric("pair", make)}, str(run))
    evaluator.check("any")
    left, right = (torch.tensor(one).float() / 255 for one in (PICTURES, OTHERS))
    assert measured(evaluator, tmp_path)["ms_ssim"].value == pytest.approx(
        float(make()(left, right)), rel=1e-4
    )


def without_pictures(run: Path) -> None:
    picture_path(run, "p3").unlink()


def with_other_texts(run: Path) -> None:
    rows = [{"id": one.id, "text": "other"} for one in PROMPTS]
    write_table(run / "results.parquet", rows, fingerprint({"method": "ar"}))


@pytest.mark.parametrize("change", [without_pictures, with_other_texts])
def test_another_run_must_have_the_prompts(change: Callable[[Path], None], run: Path) -> None:
    change(run)
    with pytest.raises(TemperaError, match="no picture of the prompt p") as problem:
        TorchMetrics({}, str(run)).check_prompts(PROMPTS)
    assert problem.value.option == "against"


def test_what_cannot_be_measured(run: Path, tmp_path: Path) -> None:
    def refused(
        why: str, metric: TorchMetric, key: str = "own", against: str | None = None
    ) -> None:
        with pytest.raises(TemperaError, match=f"torchmetrics.{key} cannot.*{why}"):
            measured_after_its_check({key: metric}, against)

    def measured_after_its_check(metrics: dict[str, TorchMetric], against: str | None) -> None:
        evaluator = TorchMetrics(metrics, against)
        evaluator.check("any")
        measured(evaluator, tmp_path)

    variation = TorchMetric("picture", TotalVariation)
    refused("give against=RUN", SSIM)
    refused("the name is already taken", variation, key="tv")  # a divergence of ours
    refused("kind=picture does not fit .*'target'", SSIM._replace(kind="picture"))
    refused("kind=pair does not fit .*too many", variation._replace(kind="pair"), against=str(run))
    refused("cannot make it", TorchMetric("picture", partial(TotalVariation, reduction="no")))
    large = TorchMetric("pair", partial(StructuralSimilarityIndexMeasure, sigma=99.0))
    refused("cannot compute it", large, against=str(run))
