"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, Drafter, JointRule, Rule, Target, Verdict
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
        draft = drafter.propose(images, u[:, :drawn])  # 1-2: x̃ ~ q
        scores = target.score(draft, images.longest)  # 3-4: p after the root and every node
        verdict = verify(draft, scores, rule, u[:, drawn:])  # 5-16: accept, or resample
        record = recorded(draft, verdict, scores, diagnosed)
        broken = {"target": scores.has_nan, "draft": draft.has_nan}
        # 17: the accepted tokens and one more
        emitted = images.append(verdict.tokens, verdict.accepted + 1, record, broken)
        target.commit(draft, verdict, emitted)
        drafter.observe(images, draft, verdict, scores)
        images.read()  # the round's only host read
        if observe is not None:
            observe(images, draft, verdict)
    columns_of_tokens = images.columns()
    place = places(columns_of_tokens["origin"])
    trace = Trace(max_depth=drafter.depth, place=place, **columns_of_tokens)
    return Output(images.tokens[:, : target.length], trace)
