"""Evaluators: the networks and reference images that FID, CLIP score and other image metrics need.

Pictures are uint8 [B, 3, h, w]. Options are checked before anything is generated; once the pictures
exist, the networks are loaded one after another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.metrics.bootstrap import Interval
from tempera.metrics.distances import DISTANCES, Distance, Features
from tempera.metrics.table import Metric

Pictures = NDArray[np.uint8]
BATCH = 64
"""Pictures that are scored together."""

Score = Callable[[Tensor, Sequence[Prompt]], Mapping[str, Tensor]]
"""(pictures uint8 [B, 3, h, w], their prompts) -> named scores [B] of each picture; NaN if one
does not apply to the prompt.
"""
Statistic = Callable[[Features, int], Interval]
"""(features of generated pictures [n, D], number of resamples) -> a metric of the whole set."""


@dataclass(frozen=True)
class Networks:
    """Loaded networks; metrics whose network is missing are left out.

    Attributes:
        features: pictures uint8 [B, 3, h, w] -> features [B, D].
        scores: scores each picture; the entries of `tempera.metrics.table` name the scores whose
            means are metrics.
        distances: distances between features of generated and of real pictures, by metric key.
        statistics: metrics of the generated pictures' features alone, by metric key.
        identity: names these networks and their settings, so that their scores can be stored apart
            from those of the evaluator's other networks; by default the evaluator's identity.
        sees: whether they look at the pictures; otherwise the prompts suffice.
        pool: how many of the features, the first, distances compare; statistics read the others.
            None: both read all of them.
    """

    features: Callable[[Tensor], Tensor] | None = None
    scores: Sequence[Score] = ()
    distances: Mapping[str, Distance] = field(default_factory=lambda: DISTANCES)
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    identity: str = ""
    sees: bool = True
    pool: int | None = None


class Evaluator(Protocol):
    """A scorer: of pictures and their prompts it makes columns of numbers; by default none."""

    @property
    def identity(self) -> str:
        """Names networks and settings; scores computed under another identity are not reused."""
        return "none"

    @property
    def resamples(self) -> int:
        """Number of bootstrap resamples for each interval."""
        return 1000

    @property
    def metrics(self) -> Sequence[Metric]:
        """Its metrics that the table (`tempera.metrics.table`) lacks."""
        return ()

    def check(self, model: str) -> None:
        """Check, before anything is generated, that all files are available and that this
        evaluator suits the model preset; "" for pictures of an unknown one.

        Raises:
            TemperaError: a file is missing, or the evaluator is for other models.
        """
        return

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemperaError for prompts that it cannot score."""
        return

    def fetch(self) -> None:
        """Download the files that are not on this machine yet."""
        return

    def to_download(self) -> int:
        """Bytes that `fetch` will download; downloads nothing."""
        return 0

    def load(self, device: torch.device) -> Iterator[Networks]:
        """Load the networks, one group after another."""
        return iter(())

    def reference(self, edge: int) -> Iterator[Pictures]:
        """Real pictures in batches, uint8 [B, 3, h, w]; none if there is no reference.

        Args:
            edge: edge length of the generated pictures, in pixels.
        """
        return iter(())


@dataclass(frozen=True)
class NoEvaluator(Evaluator):
    """`metrics=none`: acceptance and speed only."""
