"""Image metrics of torchmetrics, named in YAML (`conf/torchmetrics/`): of each picture, of pairs of
pictures, or of whole sets by their features.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.metrics.bootstrap import Interval
from tempera.metrics.distances import Distance, Features, accumulated
from tempera.metrics.evaluators import Evaluator, Networks, Pictures, Score, Statistic
from tempera.metrics.scores import taken
from tempera.metrics.weights import identity
from tempera.runtime.files import fingerprint, read_json, reason
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import read_table

Make = Callable[..., Any]
"""Makes a metric of torchmetrics: a class, or a `functools.partial` of one."""
UNIT = {"data_range": 1.0, "normalize": True}
"""Arguments that tell torchmetrics that pictures are in [0, 1]."""
SMALL = 8
"""Edge length at which a reference is only asked whether it has images."""
RESULTS = "results.parquet"
"""Of the other run."""


class TorchMetrics(Evaluator):
    """An evaluator, and metrics of torchmetrics beside its own.

    What a metric is computed on follows from its signature. `update(pictures)` scores each picture,
    and `update(pictures, others)` each pair with the picture of the same prompt in another run;
    both give intervals over prompts. A metric that takes a network (`feature`) compares the
    features that the evaluator's networks compute, with those of the reference if it wants real
    ones: one number, without an interval.

    Pictures are float32 in [0, 1]; where a class has the arguments `data_range` or `normalize`,
    they say so unless they are given.

    Args:
        base: the evaluator.
        metrics: makers of metrics by their keys.
        against: the directory of the other run.
    """

    def __init__(
        self, base: Evaluator, metrics: Mapping[str, Make], against: str | None = None
    ) -> None:
        self.base = base
        self.makers = {key: _in_unit_range(make) for key, make in metrics.items()}
        self.against = None if against is None else Path(against).expanduser()
        for key in self.makers:
            if key in taken():
                raise _refused(key, "the name is taken, so choose another")
        table.include(self.makers)
        self.sets = [key for key, make in self.makers.items() if takes_features(make)]
        self.of_pictures: dict[str, Any] = {}  # made by `check`

    @property
    @override
    def identity(self) -> str:
        return self.base.identity

    @property
    @override
    def resamples(self) -> int:
        return self.base.resamples or 200

    @override
    def check(self, model: str) -> None:
        """Check the evaluator, and make the metrics, which download what they need."""
        self.base.check(model)
        compared, _ = self._of_sets()
        if compared and next(self.base.reference(SMALL), None) is None:
            raise _refused(
                next(iter(compared)),
                "there are no real images to compare with: give metrics.reference=DIR",
            )
        for key, make in self.makers.items():
            if key in self.sets:
                continue
            try:
                self.of_pictures[key] = make()
            except Exception as problem:  # whatever torchmetrics and its networks raise
                raise _refused(key, f"torchmetrics cannot make it ({reason(problem)})") from problem
            if compares(self.of_pictures[key]) and self.against is None:
                raise _refused(
                    key, "it compares with the pictures of another run: give against=RUN"
                )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemperaError unless the other run has pictures of these prompts."""
        if self.against is None:
            return
        rows = read_table(self.against / RESULTS, identity=self._made_by)
        texts = {row["id"]: row["text"] for row in rows}
        for prompt in prompts:
            if texts.get(prompt.id) != prompt.text or not self._other(prompt).is_file():
                raise TemperaError(
                    f"{self.against} has no picture of the prompt {prompt.id}: give a finished run "
                    "of the same prompts",
                    option="against",
                )

    @override
    def to_download(self) -> int:
        return self.base.to_download()

    @override
    def fetch(self) -> None:
        self.base.fetch()

    @override
    def reference(self, edge: int) -> Iterator[Pictures]:
        return self.base.reference(edge)

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        compared, plain = self._of_sets()
        needs_features = bool(self.sets)
        for networks in self.base.load(device):
            if networks.features is None or not needs_features:
                yield networks
                continue
            yield replace(
                networks,
                distances={**networks.distances, **compared},
                statistics={**networks.statistics, **plain},
            )
            needs_features = False
        if needs_features:
            raise _refused(self.sets[0], "it needs features: choose metrics that compute some")
        if self.of_pictures:
            options = [repr(self.makers[key]) for key in self.of_pictures]
            run = [] if self.against is None else [self.against / RESULTS]
            yield Networks(
                scores=[
                    self._score(key, metric.to(device)) for key, metric in self.of_pictures.items()
                ],
                distances={},
                identity=f"torchmetrics-{identity((options, str(self.against)), run)}",
            )

    def _of_sets(self) -> tuple[dict[str, Distance], dict[str, Statistic]]:
        """Metrics of sets: those that compare with real pictures, and those that do not."""
        compared: dict[str, Distance] = {}
        plain: dict[str, Statistic] = {}
        for key in self.sets:
            make = self.makers[key]
            if "real" in inspect.signature(_class(make).update).parameters:
                compared[key] = partial(_distance, make)
            else:
                plain[key] = partial(_statistic, make)
        return compared, plain

    def _score(self, key: str, metric: Any) -> Score:
        pairs = compares(metric)

        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            values = []
            for picture, prompt in zip(pictures, prompts, strict=True):
                shown = [picture]
                if pairs:
                    shown.append(torch.from_numpy(read_picture(self._other(prompt), self._made_by)))
                values.append(_value(key, metric, shown))
            return {key: torch.tensor(values)}

        return score

    @cached_property
    def _made_by(self) -> str:
        """What the parts of the other run carry (`tempera.evaluation.run_directory.made_by`)."""
        assert self.against is not None
        identity = read_json(self.against / "run.json").get("identity")
        return fingerprint(identity if isinstance(identity, dict) else {})

    def _other(self, prompt: Prompt) -> Path:
        assert self.against is not None
        return picture_path(self.against, prompt.id)


