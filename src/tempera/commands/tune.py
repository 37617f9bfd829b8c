"""`tempera-tune`: the fastest setting within a budget on this machine."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig
from pydantic import PositiveFloat, PositiveInt

from tempera.commands import evaluate
from tempera.commands.costs import CAPTION, dry_decoding
from tempera.config.compose import composed, option_name, written
from tempera.config.instantiate import from_options, instantiate
from tempera.config.parts import Parts, check_discrete
from tempera.config.tracking import Tracking
from tempera.data.prompts import Prompt, check_prompts
from tempera.decoding.interfaces import Drafter
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule
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
from tempera.metrics.evaluators import Evaluator
from tempera.reporting.collect import collect
from tempera.reporting.finished_run import Run
from tempera.reporting.tables import Cell, Output, Section, known, show, table, texts
from tempera.rules.standard import BlockVerification
from tempera.runtime.files import write_json
from tempera.runtime.installation import command
from tempera.targets.transformer import TransformerTarget

Setting = dict[str, Any]
"""Options of an evaluation, by name."""
PLAIN: Setting = {"method": "ar"}
"""Plain autoregression, which may be the fastest setting."""
DRAFTS = {
    "eagle": "drafter.path",
    "parallel": "++model.parallel",
    "dflash": "++model.dflash",
    "medusa": "++model.medusa",
}
"""Kinds of draft networks, which are called as the method that drafts with them and verifies
exactly, with the option that is their directory (`++`: also for models that name none).
"""
DYNAMIC = {"eagle": ("eagle2",)}
"""By draft, the methods that draft other trees with it."""
TRIED = "tried"
"""What is said of a draft that is not left out."""
OWN = (
    *("budget", "batch_size", "data.limit", "data.offset", "repeats", "runs", "depths", "trees"),
    *("prices", "deltas", "images", "timed", "directory", "overrides"),
)
"""Options of this script, which the evaluations that it starts do not get."""
SHOWN = {"speed-up": ".2f", "predicted": ".2f", "off": "+.0%", "length": ".2f", "KL": ".3f"}
"""Columns of the printed table, with the formats of their values."""


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/tune.yaml says what each is."""

    depths: list[PositiveInt]
    trees: list[str]
    prices: list[PositiveFloat]
    deltas: list[PositiveFloat]
    runs: PositiveInt
    images: PositiveInt
    timed: PositiveInt


def main(cfg: DictConfig) -> None:
    """Predict, run the best settings, print them in a table, how far the predictions were off, and
    the command to use; write tune.json.
    """
    options, budget, plan, evaluator = read_options(cfg)
    tracking = Tracking.of(cfg, "tune")
    parts = Parts.of(cfg)
    settings = _Settings(cfg, lossless=budget.measure == "none")
    if cfg.dry_run:
        _tell(cfg, settings, evaluator)
        return
    evaluator.check(parts.model)
    prompts = list(instantiate(cfg.data))
    if (captions := parts.captions()) is not None:
        check_prompts(prompts, captions)
    console = Output()
    predictions = _predict(settings, prompts, plan, console)
    runs = _RealRuns(settings)
    outcomes = try_out(predictions, budget, options.runs, runs)
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
    compared = runs.compared(f"{options.images} images")
    shown = texts(compared)
    show(shown, compared.title)
    console.print(compared.text, highlight=False, soft_wrap=True)
    use = shlex.join(settings.arguments(best.options))
    console.print(f"use: {command('eval')} {use}", highlight=False, soft_wrap=True)
    tracking.record(file.parent, {"use": use, **asdict(best)}, shown, [file])


def read_options(cfg: DictConfig) -> tuple[Options, Budget, TuningPlan, Evaluator]:
    """What this command reads itself; a sweep reads it of all jobs before the first begins."""
    check_discrete(cfg, f"`{command('tune')}` chooses among methods for discrete tokens")
    options = from_options(cfg, Options)
    for name in options.trees:
        Tree.named(name)  # raises TemperaError
    evaluator: Evaluator = instantiate(cfg.metrics)
    return options, Budget.parse(str(cfg.budget)), from_options(cfg, TuningPlan), evaluator


