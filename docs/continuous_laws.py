"""How far the law of each method for continuous tokens is from the law that it claims
(docs/methods.md): `python docs/continuous_laws.py [ROWS]`.
"""

import sys

from tempera.continuous.rules import CSpD, CSpDReferenceCode, DensityRule, PathCoupling
from tempera.exactness.gaussians import Linear, ToyHead, Wavy, check

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
    "cspd_published": CSpDReferenceCode(),
    "cspd_published exponent_temperature=1": CSpDReferenceCode(exponent_temperature=1.0),
    "the draft alone": None,
}


def table(rows: int = 200_000) -> str:
    """Kolmogorov-Smirnov distances, rules against heads, over `rows` images each."""
    lines = ["| | " + " | ".join(HEADS) + " |", "|---" * (1 + len(HEADS)) + "|"]
    for name, rule in RULES.items():
        cells = []
        for head, silent, length in HEADS.values():
            published = isinstance(rule, CSpDReferenceCode)
            if published and length == 1:
                cells.append("–")  # the target draws the first token alone
                continue
            draft = head.imitation(0.25) if rule is None else None
            law = silent if published else head
            found = check(rule, law, draft=draft, length=length, rows=rows)
            cells.append(f"{found.distance:.3f}" + (" (exact)" if found.agrees else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nEach ± {found.margin:.3f} (95 %), {rows} images."


if __name__ == "__main__":
    print(table(*map(int, sys.argv[1:])))
