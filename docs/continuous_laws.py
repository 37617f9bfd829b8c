"""How far the law of each method for continuous tokens is from the law that it claims
(docs/results/continuous.md): `PYTHONPATH=examples python docs/continuous_laws.py [ROWS]`.
"""

import sys
from typing import Any

from published_code.cspd import CSpDReferenceCode

from tempera.continuous.rules import CSpD, DensityRule, PathCoupling
from tempera.exactness.gaussians import Linear, SampleComparison, Toy, ToyHead, Wavy, check, compare
from tempera.exactness.tables import new_streams

HEADS: dict[str, tuple[ToyHead, ToyHead, int]] = {
    "1-D normal": (Linear(1, 1), Linear(1, 1), 3),
    "2-D normal": (Linear(1, 2), Linear(1, 2), 3),
    "3 stages, 1-D": (Linear(3, 1), Linear(3, 1, last_noise=False), 3),
    "3 stages, 2-D": (Linear(3, 2), Linear(3, 2, last_noise=False), 3),
    "3 stages, nonlinear": (Wavy(), Wavy(), 1),
}
"""A head, the same without noise in the last stage, as the public code's sampler, and the tokens of
an image.
"""
RULES: dict[str, DensityRule | None] = {
    "cspd_exact": PathCoupling(),
    "cspd": CSpD(),
    "cspd alignment=false": CSpD(alignment=False),
    "the draft alone": None,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "cspd_published": {},
    "cspd_published exponent_temperature=1": {"exponent_temperature": 1.0},
}
"""Options of the public code's method."""


def published(head: ToyHead, length: int, rows: int, **options: Any) -> SampleComparison | None:
    """Of the public code; None for an image of one token, which the target draws alone."""
    if length == 1:
        return None
    target, drafter = Toy(head, length), Toy(head.imitation(0.25), length)
    streams = new_streams(rows, 0)
    method = CSpDReferenceCode(drafter, gamma=2, prefill=0.0, **options)
    output = method.decode(target, streams, streams.ids)
    return compare(target.whiten(output), output)


def line(name: str, found: list[SampleComparison | None]) -> str:
    """A row of the table."""
    cells = ["–" if one is None else f"{one.distance:.3f}" for one in found]
    exact = [" (exact)" if one is not None and one.agrees else "" for one in found]
    return f"| {name} | " + " | ".join(map("".join, zip(cells, exact, strict=True))) + " |"


def table(rows: int = 200_000) -> str:
    """Kolmogorov-Smirnov distances, methods against heads, over `rows` images each."""
    lines = ["| | " + " | ".join(HEADS) + " |", "|---" * (1 + len(HEADS)) + "|"]
    for name, rule in RULES.items():
        found: list[SampleComparison | None] = []
        for head, _, length in HEADS.values():
            draft = head.imitation(0.25) if rule is None else None
            law = check(rule, head, draft=draft, length=length, rows=rows)
            found.append(law)
        lines.append(line(name, found))
    for name, options in PUBLISHED.items():
        heads = HEADS.values()
        lines.append(line(name, [published(silent, t, rows, **options) for _, silent, t in heads]))
    return "\n".join(lines) + f"\n\nEach ± {law.margin:.3f} (95 %), {rows} images."


if __name__ == "__main__":
    print(table(*map(int, sys.argv[1:])))
