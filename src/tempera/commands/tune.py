"""`tempera-tune`: the fastest setting within a budget on this machine."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig

from tempera.commands import evaluate
from tempera.config.compose import composed, composed_run, option_name, written
from tempera.config.instantiate import from_options, instantiate
from tempera.config.options import Role, role_of
from tempera.config.parts import Parts
from tempera.config.tracking import Tracking
from tempera.data.prompts import Prompt, check_prompts
from tempera.decoding.interfaces import Drafter, Rule
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import DraftTooShort, TemperaError
from tempera.evaluation.round_laws import TestedRule
from tempera.evaluation.tuning import (
    Budget,
    Candidate,
    Outcome,
    TuningPlan,
    fastest,
    predict,
    try_out,
)
from tempera.reporting.collect import collect
from tempera.reporting.finished_run import Run
from tempera.reporting.tables import Cell, Output, Section, known, show, table, texts
from tempera.rules.standard import BlockVerification
from tempera.runtime.files import write_json
from tempera.runtime.installation import command
from tempera.targets.transformer import TransformerTarget

PLAIN = ("method=ar",)
"""The options of plain autoregression, which may be the fastest setting."""
OWN_DRAFT = ("method=parallel", "drafter=parallel", "method=medusa", "drafter=medusa")
"""Options of settings whose draft is not the one that `drafter.path` names."""


SHOWN = {"speed-up": ".2f", "predicted": ".2f", "off": "+.0%", "length": ".2f", "KL": ".3f"}
"""Columns of the printed table, with the formats of their values."""


class _DraftKind(NamedTuple):
    """A kind of draft network. path: the option that is its directory (`++`: also for models that
    name none); others: what gives it to the methods of EAGLE's draft; dynamic: methods that draft
    other trees with it.
    """

    name: str
    path: str
    others: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()

    @property
    def exact(self) -> str:
        """The method that drafts with it and verifies exactly."""
        return f"method={self.name}"


class _ChainMethod(NamedTuple):
    """A method on chains.

    Attributes:
        options: that choose it.
        varied: the option that is varied, if one is.
        values: of that option.
        by_depth: whether its tests depend on the depth of the chain.
    """

    options: tuple[str, ...]
    varied: str = ""
    values: Sequence[float] = (0.0,)
    by_depth: bool = False


DRAFTS = (
    _DraftKind("eagle", "drafter.path", dynamic=("eagle2",)),
    _DraftKind("parallel", "++model.parallel", others=("drafter=parallel",)),
    _DraftKind("medusa", "++model.medusa", others=("drafter=medusa",)),
)


def main(cfg: DictConfig) -> None:
    """Predict, run the best settings, print them in a table, how far the predictions were off, and
    the command to use; write tune.json.
    """
    tracking = Tracking.of(cfg, "tune")
    what = f"`{command('tune')}` chooses among methods for discrete tokens"
    captions = Parts.of(cfg, discrete=what).captions()
    for name in cfg.trees:
        Tree.named(name)  # raises TemperaError
    instantiate(cfg.metrics).check(cfg.model.name)
    budget = Budget.parse(cfg.budget)
    plan = from_options(cfg, TuningPlan)
    settings = _Settings(cfg, lossless=budget.measure == "none")
    prompts = list(instantiate(cfg.data))
    if captions is not None:
        check_prompts(prompts, captions)
    console = Output()
    predictions = _predict(settings, prompts, plan, console)
    runs = _RealRuns(settings)
    outcomes = try_out(predictions, budget, cfg.runs, runs)
    best = fastest(outcomes, budget)
    file = Path(str(cfg.directory)) / "tune.json"
    write_json(
        file,
        {
            "budget": cfg.budget,
            "batch_size": cfg.batch_size,
            "drafters": settings.tried,
            "chosen": runs.summary(best.options),
            "runs": [runs.summary(outcome.options) for outcome in outcomes],
            "predictions": [asdict(prediction) for prediction in predictions],
        },
    )
    compared = runs.compared(f"{cfg.images} images")
    shown = texts(compared)
    show(shown, compared.title)
    console.print(compared.text, highlight=False, soft_wrap=True)
    use = shlex.join(settings.arguments(best.options))
    console.print(f"use: {command('eval')} {use}", highlight=False, soft_wrap=True)
    tracking.record(file.parent, {"use": use, **asdict(best)}, shown, [file])


def _predict(
    settings: "_Settings", prompts: Sequence[Prompt], plan: TuningPlan, console: Output
) -> list[Outcome]:
    """What every setting is expected to do, by rounds and drafts measured here."""
    candidates = list(settings.candidates())
    target = cast(TransformerTarget, settings.parts((DRAFTS[0].exact,)).fast_target())
    drafters = settings.drafters(target)
    with console.status("measuring") as status:
        predictions = predict(
            target,
            drafters,
            [candidate for candidate in candidates if candidate.shape in drafters],
            prompts,
            plan,
            PLAIN,
            lambda name: status.update(name),
        )
    for name, outcome in settings.tried.items():
        console.print(f"{name}: {outcome}", highlight=False, soft_wrap=True)
    return predictions


def _is_own(name: str) -> bool:
    """Whether an option is of this script, and not of the evaluations that it starts."""
    return Role.OWN in role_of(name, "tune")


class _Settings:
    """The settings to predict.

    Args:
        cfg: the configuration.
        lossless: whether only lossless settings are wanted.

    Attributes:
        tried: for each drafter `tried`, or why it is left out.

    Raises:
        TemperaError: a draft that the user named, or every draft, is missing.
    """

    def __init__(self, cfg: DictConfig, lossless: bool) -> None:
        self.cfg = cfg
        self.lossless = lossless
        self.shared = [option for option in cfg.overrides if not _is_own(option_name(option))]
        self.drafts = list(DRAFTS)
        self.tried: dict[str, str] = {}
        for draft in DRAFTS:
            try:
                self.parts((draft.exact,)).check_draft(draft.path)
                self.tried |= dict.fromkeys((draft.name, *draft.dynamic), "tried")
            except TemperaError as problem:
                self._leave_out(draft, problem)

    def _leave_out(self, draft: _DraftKind, problem: TemperaError) -> None:
        """Go on without a draft, unless the user named it or there is no other."""
        named = option_name(draft.path) in map(option_name, self.cfg.overrides)
        if named or self.drafts == [draft]:
            raise problem
        self.drafts.remove(draft)
        self.tried |= dict.fromkeys((draft.name, *draft.dynamic), f"left out: {problem}")

    def arguments(self, options: Sequence[str]) -> list[str]:
        """The options of an evaluation with a setting. Plain autoregression has none of a draft,
        and a setting with another draft than EAGLE's not the path of EAGLE's.
        """
        dropped = ""
        if tuple(options) == PLAIN:
            dropped = "drafter."
        elif any(option in OWN_DRAFT for option in options):
            dropped = "drafter.path="
        if not dropped:
            return [*self.shared, *options]
        return [*(option for option in self.shared if not option.startswith(dropped)), *options]

    def parts(self, options: Sequence[str]) -> Parts:
        """Model and method of an evaluation with a setting."""
        return Parts.of(composed("eval", self.arguments(options)))

    def drafters(self, target: TransformerTarget) -> dict[str, Drafter]:
        """The drafters by the name of their shape: chains and static trees of each draft, and
        dynamic trees.
        """
        found: dict[str, Drafter] = {}
        for draft in list(self.drafts):
            try:
                found |= self._drafters_of(draft, target)
            except TemperaError as problem:  # made for another target
                self._leave_out(draft, problem)
        return found

    def _drafters_of(self, draft: _DraftKind, target: TransformerTarget) -> dict[str, Drafter]:
        trees = {written("depth", depth): Tree.chain(depth) for depth in self.cfg.depths}
        trees |= {written("tree", name): Tree.named(name) for name in self.cfg.trees}
        found: dict[str, Drafter] = {}
        if trees:
            shallowest = min(trees, key=lambda name: trees[name].max_depth)
            first = self.parts((draft.exact, shallowest)).drafter(target)
            model = cast(StaticTreeDrafter, first).model
        for name, tree in trees.items():
            try:
                fitted = model.for_depth(tree.max_depth)
                found[f"{draft.name} {name}"] = StaticTreeDrafter(fitted, tree)
            except DraftTooShort as problem:
                self.tried[f"{draft.name}, {name}"] = f"left out: it drafts {problem.slots} tokens"
        for method in draft.dynamic:
            found[method] = self.parts((f"method={method}",)).drafter(target)
        return found

    def candidates(self) -> Iterator[Candidate]:
        """Every setting: rules on chains, and the exact rule on trees."""
        for draft in self.drafts:
            yield from self._chains(draft)
            for tree in (written("tree", name) for name in self.cfg.trees):
                yield Candidate((draft.exact, tree), draft.name, f"{draft.name} {tree}")
            for method in draft.dynamic:
                yield Candidate((f"method={method}",), draft.name, method)

    def _chains(self, draft: _DraftKind) -> Iterator[Candidate]:
        deepest = max(self.cfg.depths, default=0)
        for method in self._methods(draft):
            usual = self.parts(method.options)
            for value in method.values:
                varied = usual.with_option(method.varied, value) if method.varied else usual
                for depth in self.cfg.depths:
                    parts = varied.with_option("depth", depth if method.by_depth else deepest)
                    chain = written("depth", depth)
                    setting = [written(method.varied, value)] if method.varied else []
                    yield Candidate(
                        (*method.options, chain, *setting),
                        draft.name,
                        f"{draft.name} {chain}",
                        TestedRule(
                            cast(Rule | BlockVerification, parts.rule()),
                            lossless=not method.varied,
                            depth=depth if method.by_depth else None,
                        ),
                    )

    def _methods(self, draft: _DraftKind) -> Iterator[_ChainMethod]:
        yield _ChainMethod((draft.exact,))
        yield _ChainMethod(("method=block", *draft.others), by_depth=True)
        if self.lossless:
            return
        prices = self.cfg.prices
        deltas = self.cfg.deltas
        yield _ChainMethod(("method=optimal_rsd", *draft.others), "price", prices)
        yield _ChainMethod(("method=uniform_rsd", *draft.others), "delta", deltas)
        coolsd = ("method=coolsd", *draft.others, "floor=1")
        yield _ChainMethod(coolsd, "delta", deltas, by_depth=True)


class _RealRuns:
    """Real runs, each in a directory of its own."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.cfg = settings.cfg
        size = self.cfg.batch_size
        self.speed = "speedup" if size == 1 else f"speedup_{size}"
        self.options = [
            written("limit", self.cfg.images),
            written("speed.prompts", self.cfg.timed),
            written("speed.batches", [] if size == 1 else [size]),
        ]
        self.found: dict[tuple[str, ...], tuple[Outcome, Run]] = {}

    def __call__(self, prediction: Outcome) -> Outcome:
        """Evaluate a setting."""
        options = prediction.options
        place = Path(str(self.cfg.directory)) / "runs" / ",".join(options)
        arguments = [*self.settings.arguments(options), *self.options]
        print(f"running {' '.join(options)}")
        evaluate.run(composed_run("eval", arguments, place), quiet=True)
        (run,), _ = collect([place])
        self.found[options] = prediction, run
        return replace(
            prediction,
            speedup=run.value(self.speed),
            kl_per_token=run.value("kl_per_token"),
            tv_bound=run.value("tv_bound"),
        )

    def summary(self, options: tuple[str, ...]) -> dict[str, Any]:
        """What tune.json says about a run."""
        prediction, run = self.found[options]
        return {
            "predicted": asdict(prediction),
            "measured": run.metrics,
            "directory": run.directory,
        }

    def compared(self, work: str) -> Section:
        """What was measured, and how far the predicted speed-ups were off; `work` says on what."""
        rows: list[dict[str, Cell]] = []
        for prediction, run in self.found.values():
            row: dict[str, Cell] = {
                "speed-up": run.metrics[self.speed],
                "predicted": {"value": prediction.speedup},
                "off": {"value": prediction.speedup / run.value(self.speed) - 1},
                "length": {"value": run.value("accepted_length")},
                "KL": {"value": run.value("kl_per_token")},
            }
            rows.append(row)
        columns = {heading: [row[heading] for row in rows] for heading in SHOWN}
        names = [" ".join(options) for options in self.found]
        most = max(abs(row["off"]["value"]) for row in rows)
        outside = [row for row in rows if not _inside(row["predicted"]["value"], row["speed-up"])]
        text = (
            f"The predicted speed-ups were off by up to {most:.0%}; {len(outside)} of {len(rows)} "
            "lie outside the 95% interval of the measured one."
        )
        title = f"measured, with 95% intervals, and predicted; {work}"
        return Section(title, table(names, columns, "setting"), SHOWN, text)


def _inside(value: float, interval: Cell) -> bool:
    """Whether a value lies in the interval of another, or that has none."""
    low = interval["low"]
    high = interval["high"]
    return not (known(low) and known(high)) or low <= value <= high
