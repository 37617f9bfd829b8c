"""`metrics=real`: the networks that the field publishes, applied to pictures of any model."""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.metrics.evaluators import Evaluator, Networks, Pictures, at_least_1
from tempera.metrics.reference import Reference
from tempera.metrics.weights import WeightsFile

USUAL = ("fid", "kid", "precision", "recall", "inception_score", "clip")
"""What is measured by default, as far as its files are on this machine."""


class Adapter(Protocol):
    """A published network and the metrics that it computes. Constructing one reads no files.

    Attributes:
        metrics: keys of the table of metrics.
        distances: the metrics among them that need reference pictures.
    """

    metrics: tuple[str, ...]
    distances: tuple[str, ...] = ()

    @property
    def files(self) -> Sequence[WeightsFile]:
        """All files that the network reads."""

    def network(self) -> nn.Module:
        """The network on the CPU with memory-mapped weights, which is quick.

        Raises:
            TemperaError: the files are those of another network.
        """

    def load(self, device: torch.device) -> Networks:
        """The networks that measure pictures, on the device."""


@dataclass(frozen=True)
class StandardEvaluator(Evaluator):
    """Networks chosen by name, each loaded when its turn comes.

    Args:
        networks: all networks that can be chosen, by name.
        names: names of networks, or keys of single metrics. None takes those of `USUAL` whose files
            and reference are available.
        images: the reference.
        resamples: number of bootstrap resamples for each interval.
    """

    networks: Mapping[str, Adapter]
    names: Sequence[str] | None = None
    images: Reference = field(default_factory=Reference)
    resamples: int = 200

    @property
    @override
    def identity(self) -> str:
        return self.images.identity

    @property
    @override
    def scores_clip(self) -> bool:
        return any("clip_score" in metrics for metrics in self._chosen[0].values())

    @override
    def check(self, model: str) -> None:
        at_least_1(resamples=self.resamples)
        if self.names is not None and not self.names:
            raise TemperaError("names lists no metric: give one or more, or measure none.")
        self._chosen  # noqa: B018  raises

    @override
    def to_download(self) -> int:
        files = {file for name in self._chosen[0] for file in self.networks[name].files}
        images = self.images.to_download() if self._compares else 0
        return images + sum(file.size() for file in files if file.local is None)

    @override
    def fetch(self) -> None:
        chosen, left_out = self._chosen
        for reason in left_out:
            print(f"left out: {reason}")
        if self._compares:
            self.images.fetch()
        for name in chosen:
            for file in self.networks[name].files:
                file.path()

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        for name, metrics in self._chosen[0].items():
            adapter = self.networks[name]
            made = adapter.load(device)
            yield replace(
                made,
                distances={key: one for key, one in made.distances.items() if key in metrics},
                statistics={key: one for key, one in made.statistics.items() if key in metrics},
                identity=f"{name}-{_identity(adapter)}",
            )

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        return self.images.pictures(edge)

    @cached_property
    def _chosen(self) -> tuple[dict[str, list[str]], list[str]]:
        """The metrics to measure, by network, and why some of `USUAL` are left out.

        Raises:
            TemperaError: a named metric is unknown or cannot be measured.
        """
        wanted: dict[str, list[str]] = {}
        for name in USUAL if self.names is None else self.names:
            network, metrics = self._find(name)
            wanted.setdefault(network, []).extend(metrics)
        problems: list[TemperaError] = []

        def passes(check: Callable[[], None]) -> bool:
            try:
                check()
            except TemperaError as problem:
                problems.append(problem)
                return False
            return True

        compared = [key for each in wanted.items() for key in self._compared(*each)]
        if compared and not passes(partial(self._check_reference, compared)):
            wanted = {
                name: [key for key in metrics if key not in compared]
                for name, metrics in wanted.items()
            }
        wanted = {
            name: metrics
            for name, metrics in wanted.items()
            if metrics and passes(partial(_check, self.networks[name]))
        }
        if problems and self.names is not None:
            raise problems[0]
        return wanted, [str(problem) for problem in problems]

    def _check_reference(self, compared: Sequence[str]) -> None:
        if self.images.place is None:
            titles = ", ".join(table.find(key).title for key in compared)
            raise TemperaError(
                f"there are no real images for {titles}: give metrics.reference=DIR, or "
                "metrics.reference=coco for MS-COCO's",
                option="metrics.reference",
            )
        self.images.check()

    @property
    def _compares(self) -> bool:
        """Whether a chosen metric needs the reference."""
        return any(self._compared(*each) for each in self._chosen[0].items())

    def _compared(self, name: str, metrics: Sequence[str]) -> list[str]:
        """The network's metrics that need the reference."""
        return [key for key in metrics if key in self.networks[name].distances]

    def _find(self, name: str) -> tuple[str, list[str]]:
        """The network that a name refers to, and the metrics that it selects."""
        if name in self.networks:
            return name, list(self.networks[name].metrics)
        for network, adapter in self.networks.items():
            if name in adapter.metrics:
                return network, [name]
        singles = [key for adapter in self.networks.values() for key in adapter.metrics]
        known = list(dict.fromkeys([*self.networks, *singles]))
        near = difflib.get_close_matches(str(name), known, n=1)
        meant = f"did you mean {near[0]}? The names are" if near else "the names are"
        raise TemperaError(
            f"there is no metric {name}: {meant} {', '.join(known)}", option="metrics.names"
        )


def standard_evaluator(
    names: list[str] | None = None,
    reference: str | None = None,
    reference_size: int | None = None,
    resamples: int = 200,
    **networks: Adapter,
) -> StandardEvaluator:
    """A `StandardEvaluator` from options.

    Args:
        names: see `StandardEvaluator`.
        reference, reference_size: place and size of a `Reference`.
        resamples: bootstrap resamples behind each interval.
        networks: all networks that can be chosen, by name.
    """
    images = Reference(reference, reference_size)
    return StandardEvaluator(networks, names, images, resamples)


def _check(adapter: Adapter) -> None:
    """Check that all files are available; those on this machine are checked against the network."""
    for file in adapter.files:
        file.size()
    if all(file.local for file in adapter.files):
        adapter.network()


def _identity(adapter: Adapter) -> str:
    """A hash of the adapter's options and of the sizes of the user's own files."""
    given = [Path(file.place).expanduser() for file in adapter.files]
    sizes = [str(path.stat().st_size) for path in given if path.is_file()]
    return hashlib.sha256(" ".join([repr(adapter), *sizes]).encode()).hexdigest()[:16]
