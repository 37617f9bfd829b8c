"""SJD-PAC's Figure 2: what does one changed token do to the picture?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from tempera.decoding.interfaces import Draft, Round, Scores, Verdict
from tempera.decoding.loop import Output
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method


@dataclass(frozen=True)
class Changing(Method):
    """Plain autoregression in which one token is drawn uniformly instead of from the target. All
    others are drawn from the target with the same random numbers as without the change, so that
    two pictures are the same up to this token.

    Args:
        changed: the place of the token, as a share of the image; 1 changes none.

    Raises:
        TemperaError: the method drafts tokens.
    """

    changed: Annotated[float, Field(ge=0, le=1)]

    def __post_init__(self) -> None:
        if not self.is_plain:
            raise TemperaError(
                "changed= changes a token of plain autoregression: give method=ar", option="method"
            )

    def rounds(self, target: Any, *batch: Any, **options: Any) -> Iterator[Round]:
        """See `Method.rounds`."""
        return super().rounds(self._changed(target), *batch, **options)

    def decode(self, target: Any, *batch: Any, **options: Any) -> Output:
        """See `Method.decode`."""
        return super().decode(self._changed(target), *batch, **options)

    def _changed(self, target: Any) -> "_Uniform":
        return _Uniform(target, int(self.changed * target.length))


class _Uniform:
    """A target that gives every free token of one place the same probability. In plain
    autoregression a round emits one token of every image.
    """

    compiled = False  # rounds differ

    def __init__(self, target: Any, place: int) -> None:
        self._target = target
        self._place = place
        self._round = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None) -> None:
        """See `Target`. All rows finish in one round, so all begin together."""
        self._round = 0
        self._target.begin(prompts, nodes, rows)

    def score(self, draft: Draft, longest: int) -> Scores:
        """See `Target`."""
        scores: Scores = self._target.score(draft, longest)
        if self._round != self._place:
            return scores
        p = scores.p
        even = torch.ones_like(p)
        forced = self._target.head.forced  # such as the end of a line
        if forced is not None:
            even[..., forced[forced >= 0]] = 0
        even /= even.sum(-1, keepdim=True)
        return replace(scores, p=torch.where(p.amax(-1, keepdim=True) < 1, even, p))

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """See `Target`."""
        self._round += 1
        self._target.commit(draft, verdict, emitted)
