"""Which method is fastest on this machine within a budget: time the rounds of each drafter, predict
how many of them each setting needs, and choose what to run for real.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Draft, Drafter, Scores
from tempera.decoding.timing import now
from tempera.decoding.verification import verify
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import Spread, time_rounds
from tempera.evaluation.pipeline import Method
from tempera.evaluation.round_laws import (
    LawRecorder,
    RoundLaws,
    TestedRule,
    count_rounds,
    predict_laws,
)
from tempera.metrics.table import BATCHES
from tempera.rules.standard import Exact
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class Budget:
    """How much divergence or quality a setting may cost.

    Attributes:
        measure: `none` (lossless settings only), `kl` (the metric `kl_per_token`, nats), `tv` (the
            metric `tv_bound`, summed over an image) or `clip` (the loss of CLIP score against plain
            autoregression on the same prompts and seeds: the upper end of its 95% interval).
        limit: the largest value allowed.
    """

    measure: Literal["none", "kl", "tv", "clip"]
    limit: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From `none`, `kl:X`, `tv:X` or `clip:X`.

        Raises:
            TemperaError: it is none of these, or X is not a number above 0.
        """
        measure, _, number = text.partition(":")
        try:
            limit = float(number or 0)
        except ValueError:
            limit = math.nan
        if text == "none":
            return cls("none")
        if measure in ("kl", "tv", "clip") and 0 < limit < math.inf:
            return cls(measure, limit)  # type: ignore[arg-type]
        raise TemperaError(
            f"budget={text} is not a budget: give none (lossless), or kl:, tv: or clip: with a "
            "number above 0, as in budget=kl:0.05",
            option="budget",
        )

    def admits(self, lossless: bool, kl: float, tv: float, clip: float) -> bool:
        """Whether a setting with these costs is within the budget; a lossless one always is."""
        costs = {"none": math.inf, "kl": kl, "tv": tv, "clip": clip}
        return lossless or costs[self.measure] <= self.limit


@dataclass(frozen=True)
class Candidate:
    """A setting that may be the fastest.

    Attributes:
        options: its name, as on the command line.
        draft: name of its draft.
        shape: name of its drafter.
        tested: its rule; None for the exact rule on a tree.
    """

    options: tuple[str, ...]
    draft: str
    shape: str
    tested: TestedRule | None = None

    @property
    def lossless(self) -> bool:
        """Whether its images follow the target's law."""
        return self.tested is None or self.tested.lossless


@dataclass(frozen=True)
class Prediction:
    """What a setting is expected to do.

    Attributes:
        options: see `Candidate`.
        lossless: see `Candidate`.
        speedup: over plain autoregression, at the batch size of the plan.
        tokens: tokens per second, over all images of a batch.
        round: milliseconds of a round.
        accepted_length, kl_per_token, tv_bound: as the metrics of these names.
    """

    options: tuple[str, ...]
    lossless: bool
    speedup: float
    tokens: float
    round: float
    accepted_length: float
    kl_per_token: float = 0.0
    tv_bound: float = 0.0

    def within(self, budget: Budget) -> bool:
        """Whether it is within the budget, as far as is known: CLIP scores are not predicted."""
        return budget.admits(self.lossless, self.kl_per_token, self.tv_bound, -math.inf)


@dataclass(frozen=True)
class Trial:
    """What a setting did in a real run.

    Attributes:
        prediction: what was expected of it.
        speedup: measured, at the batch size of the plan.
        kl_per_token, tv_bound: as the metrics of these names.
        clip_loss: the upper end of the 95% interval of the loss of CLIP score against plain
            autoregression; infinite if it was not measured.
    """

    prediction: Prediction
    speedup: float
    kl_per_token: float
    tv_bound: float
    clip_loss: float = math.inf

    def within(self, budget: Budget) -> bool:
        """Whether what was measured is within the budget."""
        lossless = self.prediction.lossless
        return budget.admits(lossless, self.kl_per_token, self.tv_bound, self.clip_loss)


@dataclass(frozen=True)
class TuningPlan:
    """How settings are measured.

    Args:
        batch_size: images decoded at once, for which the fastest setting is wanted.
        repeats: timings of each round.
        seed: of the decodes.
    """

    batch_size: int = 1
    repeats: Annotated[int, Field(ge=1)] = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size not in (1, *BATCHES):
            raise TemperaError(
                f"batch_size={self.batch_size} cannot be tuned for, since evaluations do not time "
                f"it: give 1, {', '.join(map(str, BATCHES))}",
                option="batch_size",
            )


