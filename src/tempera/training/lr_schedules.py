"""Learning-rate schedules as multipliers of the base rate."""

import math
from collections.abc import Callable


def warmup_cosine(warmup: int, steps: int, floor: float = 0.02) -> Callable[[int], float]:
    """Linear warm-up over `warmup` steps, then a cosine down to `floor` at `steps`."""

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return multiplier


def trapezoid(warmup: int, steps: int, decay: float = 0.35) -> Callable[[int], float]:
    """Linear warm-up, a plateau, then a linear descent to zero over the last `decay` share of
    `steps`.
    """

    def multiplier(step: int) -> float:
        return max(min((step + 1) / warmup, 1.0, (steps - step) / max(decay * steps, 1)), 0.0)

    return multiplier