def _predict(
    settings: "_Settings", prompts: Sequence[Prompt], plan: TuningPlan, console: Output
) -> list[Outcome]:
    """What every setting is expected to do, by rounds and drafts measured here."""
    candidates = list(settings.candidates())
    target = cast(TransformerTarget, settings.parts({"method": settings.drafts[0]}).fast_target())
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


def _tell(cfg: DictConfig, settings: "_Settings", evaluator: Evaluator) -> None:
    """Print what tuning takes."""
    number = len(list(settings.candidates()))
    prompts = cfg.data.limit
    work = (
        f"predict {number} settings from drafts of {prompts} prompts, and run {cfg.runs} of them "
        f"on {cfg.images} images of {{tokens}} tokens"
    )
    batch = [CAPTION] * max(prompts, cfg.batch_size)
    parts = settings.parts({"method": settings.drafts[0]})
    dry_decoding(parts, batch, work, scorers=[evaluator], checks_draft=False)
    for name, outcome in settings.tried.items():
        if outcome != TRIED:
            print(f"{name}: {outcome}")
    for problem in settings.refused:
        print(f"the run would stop: {problem}")


def options_of(setting: Setting) -> list[str]:
    """A setting as on the command line."""
    return [written(name, value) for name, value in setting.items()]


def name_of(setting: Setting) -> str:
    """A setting in words."""
    return " ".join(options_of(setting))


class _Settings:
    """The settings to predict.

    Args:
        cfg: the configuration.
        lossless: whether only lossless settings are wanted.

    Attributes:
        tried: for each drafter `tried`, or why it is left out.
        refused: of a dry run, what the run would raise.

    Raises:
        TemperaError: a draft that the user named, or every draft, is missing.
    """

    def __init__(self, cfg: DictConfig, lossless: bool) -> None:
        self.cfg = cfg
        self.lossless = lossless
        self.shared = [option for option in cfg.overrides if option_name(option) not in OWN]
        self.drafts = list(DRAFTS)
        self.tried: dict[str, str] = {}
        self.refused: list[TemperaError] = []
        for draft, path in DRAFTS.items():
            try:
                parts = self.parts({"method": draft})
                parts.check_draft(path, of_the_hub=not cfg.dry_run)
                self.tried |= dict.fromkeys((draft, *DYNAMIC.get(draft, ())), TRIED)
            except TemperaError as problem:
                self._leave_out(draft, problem)

    def _leave_out(self, draft: str, problem: TemperaError) -> None:
        """Go on without a draft, unless the user named it or there is no other."""
        named = option_name(DRAFTS[draft]) in map(option_name, self.cfg.overrides)
        if named or self.drafts == [draft]:
            if not self.cfg.dry_run:
                raise problem
            self.refused.append(problem)
            return
        self.drafts.remove(draft)
        self.tried |= dict.fromkeys((draft, *DYNAMIC.get(draft, ())), f"left out: {problem}")

    def arguments(self, setting: Setting) -> list[str]:
        """The options of an evaluation with a setting. Plain autoregression has none of a draft,
        and a setting with another draft than EAGLE's not the path of EAGLE's.
        """
        draft = setting.get("drafter", setting["method"])
        dropped: tuple[str, ...] = ()
        if setting == PLAIN:
            dropped = ("drafter.",)
        elif draft in DRAFTS and draft != "eagle":
            dropped = ("drafter.path=",)
        others = [option for option in self.shared if not option.startswith(dropped)]
        return [*others, *options_of(setting)]

    def parts(self, setting: Setting) -> Parts:
        """Model and method of an evaluation with a setting."""
        return Parts.of(composed("eval", self.arguments(setting)))

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

    def _drafters_of(self, draft: str, target: TransformerTarget) -> dict[str, Drafter]:
        shapes: list[tuple[Setting, Tree]] = [
            *(({"depth": depth}, Tree.chain(depth)) for depth in self.cfg.depths),
            *(({"tree": name}, Tree.named(name)) for name in self.cfg.trees),
        ]
        found: dict[str, Drafter] = {}
        if shapes:
            shallowest, _ = min(shapes, key=lambda shape: shape[1].max_depth)
            first = self.parts({"method": draft, **shallowest}).drafter(target)
            model = cast(StaticTreeDrafter, first).model
        for shape, tree in shapes:
            try:
                found[f"{draft} {name_of(shape)}"] = StaticTreeDrafter(model, tree)
            except DraftTooShort as problem:
                said = f"left out: it drafts {problem.slots} tokens"
                self.tried[f"{draft}, {name_of(shape)}"] = said
        for method in DYNAMIC.get(draft, ()):
            found[method] = self.parts({"method": method}).drafter(target)
        return found

    def candidates(self) -> Iterator[Candidate]:
        """Every setting: rules on chains, and the exact rule on trees."""
        for draft in self.drafts:
            yield from self._chains(draft)
            for tree in self.cfg.trees:
                shape = {"tree": tree}
                yield Candidate({"method": draft, **shape}, draft, f"{draft} {name_of(shape)}")
            for method in DYNAMIC.get(draft, ()):
                yield Candidate({"method": method}, draft, method)

    def _chains(self, draft: str) -> Iterator[Candidate]:
        deepest = max(self.cfg.depths, default=0)
        for method, varied in self._methods(draft):
            usual = self.parts(method)
            by_depth = method["method"] in ("block", "coolsd")  # their tests depend on the depth
            for change in varied:
                changed = usual
                for option, value in change.items():
                    changed = changed.with_option(option, value)
                for depth in self.cfg.depths:
                    parts = changed.with_option("depth", depth if by_depth else deepest)
                    tested = TestedRule(
                        cast(TokenRule | BlockVerification, parts.rule()),
                        depth=depth if by_depth else None,
                    )
                    shape = {"depth": depth}
                    yield Candidate(
                        {**method, **shape, **change}, draft, f"{draft} {name_of(shape)}", tested
                    )

    def _methods(self, draft: str) -> Iterator[tuple[Setting, list[Setting]]]:
        """The methods on chains of a draft, each with the changes of it to try."""
        own = {} if draft == "eagle" else {"drafter": draft}
        yield {"method": draft}, [{}]
        yield {"method": "block", **own}, [{}]
        if self.lossless:
            return
        prices: list[Setting] = [{"price": price} for price in self.cfg.prices]
        deltas: list[Setting] = [{"delta": delta} for delta in self.cfg.deltas]
        yield {"method": "optimal_rsd", **own}, prices
        yield {"method": "uniform_rsd", **own}, deltas
        yield {"method": "coolsd", **own, "floor": 1}, deltas


