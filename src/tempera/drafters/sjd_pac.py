"""SJD-PAC: proactive drafting and adaptive continuation on speculative Jacobi decoding."""

from tempera.drafters.jacobi import Continue, Jacobi, Redraw
from tempera.drafters.windows import Branching, Canvas, Initialisation, Shape


def sjd_pac(
    target: Canvas,
    window: int = 64,
    initialisation: Initialisation = "random",
    branches: int = 4,
    levels: int = 3,
    proactive: bool = True,
    continuation: bool = True,
    branching: Branching = "ranked",
) -> Jacobi:
    """SJD-PAC's drafter; with both parts off it is SJD.

    *Proactive drafting*: the first D = `levels` positions after the token that was resampled have K = `branches` candidates each, drawn
    without replacement from the stale distributions; they form a tree, whose first path goes on as a chain. The tree stands in every round:
    the last emitted token is always one that was just drawn (from a residual or, after a window that was kept whole, from the target), and
    that no guess below it has seen. The candidates of a level are the same ones under every parent, as their stale distribution is, and
    tree and chain share the window; `windows.Shape.proactive` says how. After a walk that left the first path, the stale distributions are
    read along the path that it took as far as this goes, then along the first path.

    *Adaptive continuation*: see `jacobi.Continue`. With both, the first candidate of a level is the continued guess, whose law is the stale
    distribution as well, and the others are drawn without it, so that together they are still drawn without replacement.

    Both are exact as published (`jacobi` says why; Theorems 1 and 2 of the paper argue for a single position).

    Raises:
        TemperaError: the tree does not fit into the window, or the window not into the image.
    """
    shape = Shape.proactive(window, branches, levels, branching) if proactive else Shape.chain(window)
    return Jacobi(target, shape, Continue() if continuation else Redraw(), initialisation)
