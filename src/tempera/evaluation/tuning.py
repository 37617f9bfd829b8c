"""Which method is fastest on this machine within a budget: time the rounds of each drafter, predict
how many of them each setting needs, and choose what to run for real.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tempera.config.tuned import PLAIN
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
            "number above 0, as in budget=kl:0.05"
        )

    def admits(self, prediction: "Prediction") -> bool:
        """Whether the prediction is within the budget. No prediction of CLIP scores is possible, so
        `clip` admits every setting.
        """
        match self.measure:
            case "kl":
                return prediction.kl_per_token <= self.limit
            case "tv":
                return prediction.tv_bound <= self.limit
            case "clip":
                return True
        return prediction.lossless


@dataclass(frozen=True)
class Candidate:
    """A setting that may be the fastest.

    Attributes:
        options: of `conf/eval.yaml`, as on the command line.
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


@dataclass(frozen=True)
class TuningPlan:
    """How settings are measured.

    Args:
        batch_size: images decoded at once, for which the fastest setting is wanted.
        repeats: timings of each round.
        seed: of the decodes.
    """

    batch_size: int = 1
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size != 1 and self.batch_size not in BATCHES:
            raise TemperaError(
                f"batch_size={self.batch_size} cannot be tuned for, since evaluations do not time "
                f"it: give 1, {', '.join(map(str, BATCHES))}."
            )
        if self.repeats < 1:
            raise TemperaError(f"repeats={self.repeats} is too small: give at least 1.")


def predict(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
    progress: Callable[[str], None] = lambda part: None,
) -> list[Prediction]:
    """Predict all candidates and plain autoregression, fastest first.

    Args:
        target: the model, on its device, made fast for decoding.
        drafters: by the name of their shape.
        candidates: their shapes are those of the drafters.
        prompts: decoded token by token to test the drafts.
        plan: what to measure.
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
    plain = paces[""].beginning.median + target.length * ar
    tokens = 1000 * plan.batch_size * target.length / plain
    found = [Prediction(PLAIN, True, speedup=1.0, tokens=tokens, round=ar, accepted_length=1.0)]
    laws = _laws(target, drafters, candidates, prompts, plan, progress)
    for candidate in candidates:
        law, extra = laws[candidate]
        pace = paces[candidate.shape]
        cost = pace.round.median + extra
        took = pace.beginning.median + law.median_rounds(plan.batch_size) * cost
        speedup = plain / took
        found.append(
            Prediction(
                candidate.options,
                candidate.lossless,
                speedup=speedup,
                tokens=speedup * tokens,
                round=cost,
                accepted_length=law.accepted_length,
                kl_per_token=law.kl_per_token,
                tv_bound=law.tv_bound,
            )
        )
    return sorted(found, key=lambda one: -one.speedup)


def _laws(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
    progress: Callable[[str], None],
) -> dict[Candidate, tuple[RoundLaws, float]]:
    """For each candidate the law of its rounds, and by how many milliseconds its verification takes
    longer than the exact rule's.
    """
    found: dict[Candidate, tuple[RoundLaws, float]] = {}
    chains = [one for one in candidates if one.tested is not None]
    for draft in dict.fromkeys(one.draft for one in chains):
        progress(f"chains, draft {draft}")
        own = [one for one in chains if one.draft == draft]
        found |= _chain_laws(target, drafters, own, prompts, plan)
    trees = dict.fromkeys(one.shape for one in candidates if one.tested is None)
    for shape in trees:
        progress(shape)
        law = count_rounds(target, drafters[shape], prompts, plan.seed, target.device)
        found |= {one: (law, 0.0) for one in candidates if one.shape == shape}
    return found


def _chain_laws(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
) -> dict[Candidate, tuple[RoundLaws, float]]:
    """`_laws` of chains of one draft, whose deepest one is tested."""
    tested = {one: one.tested for one in candidates if one.tested is not None}
    chains = [drafters[one.shape] for one in candidates]
    deepest = max(chains, key=lambda drafter: drafter.depth)
    recorder = LawRecorder(deepest, list(dict.fromkeys(tested.values())))
    outcomes = predict_laws(target, recorder, prompts, plan.seed, target.device)
    extra = _surplus(candidates, drafters, recorder, plan)
    found = {}
    for one, rule in tested.items():
        depth = drafters[one.shape].depth
        law = RoundLaws.predicted(outcomes[rule], depth)
        found[one] = law, extra[type(rule.rule), depth]
    return found


def _surplus(
    candidates: Sequence[Candidate],
    drafters: Mapping[str, Drafter],
    recorder: LawRecorder,
    plan: TuningPlan,
) -> dict[tuple[type, int], float]:
    """Milliseconds by which verification takes longer than that of the exact rule, which
    `time_rounds` measured, by the type of the rule and the depth of the chain. Rules of one type
    take equally long.
    """
    found: dict[tuple[type, int], float] = {}
    for one in candidates:
        if one.tested is None:
            continue
        rule, depth = one.tested.rule, drafters[one.shape].depth
        if isinstance(rule, Exact):
            found[Exact, depth] = 0.0
        elif (type(rule), depth) not in found:
            ours, exact = (
                _verifying(TestedRule(tested, True, depth), *recorder.latest, plan)
                for tested in (rule, Exact())
            )
            found[type(rule), depth] = ours - exact
    return found


def _verifying(tested: TestedRule, draft: Draft, p: Tensor, plan: TuningPlan) -> float:
    """Median milliseconds of verifying the plan's number of drafts."""
    rows = torch.arange(plan.batch_size, device=p.device) % len(p)
    draft, p = tested.seen(draft, p)
    draft, p = Draft(draft.tokens[rows], draft.q[rows], draft.tree), p[rows]
    uniforms = torch.full((len(rows), 1 + draft.tree.nodes), 0.5, device=p.device)
    seconds = []
    for _ in range(1 + plan.repeats):
        start = now(p.device)
        verify(draft, Scores(p, p), tested.rule, uniforms)
        seconds.append(now(p.device) - start)
    return Spread.of(seconds[1:]).median


@dataclass(frozen=True)
class Trial:
    """What a setting did in a real run.

    Attributes:
        prediction: what was expected of it.
        speedup: measured, at the batch size of the plan.
        kl_per_token, tv_bound: as the metrics of these names.
        clip_loss: the upper end of the 95% interval of the loss of CLIP score against plain
            autoregression; None if it was not measured.
    """

    prediction: Prediction
    speedup: float
    kl_per_token: float
    tv_bound: float
    clip_loss: float | None = None

    def within(self, budget: Budget) -> bool:
        """Whether what was measured is within the budget; a lossless setting always is."""
        if self.prediction.lossless or budget.measure == "none":
            return self.prediction.lossless
        if budget.measure == "clip":
            return self.clip_loss is not None and self.clip_loss <= budget.limit
        return (self.kl_per_token if budget.measure == "kl" else self.tv_bound) <= budget.limit


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
    admitted = [one for one in predictions if budget.admits(one) or one.lossless]
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
