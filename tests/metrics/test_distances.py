from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from tempera.errors import TemperaError
from tempera.metrics import bootstrap, distances
from tempera.metrics.distances import (
    Distance,
    frechet,
    frechet_to,
    inception_score,
    kernel,
    precision,
    recall,
)


def features(n: int, dimensions: int = 8, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, dimensions))
        @ np.random.default_rng(9).normal(size=(dimensions, dimensions))
        + shift
    )


def weighted_frechet(generated: np.ndarray, real: np.ndarray, weights: np.ndarray) -> float:
    """The distance of weighted images, from its definition."""
    centre = np.average(generated, axis=0, weights=weights)
    cut = generated - centre
    spread = (weights[:, None] * cut).T @ cut / (weights.sum() - 1)
    overlap = np.linalg.eigvals(np.cov(real, rowvar=False) @ spread).real.clip(0)
    apart = ((centre - real.mean(0)) ** 2).sum()
    both = np.trace(spread) + np.trace(np.cov(real, rowvar=False))
    return float(apart + both - 2 * np.sqrt(overlap).sum())


@pytest.mark.parametrize(("n", "real"), [(5, 90), (60, 90), (60, 6)])  # around the dimensions
def test_frechet_is_its_definition(n: int, real: int) -> None:
    left, right = features(n, shift=0.3), features(real, seed=1)
    interval = frechet(left, right, resamples=50)
    assert interval.value == pytest.approx(weighted_frechet(left, right, np.ones(n)), rel=1e-5)
    assert 0 <= interval.low <= interval.value <= interval.high


@pytest.mark.parametrize("real", [90, 6])  # a covariance of full rank, and of less
def test_frechet_to_moments_is_frechet_to_pictures_that_have_them(real: int) -> None:
    left, right = features(60, shift=0.3), features(real, seed=1)
    distance = frechet_to(right.mean(0), np.cov(right, rowvar=False))
    found, wanted = distance(left, features(9), 50), frechet(left, right, 50)
    for end in ("value", "low", "high"):
        assert getattr(found, end) == pytest.approx(getattr(wanted, end), rel=1e-6)
    with pytest.raises(TemperaError, match="mu has 8 features, but the network has 7"):
        distance(left[:, :7], right, 50)


def weighted_kernel(generated: np.ndarray, real: np.ndarray, weights: np.ndarray) -> float:
    """KID of weighted images without its constant, from its definition."""
    own, across = ((generated @ side.T / side.shape[1] + 1) ** 3 for side in (generated, real))
    np.fill_diagonal(own, 0)
    within = weights @ own @ weights / (weights.sum() ** 2 - weights @ weights)
    return float(within - 2 * weights @ across.mean(1) / weights.sum())


def test_the_kernels_interval_is_that_of_weighted_images() -> None:
    left, right = features(12, shift=0.3), features(90, seed=1)
    found = kernel(left, right, 20)
    drawn = np.array([weighted_kernel(left, right, one) for one in bootstrap.counts(12, 20)])
    expected = bootstrap.centred(found.value, drawn, 12)
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high])


DISTANCES = [(frechet, weighted_frechet), (kernel, weighted_kernel)]
DirectDistance = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


@pytest.mark.parametrize(("distance", "direct"), DISTANCES)
def test_pseudovalues_are_the_derivative_in_each_images_weight(
    distance: Distance, direct: DirectDistance
) -> None:
    left, right = features(12, shift=0.3), features(90, seed=1)
    found = distance(left, right, 2)
    assert found.pseudovalues is not None
    assert found.pseudovalues.mean() == pytest.approx(found.value)
    step, slopes = 1e-4, []
    for image in np.eye(12) - 1 / 12:
        ends = [direct(left, right, 1 + sign * step * image) for sign in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * step))
    assert found.pseudovalues - found.value == pytest.approx(12 * np.array(slopes), rel=1e-4)


@pytest.mark.parametrize("count", [10, 16, 64, 91, 4000])
def test_the_inception_score_is_torch_fidelitys_but_for_the_order_of_the_pictures(
    count: int,
) -> None:
    from torch_fidelity.metric_isc import isc_features_to_metric

    logits = torch.as_tensor(features(count, shift=0.3))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    expected = isc_features_to_metric(logits[order], 10, shuffle=False)["inception_score_mean"]
    assert inception_score(logits, 2).value == pytest.approx(expected, rel=1e-9)
    assert inception_score(logits, 2) == inception_score(logits, 2)


