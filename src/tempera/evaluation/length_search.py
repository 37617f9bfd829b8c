"""`expected_length=`: the value of a method's free parameter at which its rounds have a wanted
accepted length, found on calibration prompts.

The accepted length of a value is measured by decoding the calibration prompts, always with the same
random draws. Where stored chains of p and q predict the length (relaxed and priced rules on
chains), the search solves the prediction, measures, shifts the prediction by its last error, and
repeats. For other rules, such as LANTERN and GSD, a pilot of few prompts is bisected, and its
lengths predict those of all. Once values below and above are measured, the search interpolates
between them. Every measurement is kept in a file, so an interrupted search continues and a repeated
one decodes nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import JointRule, Rule
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import LengthNotFound, LengthOutOfReach, TemperaError
from tempera.evaluation.calibration import Statistics
from tempera.evaluation.pipeline import Method
from tempera.rules.optimal import Priced
from tempera.rules.schedules import Prices
from tempera.rules.standard import Relaxed
from tempera.runtime.files import read_json, write_json

HALVINGS = 40
"""Steps of the bisection of a predicted length."""

LengthOf = Callable[[float], float]
"""The accepted length at a value of the free parameter."""


@dataclass(frozen=True)
class FreeParameter:
    """The option of a method that `expected_length` sets. More of it accepts more.

    Attributes:
        option: its name on the command line.
        least, most: its range; above 0. None if the statistics of the draft give it.
        scale: `log`, or `length` for an option that is itself a predicted length.
    """

    option: str
    least: float | None
    most: float | None
    scale: Literal["log", "length"]

    def __post_init__(self) -> None:
        if (self.least is None) != (self.most is None) or not (
            self.least is None or self.most is None or 0 < self.least < self.most < math.inf
        ):
            raise TemperaError(
                f"least={self.least} to most={self.most} is no range of {self.option}: give two "
                "numbers above 0, the smaller first",
                option="free_parameter.least",
            )

    def between(self, low: float, high: float, share: float) -> float:
        """The value at this share of the way, on the parameter's scale."""
        if self.scale == "length":
            return low + share * (high - low)
        return math.exp(math.log(low) + share * math.log(high / low))


@dataclass(frozen=True)
class LengthSearch:
    """How the free parameter is found.

    Attributes:
        directory: where measurements are stored.
        prompts: number of calibration prompts.
        offset: prompts of the data to skip; the evaluation must use none of these.
        seed: of the random draws.
        tolerance: largest difference between the wanted and the measured accepted length.
        trials: most values that are measured.
        pilot: the number of calibration prompts, the first ones, that predict lengths: by their
            recorded drafts, or by decoding them.
    """

    directory: Path
    prompts: int = 64
    offset: int = 0
    seed: int = 1
    tolerance: float = 0.02
    trials: int = 24
    pilot: int = 16

    def __post_init__(self) -> None:
        for name in ("prompts", "trials", "pilot"):
            if getattr(self, name) < 1:
                raise TemperaError(
                    f"matching.{name}={getattr(self, name)} finds no length: give at least 1",
                    option=f"matching.{name}",
                )
        if not self.tolerance > 0:
            raise TemperaError(
                f"matching.tolerance={self.tolerance:g} finds no length: give a number above 0",
                option="matching.tolerance",
            )


class Tried(NamedTuple):
    """A value of the free parameter, and its accepted length."""

    value: float
    length: float


@dataclass(frozen=True)
class MatchedLength:
    """What a search found.

    Attributes:
        option, value: the free parameter.
        length: its accepted length on the calibration prompts.
        trials: the values that were measured, with their lengths, in order.
    """

    option: str
    value: float
    length: float
    trials: tuple[Tried, ...]


class Measurements:
    """Accepted lengths by value, in a file of each; a value that is known is not measured again."""

    def __init__(self, directory: Path, measure: LengthOf) -> None:
        self.directory, self.measure = directory, measure

    def __call__(self, value: float) -> float:
        """The accepted length at a value."""
        path = self.directory / f"{value!r}.json"
        if path.is_file():
            known = read_json(path).get("accepted_length")
            if isinstance(known, float):
                return known
        length = self.measure(value)
        write_json(path, {"value": value, "accepted_length": length})
        return length


def accepted_length(
    target: Any,
    method: Method,
    prompts: Sequence[Prompt],
    seed: int,
    device: torch.device,
    batch_size: int,
) -> float:
    """Decode the prompts: tokens ÷ rounds over all images, as in metrics.json."""
    rounds = 0
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        streams = RandomStreams(seed, [prompt.id for prompt in batch], device)
        output = method.decode(target, streams, [prompt.text for prompt in batch])
        rounds += int(output.trace.rounds.sum())
    return float(len(prompts) * target.length / rounds)


def predicted_length(rule: Rule | JointRule, found: Statistics) -> float | None:
    """The mean length of the recorded rounds under a rule; None for rules that need more than the
    statistics hold.
    """
    match rule:
        case Relaxed(schedule=schedule) if found.ratios is not None:
            depth = found.chains.length
            last = schedule[-1:] * (depth - len(schedule))
            return found.chains.expected_emitted([*schedule[:depth], *last])
        case Priced(prices=prices):
            return found.rounds.expected(Prices(tuple(prices)))[0]
    return None


