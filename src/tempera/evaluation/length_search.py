"""`expected_length=`: the value of a method's free parameter at which its rounds have a wanted
accepted length, found on calibration prompts by Brent's method.

The accepted length of a value is measured by decoding the calibration prompts, always with the same
random draws, so it is a step function of the value; each step is one image's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import scipy  # its submodules are imported when they are used
from pydantic import Field

from tempera.data.prompts import Prompt
from tempera.decoding.random_streams import RandomStreams
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method, Progress, progress_bar

Above0 = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FreeParameter:
    """The option of a method that `expected_length` sets. More of it always accepts more, or always
    less.

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
        prompts: number of calibration prompts.
        offset: prompts of the data to skip; the evaluation must use none of these.
        seed: of the random draws.
        tolerance: largest difference between the wanted and the measured accepted length.
    """

    prompts: Annotated[int, Field(ge=1)]
    offset: int
    seed: int
    tolerance: Above0


def accepted_length(
    target: Any,
    method: Method,
    prompts: Sequence[Prompt],
    seed: int,
    device: Any,
    batch_size: int,
    setting: str,
) -> float:
    """Decode the prompts: tokens ÷ rounds over all images, as in metrics.json. The progress bar
    tells the setting.
    """
    rounds = 0
    with progress_bar(f"trying {setting}", len(prompts) * target.length) as bar:
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            streams = RandomStreams(seed, [prompt.id for prompt in batch], device)
            texts = [prompt.text for prompt in batch]
            output = method.decode(target, streams, texts, watch=[Progress(bar.update)])
            rounds += int(output.trace.rounds.sum())
    return float(len(prompts) * target.length / rounds)


def search(
    wanted: float,
    option: str,
    ends: tuple[float, float],
    tolerance: float,
    measure: Callable[[float], float],
) -> tuple[float, float]:
    """The value whose measured length is `wanted`, and that length, by Brent's method over the
    logarithm of the value.

    Args:
        wanted: accepted length.
        option: the name of the free parameter.
        ends: its range.
        tolerance: largest difference in length.
        measure: the accepted length at a value.

    Raises:
        TemperaError: the method cannot have this length, or jumps over it.
    """
    lengths: dict[float, float] = {}

    @cache
    def error(log_value: float) -> float:
        """Of the measured length; 0 within the tolerance, where Brent's method stops."""
        value = float(f"{math.exp(log_value):.6g}")
        lengths[value] = measure(value)
        difference = lengths[value] - wanted
        return 0.0 if abs(difference) <= tolerance else difference

    least, most = map(math.log, ends)
    if error(least) * error(most) > 0:
        low, high = sorted(lengths.values())
        raise TemperaError(
            f"an accepted length of {wanted:g} is out of reach of this method: give about "
            f"{math.ceil(100 * low) / 100:.2f} to {math.floor(100 * high) / 100:.2f}",
            option="expected_length",
        )
    scipy.optimize.brentq(error, least, most, xtol=1e-3)
    value = min(lengths, key=lambda measured: abs(lengths[measured] - wanted))
    length = lengths[value]
    if abs(length - wanted) > tolerance:
        raise TemperaError(
            f"no {option} was found that accepts {wanted:g} tokens per round; the nearest is "
            f"{option}={value:g} with {length:.3f}: give this length, or a larger "
            "matching.tolerance",
            option="expected_length",
        )
    return value, length
