"""Metrics of whole sets of pictures, from features of each picture: FID, KID, precision, recall and
the inception score, each with a 95% interval over the generated pictures.

Features are float64 [n, D], arrays or tensors; the work is done on the device that tensors are on.
The reference set is held fixed. FID and recall depend on the number of images, so compare runs of
equal size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tempera.errors import TemperaError
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval

Features: TypeAlias = Array | Tensor
Distance = Callable[[Features, Features, int], Interval]
"""Features of generated [n, D] and of real [m, D] pictures, and how many resamples -> the distance
of the two sets with its interval.
"""
ROWS = 2048
"""Rows of a matrix of pairs that are held in memory at once."""
SUBSETS = 50
"""Subsets behind the interval of recall, at most."""


def frechet(generated: Features, real: Features, resamples: int = 200, seed: int = 0) -> Interval:
    """Fréchet distance of Gaussians fitted to the features (FID; Heusel et al. 2017): |μ−μ'|² +
    tr(Σ + Σ' − 2(ΣΣ')^½).

    A resample changes the distance by its derivative in the images' weights (infinitesimal
    jackknife; Jaeckel 1972). That takes one eigendecomposition for all resamples, and its spread is
    nearer to that of repeated experiments than the bootstrap's: copies of images make Σ narrower
    and the bootstrap too wide where there are few images for each feature.
    """
    x, y = _checked(generated, real)
    centre, root = y.mean(0), _root(y)
    n, average = len(x), x.mean(0)
    centred = x - average
    lengths = centred.square().sum(1)
    overlap, own = _root_trace(centred @ root / (n - 1) ** 0.5)
    value = (average - centre).square().sum() + lengths.sum() / (n - 1)
    value += root.square().sum() - 2 * overlap
    change = (
        2 * centred @ (average - centre) / n
        + (lengths - lengths.sum() / (n - 1)) / (n - 1)
        - (own - overlap / (n - 1))
    )
    drawn = bootstrap.counts(n, resamples, seed)
    replicates = float(value) + (drawn - 1) @ change.cpu().numpy()
    return bootstrap.centred(float(value), replicates, n, (0, np.inf))


def _root(features: Tensor) -> Tensor:
    """A root of their covariance, [D, r]: root rootᵀ = Σ'. It enters FID by way of the eigenvalues
    of rootᵀ Σ root alone, which are those of Σ'^½ Σ Σ'^½ for any root.
    """
    centred: Tensor = (features - features.mean(0)) / (len(features) - 1) ** 0.5
    if len(features) <= features.shape[1]:
        return centred.T
    covariance = centred.T @ centred
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if failed:  # features depend on each other
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()
    return root


def _root_trace(half: Tensor) -> tuple[Tensor, Tensor]:
    """tr (halfᵀ half)^½ and hᵀ (halfᵀ half)^-½ h for every row h, twice its part in the trace's
    derivative, from the smaller of the two Gram matrices of half [n, D].
    """
    wide = len(half) <= half.shape[1]
    values, vectors = torch.linalg.eigh(half @ half.T if wide else half.T @ half)
    sizes = values.clamp(min=0).sqrt()
    present = values > 1e-10 * values.max()
    if wide:
        own = vectors[:, present].square() @ sizes[present]
    else:
        own = (half @ vectors[:, present]).square() @ sizes[present].reciprocal()
    return sizes.sum(), own


def kernel(generated: Features, real: Features, resamples: int = 200, seed: int = 0) -> Interval:
    """Kernel distance (KID; Bińkowski et al. 2018): unbiased MMD² with k(x, y) = (x·y/D + 1)³ over
    all pairs.

    In a resample, pairs of copies of one image are left out, so that repeats do not shift it.
    """
    x, y = _checked(generated, real)
    n, m = len(x), len(y)
    weights = torch.as_tensor(
        np.concatenate([np.ones((1, n)), bootstrap.counts(n, resamples, seed)]), device=x.device
    )
    within = torch.zeros(len(weights), dtype=x.dtype, device=x.device)
    across = torch.empty(n, dtype=x.dtype, device=x.device)
    for rows in _rows(n):
        pairs = _cubic(x[rows], x)
        pairs[torch.arange(len(pairs)), torch.arange(n)[rows]] = 0
        within += ((weights @ pairs.T) * weights[:, rows]).sum(1)
        across[rows] = _cubic(x[rows], y).mean(1)
    reference = sum(float(_cubic(y[rows], y).sum()) for rows in _rows(m))
    constant = (reference - float(((y.square().sum(1) / y.shape[1]) + 1).pow(3).sum())) / (
        m * (m - 1)
    )
    total = weights.sum(1)
    pairs = total.square() - weights.square().sum(1)
    distances = (within / pairs + constant - 2 * (weights @ across) / total).cpu().numpy()
    return bootstrap.centred(float(distances[0]), distances[1:], n)


def _cubic(left: Tensor, right: Tensor) -> Tensor:
    return (left @ right.T / left.shape[1] + 1).pow(3)


def precision(
    generated: Features, real: Features, neighbours: int = 3, resamples: int = 200, seed: int = 0
) -> Interval:
    """Improved precision (Kynkäänniemi et al. 2019): the share of generated images within the real
    manifold, the union of balls around its points that reach to their k-th neighbour.
    """
    x, y = _checked(generated, real, 2 * (neighbours + 1))
    radius = _radius(y, neighbours)
    inside = torch.cat([(_apart(x[rows], y) <= radius).any(1) for rows in _rows(len(x))])
    return bootstrap.mean(inside.double().cpu().numpy(), resamples, seed)


def recall(
    generated: Features, real: Features, neighbours: int = 3, resamples: int = 200, seed: int = 0
) -> Interval:
    """Improved recall (Kynkäänniemi et al. 2019): the share of real images within the manifold of
    the generated ones.

    Repeated images would shrink the balls of the manifold, so the interval comes from subsets
    without repeats (delete-d jackknife; Shao and Wu 1989), `SUBSETS` of them at most, whose spread
    is scaled by √(b/(n−b)).
    """
    x, y = _checked(generated, real, 2 * (neighbours + 1))
    n = len(x)
    size = max(neighbours + 1, min(n // 2, 1000))
    order = np.random.default_rng([seed, n])
    drawn = [np.sort(order.permutation(n)[:size]) for _ in range(min(resamples, SUBSETS))]
    members = [torch.as_tensor(part, device=x.device) for part in [np.arange(n), *drawn]]
    manifolds = list(zip(members, _radii(x, members, neighbours), strict=True))
    found = torch.zeros(len(manifolds), device=x.device)
    for rows in _rows(len(y)):
        distances = _apart(y[rows], x)
        for place, (inside, radius) in enumerate(manifolds):
            found[place] += (distances[:, inside] <= radius).any(1).sum()
    shares = (found.double() / len(y)).cpu().numpy()
    scaled = (shares[1:] - shares[1:].mean()) * np.sqrt(size / (n - size))
    return bootstrap.centred(float(shares[0]), scaled, n, (0, 1))


def inception_score(
    logits: Features, resamples: int = 200, splits: int = 10, seed: int = 2020
) -> Interval:
    """Inception score (Salimans et al. 2016): exp of the mean KL divergence of a picture's classes
    from those of all pictures; the mean over `splits` parts of the shuffled pictures, as
    torch-fidelity computes it, splits and seed included.

    The interval resamples all pictures as one part, and is centred on the score.

    Args:
        logits: of the classes, [n, classes].
        resamples: bootstrap resamples behind the interval.
        splits: parts; one for each picture where there are fewer.
        seed: of the shuffle.
    """
    classes = torch.as_tensor(logits).double()
    n = len(classes)
    logs = classes.log_softmax(1)
    shares, plain = logs.exp(), (logs.exp() * logs).sum(1)
    order = torch.as_tensor(np.random.RandomState(seed).permutation(n), device=classes.device)
    parts = min(splits, n)
    scores = []
    for part in range(parts):
        members = order[part * n // parts : (part + 1) * n // parts]
        whole = shares[members].mean(0)
        scores.append((plain[members].mean() - torch.xlogy(whole, whole).sum()).exp())
    weights = torch.as_tensor(bootstrap.counts(n, resamples), device=classes.device) / n
    whole = weights @ shares
    replicates = (weights @ plain - torch.xlogy(whole, whole).sum(1)).exp().cpu().numpy()
    return bootstrap.centred(float(torch.stack(scores).mean()), replicates, n, (1, np.inf))


def feature_distances(neighbours: int = 3) -> dict[str, Distance]:
    """FID, KID, precision and recall by metric key; `neighbours` is the k of the last two."""
    return {"fid": frechet, "kid": kernel, **manifold_distances(neighbours)}


def manifold_distances(neighbours: int = 3, suffix: str = "") -> dict[str, Distance]:
    """Precision and recall by metric key, which ends in `suffix`."""
    return {
        f"precision{suffix}": lambda generated, real, resamples: precision(
            generated, real, neighbours, resamples
        ),
        f"recall{suffix}": lambda generated, real, resamples: recall(
            generated, real, neighbours, resamples
        ),
    }


def _rows(count: int) -> Iterator[slice]:
    return (slice(first, first + ROWS) for first in range(0, count, ROWS))


def _radius(features: Tensor, neighbours: int) -> Tensor:
    """Distance of every point to its k-th neighbour, [n]."""
    return _radii(features, [torch.arange(len(features), device=features.device)], neighbours)[0]


def _radii(features: Tensor, subsets: Sequence[Tensor], neighbours: int) -> list[Tensor]:
    """Distance of every point of a subset to its k-th neighbour within it, for each subset.

    Args:
        features: [n, D].
        subsets: places of the points in increasing order.
        neighbours: k.
    """
    parts: list[list[Tensor]] = [[] for _ in subsets]
    for rows in _rows(len(features)):
        distances = _apart(features[rows], features)
        for part, subset in zip(parts, subsets, strict=True):
            own = subset[(subset >= rows.start) & (subset < rows.stop)] - rows.start
            if len(own):
                inner = distances[own][:, subset]
                part.append(inner.kthvalue(neighbours + 1, dim=1).values)
    return [torch.cat(part) for part in parts]


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """Euclidean distances, [len(left), len(right)]."""
    squares = left.square().sum(1)[:, None] + right.square().sum(1) - 2 * left @ right.T
    return squares.clamp(min=0).sqrt()


def _checked(generated: Features, real: Features, least: int = 2) -> tuple[Tensor, Tensor]:
    """Both sets as float64 tensors on the device of the generated one."""
    if generated.shape[1:] != real.shape[1:]:
        widths = f"{generated.shape[1]} and {real.shape[1]}"
        raise TemperaError(
            f"features of generated and reference images differ in width ({widths}): use one "
            "network for both."
        )
    if min(len(generated), len(real)) < least:
        found = f"{len(generated)} generated and {len(real)} reference images"
        raise TemperaError(f"{found} are too few: this distance needs at least {least} of each.")
    x = torch.as_tensor(generated).double()
    return x, torch.as_tensor(real, device=x.device).double()
