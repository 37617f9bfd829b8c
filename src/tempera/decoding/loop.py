"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.compiled import begin_step, compiled, plain
from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, Drafter, JointRule, Rule, Scores, Target, Verdict
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trace import DIAGNOSED, RECORDED, Trace, places, recorded
from tempera.decoding.verification import verify


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
    observe: Callable[[Images, Draft, Verdict], None] | None = None,
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
    diagnosed = rule if diagnostics else None
    columns = DIAGNOSED if diagnostics else RECORDED
    images = Images(streams.ids, target.length, drafter.depth, streams.device, columns)
    target.begin(prompts, drafter.nodes)
    drafter.begin(prompts, images)
    while not images.complete:
        drawn = drafter.uniforms
        u = streams.next(drawn + drafter.nodes + 1)
        # the first round runs as it is written, and computes what later ones find
        run = compiled if target.compiled and images.rounds else plain
        longest = target.length if target.compiled else images.longest
        if run is compiled:
            begin_step()
        draft = run(_propose, drafter, images, u[:, :drawn])
        judged = run(_judge, target, rule, draft, longest, u[:, drawn:], diagnosed)
        # 17: the accepted tokens and one more
        images.append(judged.verdict.tokens, judged.counts, judged.record, judged.broken)
        run(_settle, target, drafter, images, draft, judged)
        images.read()  # the round's only host read
        if observe is not None:
            observe(images, draft, judged.verdict)
    columns_of_tokens = images.columns()
    place = places(columns_of_tokens["origin"])
    trace = Trace(max_depth=drafter.depth, place=place, **columns_of_tokens)
    return Output(images.tokens[:, : target.length], trace)


@dataclass(frozen=True)
class _Judged:
    """What a round comes to.

    Attributes:
        scores: the target's.
        verdict: of the rule.
        counts: tokens of each row, the drawn one included, int64 [B].
        record: what is recorded of the tokens.
        broken: in which rows target and draft gave NaN.
    """

    scores: Scores
    verdict: Verdict
    counts: Tensor
    record: dict[str, Tensor]
    broken: dict[str, Tensor]


def _propose(drafter: Drafter, images: Images, uniforms: Tensor) -> Draft:
    """Lines 1-2: x̃ ~ q."""
    return drafter.propose(images, uniforms)


def _judge(
    target: Target,
    rule: Rule | JointRule,
    draft: Draft,
    longest: int,
    uniforms: Tensor,
    diagnosed: Rule | JointRule | None,
) -> _Judged:
    """Lines 3-16."""
    scores = target.score(draft, longest)  # 3-4: p after the root and every node
    verdict = verify(draft, scores, rule, uniforms)  # 5-16: accept, or resample
    record = recorded(draft, verdict, scores, diagnosed)
    broken = {"target": scores.has_nan, "draft": draft.has_nan}
    return _Judged(scores, verdict, verdict.accepted + 1, record, broken)


def _settle(
    target: Target, drafter: Drafter, images: Images, draft: Draft, judged: _Judged
) -> None:
    """Keep what was emitted, for the next round."""
    target.commit(draft, judged.verdict, images.emitted)
    drafter.observe(images, draft, judged.verdict, judged.scores)
