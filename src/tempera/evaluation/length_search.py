"""`expected_length=`: the value of a method's free parameter at which its rounds have a wanted
accepted length, found on calibration prompts.

The accepted length of a value is measured by decoding the calibration prompts, always with the same
random draws, so it is a step function of the value; each step is one image's. Where stored chains
of p and q predict the length (relaxed and priced rules on chains), the search looks for the
predicted length that is measured as the wanted one, which takes two or three measurements. For
other rules, such as LANTERN and GSD, a pilot of few prompts is searched first, and its lengths
predict those of all. Every measurement is kept in a file, so an interrupted search continues and a
repeated one decodes nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from scipy.optimize import brentq

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import JointRule, Rule
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import LengthNotFound, LengthOutOfReach
from tempera.evaluation.calibration import Statistics
from tempera.evaluation.pipeline import Method
from tempera.rules.optimal import Priced
from tempera.rules.schedules import Prices
from tempera.rules.standard import Relaxed
from tempera.runtime.files import read_json, write_json

LengthOf = Callable[[float], float]
"""The accepted length at a value of the free parameter."""
Positive = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FreeParameter:
    """The option of a method that `expected_length` sets. More of it accepts more.

    Attributes:
        option: its name on the command line.
        least, most: its range. None for an option that is itself a predicted length, whose range
            the statistics of the draft give.
    """

    option: str
    least: Above0 | None
    most: Above0 | None


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
    prompts: Positive = 64
    offset: int = 0
    seed: int = 1
    tolerance: Above0 = 0.02
    trials: Positive = 24
    pilot: Positive = 16


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
    trials: tuple[tuple[float, float], ...]


def kept(directory: Path, measure: LengthOf) -> LengthOf:
    """`measure` with its lengths in files; a value that is known is not measured again."""

    def length(value: float) -> float:
        path = directory / f"{value!r}.json"
        if not path.is_file():
            write_json(path, {"value": value, "accepted_length": measure(value)})
        stored: Any = read_json(path)
        return float(stored["accepted_length"])

    return length


def accepted_length(
    target: Any, method: Method, prompts: Sequence[Prompt], seed: int, device: Any, batch_size: int
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
            last = [schedule[-1]] * (depth - len(schedule))
            return found.chains.expected_emitted([*schedule[:depth], *last])
        case Priced(prices=prices):
            return found.rounds.expected(Prices(tuple(prices)))[0]
    return None


def search(
    wanted: float,
    parameter: FreeParameter,
    options: LengthSearch,
    measure: LengthOf,
    predict: LengthOf | None = None,
) -> MatchedLength:
    """Find the value whose measured length is `wanted`, by Brent's method: over the logarithm of
    the value, or over the predicted length, of which the measured one is almost a shift.

    Args:
        wanted: accepted length.
        parameter: what to vary, with its range.
        options: the tolerance, and how many values may be measured.
        measure: the accepted length by decoding.
        predict: the predicted length; None if there is no prediction, and both ends are measured.

    Raises:
        LengthOutOfReach: the method cannot have this length.
        LengthNotFound: no value was found in `options.trials` measurements.
    """
    assert parameter.least is not None and parameter.most is not None
    ends, found = (parameter.least, parameter.most), dict[float, float]()
    value_at = math.exp if predict is None else _inverse(predict, *ends)

    def length(value: float) -> float:
        if value not in found:
            if len(found) >= options.trials:
                raise LengthNotFound(parameter.option, wanted, *nearest())
            found[value] = measure(value)
        return found[value]

    def error(place: float) -> float:
        """Of the measured length; 0 within the tolerance, where Brent's method stops."""
        difference = length(float(f"{value_at(place):.6g}")) - wanted
        return 0.0 if abs(difference) <= options.tolerance else difference

    def nearest() -> tuple[float, float]:
        return min(found.items(), key=lambda one: abs(one[1] - wanted))

    low, high = map(predict or length, ends)
    if not low - options.tolerance <= wanted <= high + options.tolerance:
        raise LengthOutOfReach(wanted, low, high)
    if predict is None:
        near, far = map(math.log, ends)
    else:
        near, far = wanted, min(max(wanted - error(wanted), low), high)
        while error(near) * error(far) > 0 and low < far < high:
            near, far = far, min(max(far + 2 * (far - near), low), high)
    if error(near) * error(far) > 0:
        raise LengthOutOfReach(wanted, min(low, *found.values()), max(found.values()))
    brentq(error, near, far, xtol=1e-6)
    value, reached = nearest()
    if abs(reached - wanted) > options.tolerance:
        raise LengthNotFound(parameter.option, wanted, value, reached)
    return MatchedLength(parameter.option, value, reached, tuple(found.items()))


def _inverse(predict: LengthOf, least: float, most: float) -> LengthOf:
    """The value of a predicted length, or the nearer end of the range."""

    def value_at(length: float) -> float:
        def error(place: float) -> float:
            return predict(math.exp(place)) - length

        low, high = math.log(least), math.log(most)
        if error(low) >= 0:
            return least
        return most if error(high) <= 0 else math.exp(brentq(error, low, high, xtol=1e-9))

    return value_at


def search_with_pilot(
    wanted: float,
    parameter: FreeParameter,
    options: LengthSearch,
    measure: LengthOf,
    pilot: LengthOf,
    loose: float,
) -> MatchedLength:
    """Find the value as `search` without a prediction does, with fewer measurements on all prompts:
    first search with few prompts, whose lengths then predict those of all. A pilot that misleads
    costs time and nothing else, since all prompts are then searched without it.

    Args:
        wanted, parameter, options, measure: see `search`.
        pilot: the accepted length by decoding few prompts.
        loose: tolerance of the pilot.

    Raises:
        LengthOutOfReach, LengthNotFound: of the search with all prompts alone.
    """
    try:
        tried = search(wanted, parameter, replace(options, tolerance=loose), pilot).trials
        return search(wanted, parameter, options, measure, interpolated(tried))
    except (LengthOutOfReach, LengthNotFound):
        return search(wanted, parameter, options, measure)


def interpolated(tried: Sequence[tuple[float, float]]) -> LengthOf:
    """The length between values that were tried: linear in the value's logarithm, and where noise
    lowers it, that of smaller values.
    """
    values, lengths = np.array(sorted(tried)).T
    places, rising = np.log(values), np.maximum.accumulate(lengths)
    return lambda value: float(np.interp(math.log(value), places, rising))
