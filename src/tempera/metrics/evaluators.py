"""Evaluators: the networks and the reference images behind FID, CLIP score and other numbers of
pictures.

Pictures are uint8 [B, 3, h, w]. Options are checked before anything is generated; networks are
loaded one after the other when the pictures exist.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.bootstrap import Interval
from tempera.metrics.distances import Distance, Features, feature_distances

Pictures = NDArray[np.uint8]

Score = Callable[[Tensor, Sequence[Prompt]], Mapping[str, Tensor]]
"""Pictures, uint8 [B, 3, h, w], and their prompts -> named scores [B] of each picture; NaN where a
prompt leaves a score open.
"""
Statistic = Callable[[Features, int], Interval]
"""Features of generated pictures [n, D], and how many resamples -> a number of the set."""


@dataclass(frozen=True)
class Networks:
    """Loaded networks; metrics whose network is missing are left out.

    Attributes:
        features: pictures, uint8 [B, 3, h, w] -> [B, D].
        scores: what scores each picture; the entries of `tempera.metrics.table` name the scores
            whose means are metrics.
        distances: between the features of generated and of real pictures, by metric key.
        statistics: of the features of generated pictures alone, by metric key.
        identity: names networks and settings where scores may be kept apart from those of the
            evaluator's other networks; the evaluator's own unless given.
    """

    features: Callable[[Tensor], Tensor] | None = None
    scores: Sequence[Score] = ()
    distances: Mapping[str, Distance] = field(default_factory=feature_distances)
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    identity: str = ""


class Evaluator(Protocol):
    """Measures the quality of a run's pictures."""

    @property
    def identity(self) -> str:
        """Names networks and settings: scores made under another identity are not reused."""

    @property
    def resamples(self) -> int:
        """Bootstrap resamples behind each interval."""

    def check(self, model: str) -> None:
        """Check, before anything is generated, that all files are there and that this evaluator
        fits the model preset.

        Raises:
            TemperaError: something is missing, or the evaluator is for other models.
        """

    def fetch(self) -> None:
        """Download what is not on this machine yet."""

    def load(self, device: torch.device) -> Iterator[Networks]:
        """Load the networks, one group after the other."""

    def reference(self, edge: int) -> Iterator[Pictures]:
        """Real pictures in batches, uint8 [B, 3, h, w]; no batches without a reference.

        Args:
            edge: of the generated pictures, in pixels.
        """


def at_least_1(**numbers: int) -> None:
    """Raise TemperaError where a number that metrics are computed with is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise TemperaError(f"{name}={number} is too small: give at least 1.")


@dataclass(frozen=True)
class NoEvaluator(Evaluator):
    """`metrics=none`: acceptance and speed only."""

    identity = "none"
    resamples = 0

    @override
    def check(self, model: str) -> None:
        pass

    @override
    def fetch(self) -> None:
        pass

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        return iter(())

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        return iter(())
