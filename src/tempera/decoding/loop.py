"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.

`rounds` yields every round; whoever wants to see one looks at it. `decode` keeps the tokens and
their trace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding import verification
from tempera.decoding.compiled import Run, begin_step, compiled, plain
from tempera.decoding.diagnostics import Diagnosed
from tempera.decoding.images import Images
from tempera.decoding.interfaces import Drafter, Round, Rule, Target, Watcher
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trace import Recorded, Trace


@dataclass(frozen=True)
class Output:
    """Finished images: tokens int64 [B, T] with T = `target.length`, and their trace."""

    tokens: Tensor
    trace: Trace


@torch.no_grad()
def rounds(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    streams: RandomStreams,
    prompts: Sequence[str],
    run: Run | None = None,
) -> Iterator[Round]:
    """Generate one image per prompt: Cool-SD, Algorithm 1, until every image is complete.

    Args:
        target: the model to accelerate.
        drafter: proposes tokens; `drafters.none.NoDraft` for plain autoregression.
        rule: the acceptance rule.
        streams: one stream of uniform draws per prompt, in the prompts' order.
        prompts: texts, B of them.
        run: how the parts of a round are called; by default compiled if the target is, but for the
            two of a drafter that works on the host (`Drafter.compiles`).

    Yields:
        each round, which is valid until the next one is asked for.

    Raises:
        TemperaError: the target or the draft gave NaN, or prompts and streams differ in number.
    """
    streams.check(prompts)
    run = run or (compiled if target.compiled else plain)
    own = plain if run is compiled and not drafter.compiles else run
    propose = own(drafter.propose, "draft")
    score = run(target.score, "target")
    verify = run(verification.verify, "verify")
    commit = run(target.commit, "commit")
    observe = own(drafter.observe, "commit")
    images = Images(streams.ids, target.length, drafter.depth, streams.device)
    if drafter.tree is not None:
        drafter.tree = drafter.tree.to(images.device)
    target.begin(list(prompts), drafter.nodes)
    drafter.begin(list(prompts), images)
    while not images.complete:
        u = streams.next(drafter.uniforms + drafter.nodes + 1)
        u_draft, u_tests = u.tensor_split([drafter.uniforms], dim=1)
        longest = target.length if target.compiled else images.longest
        if run is compiled:
            begin_step()
        draft = propose(images, u_draft)  # 1-2: x̃ ~ q
        scores = score(draft, longest)  # 3-4: p after the root and every node
        verdict = verify(draft, scores, rule, images, u_tests)  # 5-16: accept, or resample
        images.append(verdict.tokens, verdict.accepted + 1, verdict.broken)  # 17
        commit(draft, verdict, images.emitted)
        observe(images, draft, verdict, scores)
        yield Round(images, draft, scores, verdict)


def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    streams: RandomStreams,
    prompts: Sequence[str],
    *,
    diagnostics: bool = False,
    watch: Sequence[Watcher] = (),
    run: Run | None = None,
) -> Output:
    """Generate one image per prompt, as `rounds` does.

    Args:
        target, drafter, rule, streams, prompts, run: see `rounds`.
        diagnostics: also record TV(p, q) and the terms of the bounds on TV and KL (costs passes
            over the vocabulary; see `tempera.decoding.diagnostics.diagnose`).
        watch: called with each round, for progress, replays and measurements.

    Raises:
        TemperaError: see `rounds`.
    """
    recorders: list[Recorded | Diagnosed] = [Recorded()]
    if diagnostics:
        recorders.append(Diagnosed(rule))
    watchers: list[Watcher] = [*recorders, *watch]
    for round in rounds(target, drafter, rule, streams, prompts, run):
        for watcher in watchers:
            watcher(round)
    columns = [recorder.columns.read(target.length) for recorder in recorders]
    trace = Trace.of(drafter.depth, columns)
    return Output(round.images.tokens[:, : target.length], trace)
