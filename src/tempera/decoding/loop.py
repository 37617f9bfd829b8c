"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.diagnostics import certainty, diagnose, proximity
from tempera.decoding.interfaces import Draft, Drafter, JointRule, Rule, Scores, Target, Verdict
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trace import Trace, origins, places
from tempera.decoding.trees import take
from tempera.decoding.verification import verify
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Output:
    """Finished images: tokens int64 [B, T] with T = `target.length`, and their trace."""

    tokens: Tensor
    trace: Trace


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule | JointRule,
    streams: RandomStreams,
    prompts: list[str],
    *,
    diagnostics: bool = False,
    observe: Callable[["Images", Draft, Verdict], None] | None = None,
) -> Output:
    """Generate one image per prompt: Cool-SD, Algorithm 1, until every image is complete.

    Args:
        target: the model to accelerate.
        drafter: proposes tokens; `drafters.none.NoDraft` for plain autoregression.
        rule: the acceptance rule.
        streams: one stream of uniform draws per prompt, in the prompts' order.
        prompts: texts, B of them.
        diagnostics: also record TV(p, q) and the terms of the bounds on TV and KL (costs passes
            over the vocabulary; see `tempera.decoding.diagnostics.diagnose`).
        observe: called after each round, for progress and replays.

    Raises:
        TemperaError: the target or the draft gave NaN, or prompts and streams differ in number.
    """
    streams.check(prompts)
    target.begin(prompts, drafter.nodes)
    drafter.begin(prompts)
    images = Images(streams, target.length, drafter.depth, rule if diagnostics else None)
    while not images.complete:
        drawn = drafter.uniforms
        u = streams.next(drawn + drafter.nodes + 1)
        draft = drafter.propose(u[:, :drawn])  # 1-2: x̃ ~ q
        scores = target.score(draft)  # 3-4: p after the root and every node
        verdict = verify(draft, scores, rule, u[:, drawn:])  # 5-16: accept, or resample
        emitted = images.append(draft, verdict, scores)  # 17: accepted tokens and one more
        target.commit(draft, verdict, emitted)
        drafter.observe(draft, verdict, scores, emitted)
        target.longest = images.read()  # the round's only host read
        if observe is not None:
            observe(images, draft, verdict)
    return images.output()


class Images:
    """The images of a batch as far as they are decoded.

    Args:
        streams: name the B prompts, and the device.
        length: T, tokens of an image.
        depth: L, depth of drafts.
        diagnosed: the rule whose diagnostics are recorded, if any.

    Attributes:
        tokens: int64 [B, T + 1 + L]; the last 1 + L columns are for tokens past the image.
        lengths: tokens that each row has, int64 [B].
        emitted: tokens that each row got in the last round, int64 [B].
        rounds: number of rounds so far.
        written: tokens so far over all rows, on the host.
        complete: whether all images are.
    """

    def __init__(
        self,
        streams: RandomStreams,
        length: int,
        depth: int,
        diagnosed: Rule | JointRule | None = None,
    ) -> None:
        self.ids, self.length, self.depth, self.diagnosed = streams.ids, length, depth, diagnosed
        shape, device = (len(self.ids), length + 1 + depth), streams.device
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.emitted = self.lengths
        self.rounds = self.written = 0
        self.complete = not length
        self._shape = shape
        self._columns: dict[str, Tensor] = {}
        self._has_nan = torch.zeros(2, shape[0], dtype=torch.bool, device=device)

    def append(self, draft: Draft, verdict: Verdict, scores: Scores) -> Tensor:
        """Add a round; returns how many tokens each row emits, see `Target.commit`."""
        self.emitted = torch.minimum(verdict.accepted + 1, self.length - self.lengths)
        ahead = torch.arange(verdict.tokens.shape[1], device=self.lengths.device)
        slots = self.lengths.unsqueeze(1) + ahead  # later rounds overwrite what is not emitted
        self.tokens.scatter_(1, slots, verdict.tokens)
        for name, values in self._recorded(draft, verdict, scores).items():
            if name not in self._columns:
                self._columns[name] = values.new_zeros(self._shape)
            self._columns[name].scatter_(1, slots, values)
        self.lengths += self.emitted
        self._has_nan = torch.stack([scores.has_nan, draft.has_nan]) & (self.emitted > 0)
        return self.emitted

    def read(self) -> int:
        """Read from the device how far the images are; returns the tokens of the longest row.

        Raises:
            TemperaError: the target or the draft gave NaN for a row that was not complete.
        """
        lengths, *has_nan = torch.cat([self.lengths[None], self._has_nan]).tolist()
        for who, rows in zip(("target", "draft"), has_nan, strict=True):
            if 1 in rows:
                raise TemperaError(
                    f"the {who} gave NaN probabilities for prompt '{self.ids[rows.index(1)]}'; "
                    "check its weights, and try float32"
                )
        self.rounds, self.written = self.rounds + 1, sum(lengths)
        self.complete = self.written == self.length * len(lengths)
        return int(max(lengths))

    def output(self) -> Output:
        """The complete images and their trace."""
        columns = {name: column[:, : self.length] for name, column in self._columns.items()}
        place = places(columns["origin"])
        trace = Trace(max_depth=self.depth, place=place, **columns)
        return Output(self.tokens[:, : self.length], trace)

    def _recorded(self, draft: Draft, verdict: Verdict, scores: Scores) -> dict[str, Tensor]:
        """Columns of `Trace` for a round's tokens, [B, L + 1] each; those past the drawn token are
        undefined.
        """
        p, visited = scores.p, verdict.visited
        flat = visited * p.shape[-1] + verdict.tokens
        columns = {
            "origin": origins(draft.tree, verdict),
            "logprob": p.flatten(1).gather(1, flat).log(),
        }
        if self.diagnosed is not None:
            rule, soft = self.diagnosed, scores.soft
            columns |= zip(
                ("tv", "bound", "kl"), diagnose(draft, verdict, p, rule, soft), strict=True
            )
            names = "top1", "top10", "entropy", "collision"
            columns |= zip(names, certainty(take(p, visited)), strict=True)
            columns["proximity"] = proximity(draft, verdict, p if soft is None else soft, rule)
        return columns
