"""`metrics=real`: the networks that the field publishes, applied to pictures of any model."""

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.metrics.evaluators import Evaluator, Networks, Pictures, at_least_1
from tempera.metrics.reference import Reference
from tempera.metrics.weights import WeightsFile

USUAL = ("fid", "kid", "precision", "recall", "inception_score", "clip")
"""What is measured by default, as far as its files are available."""


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
        """The files that the network reads, as far as their names are known."""

    def network(self) -> nn.Module:
        """The network on the CPU; downloads what is missing.

        Raises:
            TemperaError: a file is unavailable, or is that of another network.
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
            self.networks[name].network()

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

        @cache
        def problem(network: str | None) -> TemperaError | None:
            """What is wrong with a network's files, or with the reference."""
            try:
                for file in self.networks[network].files if network else ():
                    file.size()
                if network is None:
                    self.images.check()
            except TemperaError as found:
                return found
            return None

        chosen, left_out = dict[str, list[str]](), list[str]()
        for name in USUAL if self.names is None else self.names:
            network, metrics = self._find(name)
            compared = set(metrics) & set(self.networks[network].distances)
            wrong = (problem(None) if compared else None) or problem(network)
            if wrong is None:
                chosen.setdefault(network, []).extend(metrics)
            elif self.names is not None:
                raise wrong
            else:
                left_out.append(str(wrong))
        return chosen, list(dict.fromkeys(left_out))

    @property
    def _compares(self) -> bool:
        """Whether a chosen metric needs the reference."""
        chosen = self._chosen[0].items()
        return any({*metrics} & {*self.networks[name].distances} for name, metrics in chosen)

    def _find(self, name: str) -> tuple[str, list[str]]:
        """The network that a name refers to, and the metrics that it selects."""
        if name in self.networks:
            return name, list(self.networks[name].metrics)
        of = {key: network for network, one in self.networks.items() for key in one.metrics}
        if name in of:
            return of[name], [name]
        known = list(dict.fromkeys([*self.networks, *of]))
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


def _identity(adapter: Adapter) -> str:
    """A hash of the adapter's options and of the sizes of the user's own files."""
    given = [Path(file.place).expanduser() for file in adapter.files]
    sizes = [str(path.stat().st_size) for path in given if path.is_file()]
    return hashlib.sha256(" ".join([repr(adapter), *sizes]).encode()).hexdigest()[:16]
