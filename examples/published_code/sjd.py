"""SJD++'s token reuse as published, beside the exact one in `tempera.drafters.jacobi.reused`."""

from dataclasses import replace
from functools import partial

from tempera.decoding.interfaces import ImageTarget, drafts
from tempera.drafters.jacobi import Guesses, Jacobi, Stale, reuse_above, reused
from tempera.drafters.jacobi_window import Initialisation, Window


def published(stale: Stale, threshold: float) -> Guesses:
    """Guesses that are kept for their value are labelled q, although they are no draws from it: the
    law is not the target's (docs/jacobi.md).
    """
    return Guesses(reused(stale, threshold).tokens, stale.q)


@drafts(lambda window, **_: window)
def sjd(
    target: ImageTarget,
    window: int = 32,
    initialisation: Initialisation = "random",
    reuse: float = 0.5,
) -> Jacobi:
    """The drafter; for the arguments see `tempera.drafters.jacobi.sjd`. The paper's τ is not known
    to us.

    Raises:
        TemperaError: the window does not fit into the image.
    """
    redraft = replace(reuse_above(reuse), draw=partial(published, threshold=reuse))
    return Jacobi(target, Window(window), redraft, initialisation)
