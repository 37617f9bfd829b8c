"""Image metrics of torchmetrics, named in YAML (`conf/torchmetrics/`): of each picture, or of pairs
of pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Evaluator, Networks, Score
from tempera.metrics.scores import taken
from tempera.metrics.table import Metric, entry
from tempera.metrics.weights import identity
from tempera.runtime.files import fingerprint, read_json, reason
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import read_table

Kind = Literal["picture", "pair"]
"""What a metric is computed on: each picture, or a picture and that of the same prompt in another
run.
"""
RESULTS = "results.parquet"
"""Of the other run."""


class TorchMetric(NamedTuple):
    """A metric of torchmetrics that is not made yet.

    Attributes:
        kind: how its `update` is called.
        make: a class of torchmetrics, or a `functools.partial` of one.
    """

    kind: Kind
    make: Callable[[], Any]


class TorchMetrics(Evaluator):
    """Metrics of torchmetrics, which have intervals over prompts. They are given pictures float32
    [1, 3, h, w] in [0, 1].

    Args:
        named: by their keys.
        against: the directory of the other run.
    """

    def __init__(self, named: Mapping[str, TorchMetric], against: str | None = None) -> None:
        self.named = named
        self.against = None if against is None else Path(against).expanduser()
        for key in named:
            if key in taken():
                raise _refused(key, "the name is already taken, so choose another")
        self.made: dict[str, Any] = {}

    @property
    @override
    def metrics(self) -> Sequence[Metric]:
        """Each with the direction that its class declares, once it is made."""
        return [entry(key, made.higher_is_better) for key, made in self.made.items()]

    @override
    def check(self, model: str) -> None:
        """Make the metrics, which download what they need."""
        for key, (kind, make) in self.named.items():
            try:
                self.made[key] = make()
            except Exception as problem:  # whatever torchmetrics and its networks raise
                raise _refused(key, f"torchmetrics cannot make it ({reason(problem)})") from problem
            pictures = ["picture"] if kind == "picture" else ["picture", "other"]
            try:
                signature(self.made[key].update).bind(*pictures)
            except TypeError as problem:
                raise _refused(
                    key, f"kind={kind} does not fit its update method ({reason(problem)})"
                ) from problem
            if kind == "pair" and self.against is None:
                raise _refused(
                    key, "it compares with the pictures of another run: give against=RUN"
                )

    @override
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
    def load(self, device: torch.device) -> Iterator[Networks]:
        for key, metric in self.made.items():
            yield Networks(
                scores=[self._score(key, metric.to(device))],
                distances={},
                identity=f"{key}-{self._identity_of(self.named[key])}",
            )

    def _identity_of(self, metric: TorchMetric) -> str:
        """Names a metric with its options, and the other run if it compares with that."""
        if metric.kind == "picture" or self.against is None:
            return identity(repr(metric), [])
        return identity((repr(metric), self._made_by), [self.against / RESULTS])

    def _score(self, key: str, metric: Any) -> Score:
        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            values = []
            for picture, prompt in zip(pictures, prompts, strict=True):
                shown = [picture]
                if self.named[key].kind == "pair":
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


def _refused(key: str, why: str) -> TemperaError:
    return TemperaError(f"torchmetrics.{key} cannot be measured: {why}", option="torchmetrics")
