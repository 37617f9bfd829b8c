"""Distances between two sets of image features: FID, KID, precision and recall, each with a
bootstrap interval over the generated images.

Features are float64 [n, D]. The reference set is held fixed. FID and recall depend on the number of
images, so compare runs of equal size.
"""

from collections.abc import Callable

import numpy as np

from tempera.errors import TemperaError
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval

Distance = Callable[[Array, Array, int], Interval]
"""Features of generated [n, D] and of real [m, D] pictures, and how many resamples -> the distance
of the two sets with its interval.
"""


def frechet(generated: Array, real: Array, resamples: int = 200, seed: int = 0) -> Interval:
    """Fréchet distance of Gaussians fitted to the features (FID; Heusel et al. 2017): |μ−μ'|² +
    tr(Σ + Σ' − 2(ΣΣ')^½).
    """
    _check(generated, real)
    centre, spread = real.mean(0), np.cov(real, rowvar=False)
    values, vectors = np.linalg.eigh(np.atleast_2d(spread))
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    total = values.clip(0).sum()

    def distance(weights: Array) -> float:
        average = weights @ generated / weights.sum()
        spread = np.sqrt(weights / (weights.sum() - 1))[:, None] * (generated - average)
        # Σ'^½ Σ Σ'^½ = halfᵀ half: the roots of its eigenvalues are half's singular values
        half = spread @ root
        gram = half @ half.T if len(half) < half.shape[1] else half.T @ half
        overlap = np.sqrt(np.linalg.eigvalsh(gram).clip(0)).sum()
        return float(((average - centre) ** 2).sum() + (spread**2).sum() + total - 2 * overlap)

    n = len(generated)
    return bootstrap.centred(
        distance(np.ones(n)), bootstrap.replicate(distance, n, resamples, seed), n, (0, np.inf)
    )


def kernel(generated: Array, real: Array, resamples: int = 200, seed: int = 0) -> Interval:
    """Kernel distance (KID; Bińkowski et al. 2018): unbiased MMD² with k(x, y) = (x·y/D + 1)³ over
    all pairs.

    In a resample, pairs of copies of one image are left out, so that repeats do not shift it.
    """
    _check(generated, real)
    n, dimensions = generated.shape
    within = (generated @ generated.T / dimensions + 1) ** 3
    np.fill_diagonal(within, 0)
    across = ((generated @ real.T / dimensions + 1) ** 3).mean(1)
    reference = (real @ real.T / dimensions + 1) ** 3
    constant = (reference.sum() - np.trace(reference)) / (len(real) * (len(real) - 1))

    def distance(weights: Array) -> Array:
        total = weights.sum(-1)
        pairs = total**2 - (weights**2).sum(-1)
        return np.asarray(
            ((weights @ within) * weights).sum(-1) / pairs
            + constant
            - 2 * (weights @ across) / total
        )

    replicates = distance(bootstrap.counts(n, resamples, seed))
    return bootstrap.centred(float(distance(np.ones(n))), replicates, n)


def precision(
    generated: Array, real: Array, neighbours: int = 3, resamples: int = 200, seed: int = 0
) -> Interval:
    """Improved precision (Kynkäänniemi et al. 2019): the share of generated images within the real
    manifold, the union of balls around its points that reach to their k-th neighbour.
    """
    _check(generated, real, 2 * (neighbours + 1))
    return bootstrap.mean(_within(generated, real, neighbours), resamples, seed)


def recall(
    generated: Array, real: Array, neighbours: int = 3, resamples: int = 200, seed: int = 0
) -> Interval:
    """Improved recall (Kynkäänniemi et al. 2019): the share of real images within the manifold of
    the generated ones.

    Repeated images would shrink the balls of the manifold, so the interval comes from subsets
    without repeats (delete-d jackknife; Shao and Wu 1989), whose spread is scaled by √(b/(n−b)).
    """
    _check(generated, real, 2 * (neighbours + 1))
    n = len(generated)
    size = max(neighbours + 1, min(n // 2, 1000))
    order = np.random.default_rng([seed, n])
    subsets = (order.permutation(n)[:size] for _ in range(resamples))
    replicates = np.array(
        [_within(real, generated[subset], neighbours).mean() for subset in subsets]
    )
    scaled = (replicates - replicates.mean()) * np.sqrt(size / (n - size))
    return bootstrap.centred(float(_within(real, generated, neighbours).mean()), scaled, n, (0, 1))


def feature_distances(neighbours: int = 3) -> dict[str, Distance]:
    """FID, KID, precision and recall by metric key; `neighbours` is the k of the last two."""
    return {
        "fid": frechet,
        "kid": kernel,
        "precision": lambda generated, real, resamples: precision(
            generated, real, neighbours, resamples
        ),
        "recall": lambda generated, real, resamples: recall(generated, real, neighbours, resamples),
    }


def _within(points: Array, manifold: Array, neighbours: int) -> Array:
    """1.0 where a point lies within the manifold, [len(points)]."""
    radius = _radius(manifold, neighbours)
    chunks = np.array_split(points, max(1, len(points) // 2000))
    return np.concatenate([(radius >= _apart(chunk, manifold)).any(1) for chunk in chunks]).astype(
        np.float64
    )


def _radius(features: Array, neighbours: int) -> Array:
    """Distance of every point to its k-th neighbour, [n]."""
    chunks = np.array_split(features, max(1, len(features) // 2000))
    return np.concatenate(
        [
            np.partition(_apart(chunk, features), neighbours, axis=1)[:, neighbours]
            for chunk in chunks
        ]
    )


def _apart(left: Array, right: Array) -> Array:
    """Euclidean distances, [len(left), len(right)]."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.asarray(np.sqrt(squares.clip(0)))


def _check(generated: Array, real: Array, least: int = 2) -> None:
    if generated.shape[1:] != real.shape[1:]:
        widths = f"{generated.shape[1]} and {real.shape[1]}"
        raise TemperaError(
            f"features of generated and reference images differ in width ({widths}): use one "
            "network for both."
        )
    if min(len(generated), len(real)) < least:
        found = f"{len(generated)} generated and {len(real)} reference images"
        raise TemperaError(f"{found} are too few: this distance needs at least {least} of each.")
