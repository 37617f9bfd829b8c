"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Drafter, JointRule, Rule, Scores, Target
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import PartTimer, no_clock
from tempera.decoding.trace import Trace
from tempera.decoding.verification import verify
from tempera.errors import NaNProbabilities, TemperaError


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
    clock: PartTimer = no_clock,
    progress: Callable[[int, int], None] | None = None,
) -> Output:
    """Generate one image per prompt (Cool-SD, Algorithm 1, repeated until every image is complete).

    Args:
        target: the model to accelerate.
        drafter: proposes tokens; `drafters.none.NoDraft` for plain autoregression.
        rule: the acceptance rule.
        streams: one stream of uniform draws per prompt, in the prompts' order.
        prompts: texts, B of them.
        diagnostics: also record TV(p, q) and the terms of the bounds on TV and KL (costs passes
            over the vocabulary; see `tempera.decoding.diagnostics.diagnose`).
        clock: times the parts draft, target, verify and commit.
        progress: called after each round with (rounds so far, tokens so far over all rows).

    Raises:
        NaNProbabilities: the target or the draft gave NaN.
        TemperaError: prompts and streams differ in number.
    """
    _check(prompts, streams)
    target.begin(prompts, drafter.nodes)
    drafter.begin(prompts)
    device, length = streams.device, target.length
    offsets = torch.arange(drafter.depth + 1, device=device)
    # the last column is for tokens past the image
    tokens = torch.zeros(len(prompts), length + 1, dtype=torch.int64, device=device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    trace = Trace.blank(len(prompts), length, drafter.depth, device, diagnostics)
    rounds, written = 0, 0
    while written < len(prompts) * length:
        uniforms = streams.next(drafter.uniforms + drafter.nodes + 1)
        with clock("draft"):
            draft = drafter.propose(uniforms[:, : drafter.uniforms])
        with clock("target"):
            scores = target.score(draft)
        with clock("verify"):
            verdict = verify(draft, scores.p, rule, uniforms[:, drafter.uniforms :], scores.soft)
        with clock("commit"):
            emitted = torch.minimum(verdict.accepted + 1, length - lengths)
            ahead = offsets[: verdict.tokens.shape[1]]
            slots = torch.where(ahead < emitted.unsqueeze(1), lengths.unsqueeze(1) + ahead, length)
            tokens.scatter_(1, slots, verdict.tokens)
            trace.record(draft, verdict, scores, rule, slots)
            target.commit(draft, verdict, emitted)
            drafter.observe(draft, verdict, scores, emitted)
            lengths += emitted
            rounds, written = rounds + 1, _written(draft, scores, emitted, lengths, streams.ids)
        if progress is not None:
            progress(rounds, written)
    return Output(tokens[:, :length], trace.finished())


def _check(prompts: list[str], streams: RandomStreams) -> None:
    """Raise TemperaError unless every prompt has its stream."""
    if len(prompts) != len(streams.ids):
        raise TemperaError(
            f"there are {len(prompts)} prompts but {len(streams.ids)} random streams; give one "
            "prompt id per prompt"
        )


def _written(draft: Draft, scores: Scores, emitted: Tensor, lengths: Tensor, ids: list[str]) -> int:
    """Tokens written so far over all rows: the round's one host read, which carries the check for
    NaN as well (as -1).
    """
    sick = (
        scores.p[..., 0].isnan().any(-1)
    )  # `probabilities`: a NaN makes the whole distribution NaN
    if draft.tree.nodes:
        sick = sick | draft.sick
    sick = sick & (emitted > 0)
    written = int(torch.where(sick.any(), -1, lengths.sum()))
    if written < 0:
        who = "target" if scores.p[..., 0].isnan().any() else "draft"
        prompt = ids[int(sick.int().argmax())]
        raise NaNProbabilities(who, prompt)
    return written