class _RealRuns:
    """Real runs, each in a directory of its own."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.cfg = settings.cfg
        size = self.cfg.batch_size
        self.speed = "speedup" if size == 1 else f"speedup_{size}"
        self.options = options_of(
            {
                "data.limit": self.cfg.images,
                "speed.prompts": self.cfg.timed,
                "speed.batches": [] if size == 1 else [size],
            }
        )
        self.found: dict[str, tuple[Outcome, Run]] = {}

    def __call__(self, prediction: Outcome) -> Outcome:
        """Evaluate a setting."""
        setting = prediction.options
        directory = Path(str(self.cfg.directory)) / "runs" / ",".join(options_of(setting))
        arguments = [*self.settings.arguments(setting), *self.options]
        print(f"running {name_of(setting)}")
        evaluate.run(composed("eval", arguments, directory), quiet=True)
        (run,), _ = collect([directory])
        self.found[name_of(setting)] = prediction, run
        return replace(
            prediction,
            speedup=run.value(self.speed),
            kl_per_token=run.value("kl_per_token"),
            tv_bound=run.value("tv_bound"),
        )

    def summary(self, setting: Setting) -> dict[str, Any]:
        """What tune.json says about a run."""
        prediction, run = self.found[name_of(setting)]
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
        most = max(abs(row["off"]["value"]) for row in rows)
        outside = [row for row in rows if not _inside(row["predicted"]["value"], row["speed-up"])]
        text = (
            f"The predicted speed-ups were off by up to {most:.0%}; {len(outside)} of {len(rows)} "
            "lie outside the 95% interval of the measured speed-up."
        )
        title = f"measured, with 95% intervals, and predicted; {work}"
        return Section(title, table(list(self.found), columns, "setting"), SHOWN, text)


def _inside(value: float, interval: Cell) -> bool:
    """Whether a value lies in the interval of another, or that has none."""
    low = interval["low"]
    high = interval["high"]
    return not (known(low) and known(high)) or low <= value <= high