def test_the_centres_are_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of KID, whose class averages over random subsets; here over one, of all."""
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance

    left, right = (torch.as_tensor(features(40, shift=0.3 * (seed == 0), seed=seed))
                   for seed in (0, 1))  # fmt: skip
    fid = FrechetInceptionDistance(torch.nn.Identity(), input_img_size=(8,))
    kid = KernelInceptionDistance(torch.nn.Identity(), subsets=1, subset_size=40)
    for metric in (fid, kid):
        metric.update(right, real=True)
        metric.update(left, real=False)
    score = InceptionScore(torch.nn.Identity(), splits=1)  # several parts are drawn at random
    monkeypatch.setattr(distances, "PARTS", 1)
    score.update(left)
    assert frechet(left, right, 2).value == pytest.approx(float(fid.compute()), rel=1e-9)
    assert kernel(left, right, 2).value == pytest.approx(float(kid.compute()[0]), rel=1e-9)
    found = inception_score(left, 50)
    assert found.value == pytest.approx(float(score.compute()[0]), rel=1e-9)
    assert 0.5 * found.value < found.low < 0.99 * found.value < found.high < 2 * found.value
    monkeypatch.setattr(distances, "PARTS", 8)
    assert inception_score(left, 2).value < found.value


def test_precision_and_recall_by_definition() -> None:
    left, right = features(30, 2, shift=0.5), features(50, 2, seed=1)

    def share(points: np.ndarray, manifold: np.ndarray) -> float:
        radii = np.sort(cdist(manifold, manifold), axis=1)[:, 3]
        return float((cdist(points, manifold) <= radii).any(1).mean())

    few, order = left[:6], np.random.default_rng([0, 6])  # of six images, subsets of four
    drawn = [share(right, few[np.sort(order.permutation(6)[:4])]) for _ in range(20)]
    scaled = np.sqrt(4 / 2) * (np.array(drawn) - np.mean(drawn))
    assert recall(few, right, 20) == bootstrap.centred(share(right, few), scaled, 6, (0, 1))
    near = precision(left, right, resamples=50)
    far = recall(left, right, resamples=50)
    assert near.pseudovalues is not None and near.pseudovalues.mean() == near.value
    assert near.value == pytest.approx(share(left, right))
    assert far.value == pytest.approx(share(right, left))
    for interval in (near, far):
        assert 0 <= interval.low <= interval.value <= interval.high <= 1


@pytest.mark.slow
@pytest.mark.parametrize("metric", [frechet, kernel, recall])
def test_intervals_have_the_spread_of_repeated_experiments(metric: object) -> None:
    """The bootstrap's standard error of one sample agrees with the scatter over fresh samples."""
    right = features(300, 4, seed=1)
    values = [
        metric(features(80, 4, 1.0, seed), right, resamples=1).value for seed in range(100, 300)
    ]  # type: ignore[operator]
    widths = [metric(features(80, 4, 1.0, seed), right, resamples=100) for seed in range(100, 110)]  # type: ignore[operator]
    width = np.mean([interval.high - interval.low for interval in widths])
    assert width / (2 * 1.96 * np.std(values)) == pytest.approx(1, abs=0.3)


def test_a_ball_holds_its_edge() -> None:
    manifold, points = np.arange(8.0)[:, None], np.array([[-3.0], [10.0], [3.0], [20.0]] * 2)
    assert precision(points, manifold, resamples=2).value == 0.75
    assert recall(manifold, points, resamples=2).value == 0.75


def test_rows_in_parts_give_the_same_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = features(30, 3, shift=0.5), features(50, 3, seed=1)
    whole = [metric(left, right, resamples=5) for metric in (kernel, precision, recall)]
    monkeypatch.setattr(distances, "NUMBERS", 7 * 50)
    sizes = []
    for name in ("_cubic", "_euclidean"):
        whole_of = getattr(distances, name)

        def part(
            *sides: torch.Tensor, whole_of: Callable[..., torch.Tensor] = whole_of
        ) -> torch.Tensor:
            sizes.append(len(sides[0]) * len(sides[1]))
            return whole_of(*sides)

        monkeypatch.setattr(distances, name, part)
    parts = [metric(left, right, resamples=5) for metric in (kernel, precision, recall)]
    assert max(sizes) <= 7 * 50  # memory does not grow with the number of pictures
    for one, other in zip(whole, parts, strict=True):
        assert [one.value, one.low, one.high] == pytest.approx([other.value, other.low, other.high])


ONE = features(1).repeat(40, 0)
ENDS = {
    "identical": (features(40), features(40)),
    "large and identical": (1e4 * features(40), 1e4 * features(40)),
    "copies of one picture": (ONE, features(50, seed=1)),
    "real copies of one": (features(50, seed=1), ONE),
    "both": (ONE, ONE),
    "every picture twice": (features(20).repeat(2, 0), features(50, seed=1)),
    "constant features": (np.pad(features(40), (0, 3)), np.pad(features(50, seed=1), (0, 3))),
    "nothing but constants": (np.zeros((40, 8)), np.zeros((40, 8))),
    "fewest": (features(5), features(5, seed=1)),
}


@pytest.mark.parametrize("name", ENDS)
def test_intervals_are_ordered_and_in_range_at_the_ends_of_a_range(name: str) -> None:
    left, right = ENDS[name]
    found = {key: distance(left, right, 40) for key, distance in distances.DISTANCES.items()}
    found["inception_score"] = inception_score(1e3 * left, 40)
    for key, interval in found.items():
        assert interval.low <= interval.value <= interval.high, (key, interval)
        assert np.isfinite([interval.low, interval.high]).all()
        if interval.pseudovalues is not None:
            assert interval.pseudovalues.mean() == pytest.approx(interval.value, abs=1e-6)
    least = {"fid": 0, "precision": 0, "recall": 0, "inception_score": 1}
    assert all(found[key].low >= low for key, low in least.items())
    assert max(found["precision"].high, found["recall"].high) <= 1
    if left.shape == right.shape and (left == right).all():
        rounding = 1e-14 * left.var(0).sum()  # of sums as large as the covariances' traces
        assert found["fid"].value == pytest.approx(0, abs=rounding)
        assert [found[key].value for key in ("precision", "recall")] == [1, 1]


@pytest.mark.parametrize("distance", distances.DISTANCES.values())
def test_too_few_pictures_are_told(distance: Distance) -> None:
    for left, right, words in ((1, 50, "1 generated"), (50, 4, "4 real")):
        with pytest.raises(TemperaError, match=f"^{words} pictures are too few"):
            distance(features(left), features(right), 2)
