"""Metrics of whole sets of pictures, from features of each picture: FID, KID, precision, recall and
the inception score, each with a 95% interval over the generated pictures.

FID is that of torchmetrics, which takes seconds to import; the tests compare the two. The KID of
torchmetrics takes random subsets of one size from both sets; ours is the same estimator over all
pairs of sets of any sizes.

Features are float64 [n, D], arrays or tensors; tensors are processed on their own device. Intervals
hold the reference set fixed. FID and recall depend on the number of images, so compare only runs
with the same number. `tempera.metrics.quality` leaves them out for fewer than 16; fewer than
`LEAST` are refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tempera.errors import TemperaError
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval

Features: TypeAlias = Array | Tensor
Distance = Callable[[Features, Features, int], Interval]
"""(features of generated pictures [n, D], features of real pictures [m, D], number of resamples) ->
the distance between the two sets with its interval.
"""
NUMBERS = 2**21
"""Numbers of a pairwise matrix, or of features, that are held in memory at once."""
NEIGHBOURS = 3
"""k of precision and recall, as in the papers."""
LEAST = NEIGHBOURS + 2
"""Fewest pictures of each side: recall takes subsets of one less, each with its neighbours."""
PARTS = 10
"""Parts of the pictures for the inception score, as in its paper."""
SUBSETS = 50
"""Most subsets drawn for the interval of recall."""


def frechet(generated: Features, real: Features, resamples: int = 200) -> Interval:
    """Fréchet distance of Gaussians fitted to the features (FID; Heusel et al. 2017): |μ−μ'|² +
    tr(Σ + Σ' − 2(ΣΣ')^½).

    Resamples are linearised: each changes the distance by its derivative with respect to the
    images' weights, that is, they average pseudo-values. This needs one decomposition for all
    resamples, and its spread is closer to that of repeated experiments than the bootstrap's: with
    few images per feature, the bootstrap's repeated images narrow Σ and its interval becomes too
    wide.
    """
    x, y = _tensors(generated, real)
    n = len(x)
    apart = x.mean(0) - y.mean(0)
    centred = x - x.mean(0)
    lengths = centred.square().sum(1)
    root = _root(y)
    root_trace, root_shares = _root_of_product(centred @ root / (n - 1) ** 0.5)
    traces = lengths.sum() / (n - 1) + root.square().sum() - 2 * root_trace
    value = max(0.0, float(apart.square().sum() + traces))
    # the derivative by each image's weight, up to a constant
    change = 2 * centred @ apart / n + lengths / (n - 1) - root_shares
    pseudovalues = _pseudovalues(value, n * change)
    replicates = bootstrap.counts(n, resamples) @ pseudovalues / n
    interval = bootstrap.centred(value, replicates, n, (0, np.inf))
    return replace(interval, pseudovalues=pseudovalues)


def frechet_to(mean: Array, covariance: Array) -> Distance:
    """`frechet` to real pictures of whose features the mean [D] and covariance [D, D] are known,
    whatever pictures are given. Its features must have D columns, or it raises TemperaError.
    """
    values, vectors = np.linalg.eigh(covariance)
    spread = vectors * np.sqrt(values.clip(min=0))
    copies = math.ceil(LEAST / (2 * len(mean)))
    steps = spread.T * (len(mean) - 0.5 / copies) ** 0.5
    real = np.concatenate([mean + steps, mean - steps] * copies)  # points of these two moments

    def distance(generated: Features, _: Features, resamples: int = 200) -> Interval:
        if generated.shape[1] != len(mean):
            raise TemperaError(
                f"the reference's mu has {len(mean)} features, but the network has "
                f"{generated.shape[1]}: give a reference batch of the same network, or one "
                "without mu and sigma.",
                option="metrics.reference",
            )
        return frechet(generated, real, resamples)

    return distance


def _pseudovalues(value: float, influence: Tensor) -> Array:
    """Pseudo-values [n] of an estimate, from the influence of each image up to a constant, [n]."""
    return value + (influence - influence.mean()).cpu().numpy()


def _root(features: Tensor) -> Tensor:
    """A root of the features' covariance, [D, D]: root rootᵀ = Σ'. Any root will do: FID needs only
    the eigenvalues of rootᵀ Σ root, which are those of Σ'^½ Σ Σ'^½.
    """
    centred = features - features.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / (len(features) - 1))
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root


def _root_of_product(half: Tensor) -> tuple[Tensor, Tensor]:
    """tr (halfᵀ half)^½ of half [n, D]; and for every row h of it hᵀ (halfᵀ half)^-½ h, which is
    twice the row's share of the derivative.
    """
    left, sizes, _ = torch.linalg.svd(half, full_matrices=False)
    return sizes.sum(), left.square() @ sizes


def kernel(generated: Features, real: Features, resamples: int = 200) -> Interval:
    """Kernel distance (KID; Bińkowski et al. 2018): unbiased MMD² with k(x, y) = (x·y/D + 1)³ over
    all pairs.

    A resample leaves out the pairs of an image with its own copies, so repeats do not bias it. Near
    a distance of 0 the bootstrap is too wide, by about √3 (the statistic is degenerate there:
    Arcones and Giné 1992).
    """
    x, y = _tensors(generated, real)
    n = len(x)
    m = len(y)
    weights = torch.as_tensor(
        np.concatenate([np.ones((1, n)), bootstrap.counts(n, resamples)]), device=x.device
    )
    within = torch.zeros(len(weights), dtype=x.dtype, device=x.device)
    to_own, to_real = torch.empty(2, n, dtype=x.dtype, device=x.device)
    for rows in _rows(n, max(n, m)):
        similarity = _cubic(x[rows], x)
        similarity[torch.arange(len(similarity)), torch.arange(n)[rows]] = 0
        within += ((weights @ similarity.T) * weights[:, rows]).sum(1)
        to_own[rows] = similarity.sum(1) / (n - 1)
        to_real[rows] = _cubic(x[rows], y).mean(1)
    reference = sum(float(_cubic(y[rows], y).sum()) for rows in _rows(m, m))
    constant = (reference - float(((y.square().sum(1) / y.shape[1]) + 1).pow(3).sum())) / (
        m * (m - 1)
    )
    total = weights.sum(1)
    pairs = total.square() - weights.square().sum(1)
    possible = pairs > 0  # a resample may be copies of one image
    within, to_all = (within / pairs)[possible], (weights @ to_real / total)[possible]
    distances = (within + constant - 2 * to_all).cpu().numpy()
    value = float(distances[0])
    pseudovalues = _pseudovalues(value, 2 * (to_own - to_real))
    return replace(bootstrap.centred(value, distances[1:], n), pseudovalues=pseudovalues)


def _cubic(left: Tensor, right: Tensor) -> Tensor:
    return (left @ right.T / left.shape[1] + 1).pow(3)


def precision(generated: Features, real: Features, resamples: int = 200) -> Interval:
    """Improved precision (Kynkäänniemi et al. 2019): the share of generated images within the
    manifold of the real ones. The manifold is the union of balls around the images' features; each
    ball reaches to its centre's third nearest neighbour.
    """
    x, y = _tensors(generated, real)
    (inside,) = _inside(x, y, [torch.arange(len(y), device=y.device)])
    values = inside.double().cpu().numpy()
    return replace(bootstrap.mean(values, resamples), pseudovalues=values)


def recall(generated: Features, real: Features, resamples: int = 200) -> Interval:
    """Improved recall (Kynkäänniemi et al. 2019): the share of real images within the manifold of
    the generated ones.

    Repeated images would shrink the manifold's balls, so the interval comes from at most `SUBSETS`
    subsets without repeats (delete-d jackknife; Shao and Wu 1989), whose spread is scaled by
    √(b/(n−b)).
    """
    x, y = _tensors(generated, real)
    n = len(x)
    size = max(NEIGHBOURS + 1, min(n // 2, 1000))
    order = np.random.default_rng([0, n])
    drawn = [np.sort(order.permutation(n)[:size]) for _ in range(min(resamples, SUBSETS))]
    members = [torch.as_tensor(part, device=x.device) for part in [np.arange(n), *drawn]]
    shares = _inside(y, x, members).double().mean(1).cpu().numpy()
    scaled = (shares[1:] - shares[1:].mean()) * np.sqrt(size / (n - size))
    return bootstrap.centred(float(shares[0]), scaled, n, (0, 1))


def inception_score(logits: Features, resamples: int = 200) -> Interval:
    """Inception score (Salimans et al. 2016): exp of the mean KL divergence of
    each picture's class distribution from the mean distribution, averaged over `PARTS` parts of
    the shuffled pictures, which differ by at most one picture. (torchmetrics has fewer parts, or a
    small last one, of numbers that the parts do not divide.)

    The interval resamples all pictures as one part and is centred on the score.

    Args:
        logits: class logits, [n, classes].
        resamples: number of bootstrap resamples for the interval.
    """
    # of more certain classes 0 × log 0 would be NaN
    classes = torch.as_tensor(logits).double().log_softmax(1).clamp(min=-700)
    n = len(classes)
    logs = classes.log_softmax(1)
    shares = logs.exp()
    negative_entropy = (shares * logs).sum(1)

    def score(weights: Tensor) -> Tensor:
        """Of weights of the pictures that sum to 1, [..., n]: [...]."""
        whole = weights @ shares
        return (weights @ negative_entropy - torch.xlogy(whole, whole).sum(-1)).exp()

    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    count = min(PARTS, n)
    parts = torch.zeros(count, n, dtype=torch.float64)
    for index, part in enumerate(parts):
        members = order[index * n // count : (index + 1) * n // count]
        part[members] = 1 / len(members)
    value = float(score(parts.to(classes.device)).mean())
    weights = torch.as_tensor(bootstrap.counts(n, resamples), device=classes.device) / n
    return bootstrap.centred(value, score(weights).cpu().numpy(), n, (1, np.inf))


DISTANCES: Mapping[str, Distance] = {
    "fid": frechet,
    "kid": kernel,
    "precision": precision,
    "recall": recall,
}
"""The distances between features, by metric key."""


def _rows(count: int, width: int) -> Iterator[slice]:
    """The rows of a matrix of this width, in parts of at most `NUMBERS` numbers."""
    step = max(1, NUMBERS // width)
    return (slice(first, first + step) for first in range(0, count, step))


def _inside(points: Tensor, features: Tensor, subsets: Sequence[Tensor]) -> Tensor:
    """Whether each point lies within the manifold of each subset of the features, bool
    [subsets, points]; subsets are given by indices.
    """
    radii = [_radii(features[members]) for members in subsets]
    parts = []
    for rows in _rows(len(points), len(features)):
        distances = _euclidean(points[rows], features)
        inside = [
            (distances[:, members] <= radius).any(1)
            for members, radius in zip(subsets, radii, strict=True)
        ]
        parts.append(torch.stack(inside))
    return torch.cat(parts, 1)


def _radii(features: Tensor) -> Tensor:
    """Distance of every point [n, D] to its third neighbour, [n]."""
    parts = (_euclidean(features[rows], features) for rows in _rows(len(features), len(features)))
    return torch.cat([part.kthvalue(NEIGHBOURS + 1, dim=1).values for part in parts])


def _euclidean(left: Tensor, right: Tensor) -> Tensor:
    """Euclidean distances, [len(left), len(right)]."""
    return torch.cdist(left, right, compute_mode="use_mm_for_euclid_dist")


def _tensors(generated: Features, real: Features) -> tuple[Tensor, Tensor]:
    """Both sets as float64 tensors on the device of the generated one.

    Raises:
        TemperaError: one of them is too small.
    """
    for side, name in ((generated, "generated"), (real, "real")):
        if len(side) < LEAST:
            raise TemperaError(
                f"{len(side)} {name} pictures are too few to measure a distance between sets: give "
                f"{LEAST} or more."
            )
    x = torch.as_tensor(generated).double()
    return x, torch.as_tensor(real, device=x.device).double()
