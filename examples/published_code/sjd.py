"""SJD++'s token reuse as published, beside the exact one in `tempera.drafters.jacobi.Reuse`."""

from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import ImageTarget, drafts
from tempera.drafters.jacobi import Guesses, Jacobi, Reuse
from tempera.drafters.jacobi_window import Initialisation, Window


class PublishedReuse(Reuse):
    """Guesses that are kept for their value are labelled q, although they are no draws from it: the
    law is not the target's (docs/jacobi.md).
    """

    @override
    def label(self, q: Tensor, last: Guesses, places: Tensor) -> Tensor:
        return q


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
    return Jacobi(target, Window(window), PublishedReuse(reuse), initialisation)
