"""`metrics=real`: the networks that the field publishes, applied to pictures of any model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from pydantic import PositiveInt
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.metrics.distances import frechet_to
from tempera.metrics.evaluators import Evaluator, Networks, Pictures
from tempera.metrics.reference import Reference
from tempera.metrics.weights import WeightsFile, identity
from tempera.runtime.distributed import started_as_main
from tempera.runtime.hub import together

USUAL = ("fid", "kid", "precision", "recall", "inception_score", "clip")
"""What is measured by default."""


class Adapter(Protocol):
    """A published network and the metrics that it computes. Constructing one reads no files.

    Attributes:
        metrics: keys of the table of metrics.
        distances: the metrics among them that need reference pictures.
        weights: where its file of weights is: a `WeightsFile.location`.
        name: the name of that file.
    """

    metrics: tuple[str, ...]
    distances: tuple[str, ...] = ()
    weights: Any
    name: str

    @property
    def files(self) -> Sequence[WeightsFile]:
        """The files that the network reads, as far as their names are known."""
        return (WeightsFile(self.weights, self.name),)

    def fetch(self) -> None:
        """Download what is missing; load nothing."""
        for file in self.files:
            file.path()

    def load(self, device: torch.device) -> Networks:
        """The networks that measure pictures, on the device; downloads what is missing.

        Raises:
            TemperaError: a file is unavailable, or is that of another network.
        """


class StandardEvaluator(Evaluator):
    """Networks chosen by name, each loaded when its turn comes.

    Args:
        names: names of networks, or keys of single metrics. None takes `USUAL`; without a reference
            those that need none.
        reference: location of a `Reference`.
        resamples: number of bootstrap resamples for each interval.
        networks: all networks that can be chosen, by name.

    Raises:
        TemperaError: there is no metric of a name.
    """

    def __init__(
        self,
        names: list[str] | None = None,
        reference: str | None = None,
        *,
        resamples: PositiveInt,
        **networks: Adapter,
    ) -> None:
        self.names = names
        self.networks = networks
        self.images = Reference(reference)
        self._resamples = resamples
        self._problems: dict[str, TemperaError | None] = {}
        if names is not None and not names:
            raise TemperaError("metrics.names is empty: give at least one metric, or metrics=none.")
        for name in names or ():
            self._find(name)

    @property
    @override
    def identity(self) -> str:
        return self.images.identity

    @property
    @override
    def resamples(self) -> int:
        return self._resamples

    @override
    def check(self, model: str) -> None:
        _ = self._chosen  # raises where a metric cannot be measured

    @override
    def to_download(self) -> int:
        files = {file for name in self._chosen for file in self.networks[name].files}
        images = self.images.to_download() if self._compares else 0
        return images + sum(file.size() for file in files if file.local is None)

    @override
    def fetch(self) -> None:
        if self._compares:
            self.images.fetch()
        for name in self._chosen:
            self.networks[name].fetch()

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        """See `Evaluator.load`: one adapter after the other."""
        moments = self.images.moments() if self._compares else None
        for name, metrics in self._chosen.items():
            adapter = self.networks[name]
            networks = adapter.load(device)
            files = [file.local for file in adapter.files]
            distances = networks.distances
            if moments is not None and "fid" in distances:
                distances = {**distances, "fid": frechet_to(*moments)}
            statistics = networks.statistics
            yield replace(
                networks,
                distances={key: distances[key] for key in distances if key in metrics},
                statistics={key: statistics[key] for key in statistics if key in metrics},
                identity=f"{name}-{identity(adapter, filter(None, files))}",
            )

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        return self.images.pictures(edge)

    @cached_property
    def _chosen(self) -> dict[str, list[str]]:
        """The metrics to measure, by network. Prints, the first time, which of `USUAL` are left out
        without a reference.

        Raises:
            TemperaError: a metric is unknown or cannot be measured.
        """
        chosen: dict[str, list[str]] = {}
        left_out: list[str] = []
        problems: dict[TemperaError, None] = {}
        for name in USUAL if self.names is None else self.names:
            network, metrics = self._find(name)
            compares = set(metrics) & set(self.networks[network].distances)
            if self.names is None and compares and self.images.location is None:
                left_out.append(name)
                continue
            chosen.setdefault(network, []).extend(metrics)
            problem = self._reference_problem if compares else None
            if problem := problem or self._network_problem(network):
                problems[problem] = None
        if problems and self.names is None:
            raise TemperaError(
                "metrics=real cannot measure all its default metrics (to measure fewer, give "
                f"metrics.names=[...] or metrics=none): {together([*problems])}"
            )
        if problems:
            raise together([*problems])
        if left_out and started_as_main():
            print(f"left out without metrics.reference: {', '.join(left_out)}")
        return chosen

    def _network_problem(self, network: str) -> TemperaError | None:
        """What is wrong with a network's files, if anything is; checked once."""
        if network not in self._problems:
            self._problems[network] = None
            try:
                for file in self.networks[network].files:
                    file.size()
            except TemperaError as problem:
                self._problems[network] = problem
        return self._problems[network]

    @cached_property
    def _reference_problem(self) -> TemperaError | None:
        """What is wrong with the reference, if anything is; checked once."""
        try:
            self.images.check()
        except TemperaError as problem:
            return problem
        return None

    @property
    def _compares(self) -> bool:
        """Whether a chosen metric needs the reference."""
        return any(
            set(metrics) & set(self.networks[name].distances)
            for name, metrics in self._chosen.items()
        )

    def _find(self, name: str) -> tuple[str, list[str]]:
        """The network that a name refers to, and the metrics that it selects."""
        if name in self.networks:
            return name, list(self.networks[name].metrics)
        owners = {
            key: network for network, adapter in self.networks.items() for key in adapter.metrics
        }
        if name in owners:
            return owners[name], [name]
        names = ", ".join(dict.fromkeys([*self.networks, *owners]))
        raise TemperaError(
            f"there is no metric {name}: the names are {names}.", option="metrics.names"
        )
