"""Scores of pictures and metrics of sets, with networks and stores of this file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tempera.data.prompts import Prompt
from tempera.metrics.bootstrap import Interval
from tempera.metrics.evaluators import Networks, Pictures
from tempera.metrics.quality import quality, score_pictures
from tempera.runtime.row_store import Store

PROMPTS = [Prompt(str(place), "") for place in range(5)]


def means(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.float().mean((1, 2, 3))[:, None]


def test_missing_pictures_are_scored_once_in_batches(tmp_path: Path) -> None:
    sizes = []

    def features(pictures: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pictures))
        return means(pictures)

    def picture(prompt: Prompt) -> Pictures:
        return np.full((3, 2, 2), 10 * int(prompt.id), np.uint8)

    networks, store = Networks(features), Store(tmp_path / "store", "run")
    score_pictures(networks, PROMPTS[:1], picture, store)
    found = score_pictures(networks, PROMPTS, picture, store, batch=3)
    assert sizes == [1, 3, 1]
    assert {name: row["features"] for name, row in found.items()} == {
        prompt.id: [10.0 * int(prompt.id)] for prompt in PROMPTS
    }


@pytest.mark.parametrize(("count", "known"), [(15, False), (16, True)])
def test_sets_of_16_pictures_have_distances(count: int, known: bool) -> None:
    one = Interval(1.0, 0.0, 2.0, 16)
    networks = Networks(
        means, distances={"fid": lambda *_: one}, statistics={"inception_score": lambda *_: one}
    )
    rows = [{"features": [float(place)], "clip_score": 0.5} for place in range(count)]
    found = quality(rows, networks, np.zeros((20, 1)), 30)
    assert ("fid" in found) == ("inception_score" in found) == known
    assert found["clip_score"].n == count
    lacking = [*rows, {"clip_score": 0.5, "features": None}]
    assert "fid" not in quality(lacking, networks, np.zeros((20, 1)), 30)
    alone = quality(rows, networks, None, 30)
    assert "fid" not in alone and ("inception_score" in alone) == known
