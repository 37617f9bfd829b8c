"""Which method is fastest on this machine within a budget: time the rounds of each drafter, predict
how many of them each setting needs, and choose what to run for real.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Drafter
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import time_rounds
from tempera.evaluation.pipeline import Method
from tempera.evaluation.round_laws import (
    AcceptNothing,
    RoundLaws,
    TestedRule,
    decoded,
    law_watcher,
    outcomes,
)
from tempera.rules.standard import Exact
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class Budget:
    """How much divergence or quality a setting may cost.

    Attributes:
        measure: `none` (lossless settings only), `kl` (the metric `kl_per_token`, nats) or `tv`
            (the metric `tv_bound`, summed over an image).
        limit: the largest value allowed.
    """

    measure: Literal["none", "kl", "tv"]
    limit: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From `none`, `kl:X` or `tv:X`.

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
        if measure in ("kl", "tv") and 0 < limit < math.inf:
            return cls(measure, limit)  # type: ignore[arg-type]
        raise TemperaError(
            f"budget={text} is not a budget: give none (lossless), or kl: or tv: with a number "
            "above 0, as in budget=kl:0.05",
            option="budget",
        )

    def admits(self, outcome: "Outcome") -> bool:
        """Whether a setting is within the budget; a lossless one always is."""
        costs = {"kl": outcome.kl_per_token, "tv": outcome.tv_bound}
        return outcome.lossless or costs.get(self.measure, math.inf) <= self.limit


@dataclass(frozen=True)
class Candidate:
    """A setting that may be the fastest.

    Attributes:
        options: what an evaluation of it is given, by name.
        draft: name of its draft.
        shape: name of its drafter.
        tested: its rule; None for the exact rule on a tree.
    """

    options: dict[str, Any]
    draft: str
    shape: str
    tested: TestedRule | None = None

    @property
    def lossless(self) -> bool:
        """Whether its images follow the target's law."""
        return self.tested is None or self.tested.rule.exact

    @property
    def rule(self) -> Any:
        """Its rule."""
        return Exact() if self.tested is None else self.tested.rule

    @property
    def pace(self) -> str:
        """Settings of the same name take equally long for a round: rules of one type."""
        return f"{self.shape}, {type(self.rule).__name__}"


@dataclass(frozen=True)
class Outcome:
    """What a setting is expected to do, or did in a real run.

    Attributes:
        options: see `Candidate`.
        lossless: see `Candidate`.
        speedup: over plain autoregression, at the batch size of the plan.
        tokens: predicted tokens per second, over all images of a batch.
        round: predicted milliseconds of a round.
        accepted_length, kl_per_token, tv_bound: as the metrics of these names.
    """

    options: dict[str, Any]
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
        batch_size: images decoded at once, for which the fastest setting is wanted; one that
            evaluations time.
        repeats: timings of each round.
        seed: of the decodes.
    """

    batch_size: Literal[1, 8, 32, 128, 256]
    repeats: Annotated[int, Field(ge=1)]
    seed: int


def predict(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    plan: TuningPlan,
    plain: dict[str, Any],
    progress: Callable[[str], None] = lambda part: None,
) -> list[Outcome]:
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
        raise TemperaError(
            "there are no prompts to measure drafts with: set data.limit= to at least 1."
        )
    progress("rounds")
    texts = [prompts[row % len(prompts)].text for row in range(plan.batch_size)]
    methods = {"": Method(NoDraft(), Exact())}
    for candidate in candidates:
        methods[candidate.pace] = Method(drafters[candidate.shape], candidate.rule)
    with target.encoded(texts):
        paces = time_rounds(target, methods, texts, plan.repeats)
    ar = paces[""]["round"].median
    alone = paces[""]["beginning"].median + target.length * ar
    tokens = 1000 * plan.batch_size * target.length / alone
    predictions = [Outcome(plain, True, 1.0, tokens, ar, 1.0)]
    for candidate, law in _laws(target, drafters, candidates, prompts, plan.seed, progress):
        pace = paces[candidate.pace]
        rounds = law.median_rounds(plan.batch_size)
        speedup = alone / (pace["beginning"].median + rounds * pace["round"].median)
        predictions.append(
            Outcome(
                options=candidate.options,
                lossless=candidate.lossless,
                speedup=speedup,
                tokens=speedup * tokens,
                round=pace["round"].median,
                accepted_length=law.accepted_length,
                kl_per_token=law.kl_per_token,
                tv_bound=law.tv_bound,
            )
        )
    return sorted(predictions, key=lambda outcome: -outcome.speedup)


def _laws(
    target: TransformerTarget,
    drafters: Mapping[str, Drafter],
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    seed: int,
    progress: Callable[[str], None],
) -> Iterator[tuple[Candidate, RoundLaws]]:
    """Each candidate with the law of its rounds."""
    on_chains = [
        (candidate, candidate.tested) for candidate in candidates if candidate.tested is not None
    ]
    for draft in dict.fromkeys(candidate.draft for candidate, _ in on_chains):
        progress(f"chains, draft {draft}")
        with_draft = [
            (candidate, rule) for candidate, rule in on_chains if candidate.draft == draft
        ]
        shapes = [drafters[candidate.shape] for candidate, _ in with_draft]
        deepest = max(shapes, key=lambda drafter: drafter.depth)
        rules = list(dict.fromkeys(rule for _, rule in with_draft))
        watcher = law_watcher(rules)
        decoded(target, deepest, AcceptNothing(), prompts, seed, target.device, [watcher])
        by_rule = outcomes(watcher, rules)
        for candidate, rule in with_draft:
            depth = drafters[candidate.shape].depth
            yield candidate, RoundLaws.predicted(by_rule[rule], depth)
    on_trees = [candidate for candidate in candidates if candidate.tested is None]
    for shape in dict.fromkeys(candidate.shape for candidate in on_trees):
        progress(shape)
        trace = decoded(target, drafters[shape], Exact(), prompts, seed, target.device)
        for candidate in on_trees:
            if candidate.shape == shape:
                yield candidate, RoundLaws.counted(trace)


def try_out(
    predictions: Sequence[Outcome],
    budget: Budget,
    runs: int,
    run: Callable[[Outcome], Outcome],
) -> list[Outcome]:
    """Run the settings within the budget that are predicted to be fastest, and the fastest lossless
    one if none of them keeps it.

    Args:
        predictions: fastest first.
        budget: what a setting may cost.
        runs: how many to run, at least 1.
        run: makes a real run.
    """
    admitted = [prediction for prediction in predictions if budget.admits(prediction)]
    outcomes = [run(prediction) for prediction in admitted[:runs]]
    if not any(budget.admits(outcome) for outcome in outcomes):
        lossless = [prediction for prediction in admitted if prediction.lossless]
        outcomes.append(run(lossless[0]))
    return outcomes


def fastest(outcomes: Sequence[Outcome], budget: Budget) -> Outcome:
    """The fastest of the outcomes that are within the budget, of which there is at least one."""
    return max(filter(budget.admits, outcomes), key=lambda outcome: outcome.speedup)