def predict(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
    plain: tuple[str, ...],
    progress: Callable[[str], None] = lambda part: None,
) -> list[Prediction]:
    """Predict all candidates and plain autoregression, fastest first.

    Args:
        target: the model, on its device, made fast for decoding.
        drafters: by the name of their shape.
        candidates: their shapes are those of the drafters.
        prompts: decoded token by token to test the drafts.
        plan: what to measure.
        plain: options of plain autoregression.
        progress: called with the name of each part before it is measured.
    """
    if not prompts:
        raise TemperaError("there are no prompts to measure drafts with: give limit= at least 1.")
    progress("rounds")
    texts = [prompts[row % len(prompts)].text for row in range(plan.batch_size)]
    timed: dict[str, Drafter] = {"": NoDraft(), **drafters}
    methods = {name: Method(drafter, Exact()) for name, drafter in timed.items()}
    with target.encoded(texts):
        paces = time_rounds(target, methods, texts, plan.repeats)
    ar = paces[""].round.median
    alone = paces[""].beginning.median + target.length * ar
    tokens = 1000 * plan.batch_size * target.length / alone
    found = [Prediction(plain, True, 1.0, tokens, ar, 1.0)]
    for one, law, extra in _laws(target, drafters, candidates, prompts, plan, progress):
        pace = paces[one.shape]
        cost = pace.round.median + extra
        speedup = alone / (pace.beginning.median + law.median_rounds(plan.batch_size) * cost)
        measures = law.accepted_length, law.kl_per_token, law.tv_bound
        found.append(
            Prediction(one.options, one.lossless, speedup, speedup * tokens, cost, *measures)
        )
    return sorted(found, key=lambda one: -one.speedup)


def _laws(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
    progress: Callable[[str], None],
) -> Iterator[tuple[Candidate, RoundLaws, float]]:
    """Each candidate with the law of its rounds, and by how many milliseconds its verification
    takes longer than that of the exact rule, which `time_rounds` measured. Rules of one type take
    equally long.
    """
    on_chains = [(one, one.tested) for one in candidates if one.tested is not None]
    for draft in dict.fromkeys(one.draft for one, _ in on_chains):
        progress(f"chains, draft {draft}")
        own = [(one, tested) for one, tested in on_chains if one.draft == draft]
        deepest = max((drafters[one.shape] for one, _ in own), key=lambda drafter: drafter.depth)
        recorder = LawRecorder(deepest, list(dict.fromkeys(tested for _, tested in own)))
        outcomes = predict_laws(target, recorder, prompts, plan.seed, target.device)
        extra: dict[tuple[type, int], float] = {}
        for one, tested in own:
            depth = drafters[one.shape].depth
            key = type(tested.rule), depth
            if key not in extra:
                extra[key] = _surplus(tested, depth, *recorder.latest, plan)
            yield one, RoundLaws.predicted(outcomes[tested], depth), extra[key]
    on_trees = [one for one in candidates if one.tested is None]
    for shape in dict.fromkeys(one.shape for one in on_trees):
        progress(shape)
        law = count_rounds(target, drafters[shape], prompts, plan.seed, target.device)
        yield from ((one, law, 0.0) for one in on_trees if one.shape == shape)


def _surplus(tested: TestedRule, depth: int, draft: Draft, p: Tensor, plan: TuningPlan) -> float:
    """Median milliseconds of verifying a batch of drafts, less those of the exact rule."""
    if isinstance(tested.rule, Exact):
        return 0.0
    rows = torch.arange(plan.batch_size, device=p.device) % len(p)
    draft, p = TestedRule(tested.rule, True, depth).seen(draft, p)
    draft, p = Draft(draft.tokens[rows], draft.q[rows], draft.tree), p[rows]
    uniforms = torch.full((len(rows), 1 + draft.tree.nodes), 0.5, device=p.device)

    def milliseconds(rule: Any) -> float:
        seconds = []
        for _ in range(1 + plan.repeats):
            start = now(p.device)
            verify(draft, Scores(p, p), rule, uniforms)
            seconds.append(now(p.device) - start)
        return Spread.of(seconds[1:]).median

    return milliseconds(tested.rule) - milliseconds(Exact())


def try_out(
    predictions: Sequence[Prediction],
    budget: Budget,
    runs: int,
    run: Callable[[Prediction], Trial],
) -> list[Trial]:
    """Run the most promising settings, and the fastest lossless one if none of them is within the
    budget.

    Args:
        predictions: fastest first.
        budget: what a setting may cost.
        runs: how many to run, at least 1.
        run: makes a real run.
    """
    admitted = [one for one in predictions if one.within(budget)]
    if budget.measure == "clip":
        done = _bisected(front(admitted), budget, runs, run)
    else:
        done = [run(one) for one in admitted[:runs]]
    if not any(outcome.within(budget) for outcome in done):
        done.append(run(next(one for one in admitted if one.lossless)))
    return done


def front(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predictions that no other beats in both speed-up and KL bound, slowest first."""
    kept: list[Prediction] = []
    for one in sorted(predictions, key=lambda one: (-one.speedup, one.kl_per_token)):
        if not kept or one.kl_per_token < kept[-1].kl_per_token:
            kept.append(one)
    return kept[::-1]


def _bisected(
    ordered: Sequence[Prediction], budget: Budget, runs: int, run: Callable[[Prediction], Trial]
) -> list[Trial]:
    """Look for the fastest setting of a front that is within the budget; the first, slowest one is
    lossless.
    """
    done: list[Trial] = []
    low, high = 0, len(ordered)
    while high - low > 1 and len(done) < runs:
        middle = (low + high) // 2
        done.append(run(ordered[middle]))
        low, high = (middle, high) if done[-1].within(budget) else (low, middle)
    return done


def fastest(outcomes: Sequence[Trial], budget: Budget) -> Trial:
    """The fastest of the outcomes that are within the budget, of which there is at least one."""
    return max(
        (outcome for outcome in outcomes if outcome.within(budget)),
        key=lambda outcome: outcome.speedup,
    )