def _value(key: str, metric: Any, pictures: Sequence[Tensor]) -> float:
    """The metric of one picture or pair, uint8 [3, h, w] each."""
    metric.reset()
    try:
        inputs = [picture[None].to(metric.device).float() / 255 for picture in pictures]
        metric.update(*inputs)
        return float(metric.compute())
    except Exception as problem:
        raise _refused(key, f"torchmetrics cannot compute it ({reason(problem)})") from problem


def _distance(make: Make, generated: Features, real: Features, resamples: int) -> Interval:
    return _without_interval(accumulated(make, generated, real), len(generated))


def _statistic(make: Make, features: Features, resamples: int) -> Interval:
    return _without_interval(accumulated(make, features), len(features))


def _without_interval(value: float, n: int) -> Interval:
    return Interval(value, float("nan"), float("nan"), n)


def takes_features(make: Make) -> bool:
    """Whether a metric is of whole sets, by the features of a network that it is given."""
    return "feature" in _parameters(make)


def compares(metric: Any) -> bool:
    """Whether a metric is of pairs of pictures."""
    needed = 0
    for parameter in inspect.signature(metric.update).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            needed += parameter.default is parameter.empty
    return needed > 1


def _in_unit_range(make: Make) -> Make:
    """The maker with those arguments of `UNIT` that its class takes and that YAML does not set."""
    if takes_features(make):
        return make
    set_already = getattr(make, "keywords", {})
    taken_by_class = _parameters(make)
    unit = {
        key: value
        for key, value in UNIT.items()
        if key in taken_by_class and key not in set_already
    }
    return partial(make, **unit)


def _class(make: Make) -> Any:
    return _class(make.func) if isinstance(make, partial) else make


def _parameters(make: Make) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_class(make)).parameters


def _refused(key: str, why: str) -> TemperaError:
    return TemperaError(f"torchmetrics.{key} cannot be measured: {why}", option="torchmetrics")