def search(
    wanted: float,
    parameter: FreeParameter,
    measure: LengthOf,
    predict: LengthOf | None,
    tolerance: float,
    trials: int,
) -> MatchedLength:
    """Find the value whose measured length is `wanted`, within the tolerance.

    The measured length is a step function of the value, since the random draws stay the same. Each
    step is one image's, so it is small if there are many. The search keeps a bracket: the nearest
    values that were measured below and above.

    Args:
        wanted: accepted length.
        parameter: what to vary, with its range.
        measure: the accepted length by decoding.
        predict: the predicted length; None if there is no prediction, and both ends are measured.
        tolerance: largest difference of the measured length from the wanted one.
        trials: most values to measure.

    Raises:
        LengthOutOfReach: the method cannot have this length.
        LengthNotFound: no value was found in `trials` measurements.
    """
    assert parameter.least is not None and parameter.most is not None
    ends, found = (parameter.least, parameter.most), list[Tried]()
    low, high = map(predict or measure, ends)
    if predict is None:
        found += map(Tried, ends, (low, high))
    if not low - tolerance <= wanted <= high + tolerance:
        raise LengthOutOfReach(wanted, low, high)
    below, above = Tried(ends[0], low), Tried(ends[1], high)
    while not any(abs(one.length - wanted) <= tolerance for one in found):
        if len(found) >= trials:
            raise _not_found(wanted, parameter, found)
        value = _guess(wanted, parameter, below, above, found, predict)
        if any(one.value == value for one in found):
            lengths = [one.length for one in found]
            if not min(lengths) < wanted < max(lengths):
                raise LengthOutOfReach(wanted, min(low, *lengths), max(lengths))
            raise _not_found(wanted, parameter, found)
        found.append(Tried(value, measure(value)))
        below, above = (found[-1], above) if found[-1].length < wanted else (below, found[-1])
    best = next(one for one in found if abs(one.length - wanted) <= tolerance)
    return MatchedLength(parameter.option, best.value, best.length, tuple(found))


def search_with_pilot(
    wanted: float,
    parameter: FreeParameter,
    pilot: LengthOf,
    measure: LengthOf,
    loose: float,
    tolerance: float,
    trials: int,
) -> MatchedLength:
    """Find the value as `search` without a prediction does, with fewer measurements on all prompts:
    first search with few prompts, whose lengths then predict those of all. A pilot that misleads
    costs time and nothing else, since all prompts are then searched without it.

    Args:
        wanted, parameter, measure, tolerance, trials: see `search`, for all prompts and for the
            pilot.
        pilot: the accepted length by decoding few prompts.
        loose: tolerance of the pilot.

    Raises:
        LengthOutOfReach, LengthNotFound: of the search with all prompts alone.
    """
    try:
        tried = search(wanted, parameter, pilot, None, loose, trials).trials
        predict = interpolated(tried)
        return search(wanted, parameter, measure, predict, tolerance, trials)
    except (LengthOutOfReach, LengthNotFound):
        return search(wanted, parameter, measure, None, tolerance, trials)


def interpolated(tried: Sequence[Tried]) -> LengthOf:
    """The length between values that were tried: linear in the value's logarithm, and where noise
    lowers it, that of smaller values.
    """
    values, lengths = np.array(sorted(tried)).T
    places, rising = np.log(values), np.maximum.accumulate(lengths)
    return lambda value: float(np.interp(math.log(value), places, rising))


def _guess(
    wanted: float,
    parameter: FreeParameter,
    below: Tried,
    above: Tried,
    found: Sequence[Tried],
    predict: LengthOf | None,
) -> float:
    """The next value to measure, in six digits: where the prediction, shifted by its last error,
    is `wanted`; interpolated without a prediction, or once both ends of the bracket are measured.
    Every second value is the middle of the bracket, in case interpolation is slow.
    """
    turn = len(found)
    if predict is None or (below in found and above in found):
        halve = turn % 2 == 0 and (predict is None or turn > 3)
        share = 0.5 if halve else (wanted - below.length) / (above.length - below.length)
        value = parameter.between(below.value, above.value, min(max(share, 0.05), 0.95))
    else:
        error = found[-1].length - predict(found[-1].value) if found else 0.0
        value = _solved(wanted - error, parameter, predict)
    return float(f"{value:.6g}")


def _solved(wanted: float, parameter: FreeParameter, predict: LengthOf) -> float:
    """The value whose predicted length is `wanted`, or the nearer end of the range."""
    assert parameter.least is not None and parameter.most is not None
    low, high = parameter.least, parameter.most
    if parameter.scale == "length":
        return min(max(wanted, low), high)
    for _ in range(HALVINGS):
        middle = parameter.between(low, high, 0.5)
        low, high = (middle, high) if predict(middle) < wanted else (low, middle)
    return high


def _not_found(wanted: float, parameter: FreeParameter, found: Sequence[Tried]) -> LengthNotFound:
    value, length = min(found, key=lambda one: abs(one.length - wanted))
    return LengthNotFound(parameter.option, wanted, value, length)
