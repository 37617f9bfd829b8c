"""`tempera-tune`: the fastest setting within a budget on this machine, for `method=auto`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from tempera.commands import evaluate
from tempera.config import build
from tempera.config.compose import composed, composed_run, written
from tempera.config.instantiate import check_value, check_values, instantiate
from tempera.config.tuned import (
    PLAIN,
    beside,
    conditions,
    has_own_draft,
    option_name,
    save_tuned,
)
from tempera.data.captions import check_prompts
from tempera.decoding.interfaces import Drafter
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import DraftTooShort, TemperaError
from tempera.evaluation.round_laws import TestedRule
from tempera.evaluation.tuning import (
    Budget,
    Candidate,
    Prediction,
    Trial,
    fastest,
    predict,
    try_out,
)
from tempera.metrics import table
from tempera.reporting.collect import ReportRow, collect
from tempera.reporting.console import number
from tempera.runtime.files import write_json
from tempera.runtime.installation import command

OWN = (
    *("budget", "batch_size", "parallel", "depths", "trees", "prices", "deltas", "limit", "offset"),
    *("repeats", "runs", "images", "timed", "result", "directory", "overrides", "plan"),
)
"""Options of conf/tune.yaml that are not those of an evaluation."""
KINDS: dict[str, Any] = {
    "budget": str,
    "parallel": str | None,
    "depths": list[int],
    "trees": list[str],
    "prices": list[float],
    "deltas": list[float],
    "runs": int,
    "images": int,
    "timed": int,
    "seed": int,
    "result": Path,
}
LISTED = 8
"""Predictions to print."""


def main(cfg: DictConfig) -> dict[str, Any]:
    """Predict, run the best settings, print a table, write tune.json and the result, and return the
    content of tune.json.
    """
    budget = _checked(cfg)
    settings = _Settings(cfg, budget)
    prompts, plan = instantiate(cfg.data), instantiate(cfg.plan)
    candidates = list(settings.candidates())
    base = settings.evaluation(WITH_EAGLE)
    if (captions := build.build_captions(cfg)) is not None:
        check_prompts(prompts, captions)
    target: Any = build.build_target(base)
    build.make_fast(base, target)
    drafters = settings.drafters(target)
    console = Console()
    with console.status("measuring") as status:
        predictions = predict(
            target,
            drafters,
            [one for one in candidates if one.shape in drafters],
            prompts,
            plan,
            lambda part: status.update(f"measuring: {part}"),
        )
    del target, drafters
    _print_drafters(console, settings)
    _print_predictions(console, [one for one in predictions if budget.admits(one)])
    trials = _RealRuns(settings)
    outcomes = try_out(predictions, budget, cfg.runs, trials.run)
    best = fastest(outcomes, budget)
    result = trials.result(predictions, outcomes, best)
    write_json(Path(str(cfg.directory)) / "tune.json", result)
    _save(settings, best.prediction.options, conditions(base), result)
    console.print(trials.table(outcomes, best))
    _print_choice(console, settings.arguments(best.prediction.options), cfg)
    return result


def _checked(cfg: DictConfig) -> Budget:
    """The budget; raises TemperaError for options that are wrong or do not suit the model."""
    if cfg.model.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"`{command('tune')}` chooses among methods for discrete tokens, but those of "
            f"model={cfg.model.name} are continuous: compare its methods with "
            "experiment=frontier_continuous."
        )
    build.check_compile(cfg)
    for name, kind in KINDS.items():
        check_value(cfg, name, cfg[name], kind)
    for name in ("runs", "images", "timed"):
        if cfg[name] < 1:
            raise TemperaError(f"{name}={cfg[name]} is too small: give at least 1.")
    for name in cfg.trees:
        Tree.named(str(name))  # raises TemperaError
    check_values(cfg.plan)
    check_values(cfg.tracking)
    budget = Budget.parse(str(cfg.budget))
    evaluator = instantiate(cfg.metrics)
    evaluator.check(cfg.model.name)
    if budget.measure == "clip" and not evaluator.scores_clip:
        raise TemperaError(
            f"`budget={cfg.budget}` needs a CLIP score, which these metrics do not give: choose "
            "metrics=shapes or metrics=real."
        )
    return budget


@dataclass(frozen=True)
class _DraftKind:
    """A kind of draft network.

    Attributes:
        name: of its drafter.
        path: option of conf/tune.yaml that is its directory.
        exact: the method that drafts with it and verifies exactly.
        others: what gives it to other methods.
        trees_of_its_own: methods that draft with it other trees than chains and static ones.
    """

    name: str
    path: str
    exact: str
    others: tuple[str, ...] = ()
    trees_of_its_own: tuple[str, ...] = ()


DRAFTS = (
    _DraftKind("eagle", "drafter.path", "method=eagle", trees_of_its_own=("method=eagle2",)),
    _DraftKind("parallel", "parallel", "method=parallel", ("drafter=parallel",)),
)
NOT_TRIED = {
    "independent": "never tried; compare it in a sweep",
    "jacobi, sjd, scd, sjd_pac": "never tried; compare them in a sweep",
}
"""Drafters that no setting has, with the reason."""

WITH_EAGLE = ("method=eagle",)


class _Settings:
    """The settings to predict.

    Attributes:
        tried: the drafts that there are.
        left_out: for each drafter that is not tried, or not as far as was asked for, the reason.

    Raises:
        TemperaError: a draft that the user named, or every draft, is missing.
    """

    def __init__(self, cfg: DictConfig, budget: Budget) -> None:
        self.cfg, self.budget = cfg, budget
        self.shared = [one for one in cfg.overrides if option_name(one) not in OWN]
        self.left_out = dict(NOT_TRIED)
        self.tried = [draft for draft in DRAFTS if self._is_there(draft)]
        if not self.tried:
            build.check_draft(self.evaluation(WITH_EAGLE))

    def _is_there(self, draft: _DraftKind) -> bool:
        """Whether there is such a draft; if not, and none was asked for, it is left out."""
        one = self.evaluation((draft.exact,))
        try:
            build.check_draft(one, draft.path)
        except TemperaError:
            if self._is_named(draft):
                raise
            self.left_out[draft.name] = (
                f"there is no draft in {one.drafter.path}; {draft.path}=DIR names another"
            )
            return False
        return True

    def _is_named(self, draft: _DraftKind) -> bool:
        """Whether the user asked for this draft."""
        return any(option_name(given) == draft.path for given in self.cfg.overrides)

    def options(self, options: Sequence[str]) -> list[str]:
        """The options of a setting, with the draft's path if the user gave it here."""
        named = self.cfg.parallel is not None and has_own_draft(options)
        return [*options, *([written("drafter.path", self.cfg.parallel)] if named else [])]

    def arguments(self, options: Sequence[str]) -> list[str]:
        """The options of an evaluation with a setting."""
        return [*beside(self.shared, options), *self.options(options)[len(options) :]]

    def evaluation(self, options: Sequence[str]) -> DictConfig:
        """The configuration of an evaluation with a setting."""
        return composed("eval", self.arguments(options))

    def drafters(self, target: Any) -> dict[str, Drafter]:
        """The drafters by the name of their shape: chains and static trees of each draft, and
        EAGLE-2's trees.
        """
        found: dict[str, Drafter] = {}
        for draft in list(self.tried):
            try:
                found |= self._drafters_of(draft, target)
            except TemperaError as problem:
                if self._is_named(draft) or len(self.tried) == 1:
                    raise
                self.tried.remove(draft)
                self.left_out[draft.name] = str(problem)
        return found

    def _drafters_of(self, draft: _DraftKind, target: Any) -> dict[str, Drafter]:
        trees = {written("depth", depth): Tree.chain(depth) for depth in self.cfg.depths}
        trees |= {written("tree", name): Tree.named(name) for name in self.cfg.trees}
        found: dict[str, Drafter] = {}
        if trees:
            shallowest = min(trees, key=lambda name: trees[name].max_depth)
            first: Any = build.build_drafter(self.evaluation((draft.exact, shallowest)), target)
        for name, tree in trees.items():
            try:
                model = first.model.for_depth(tree.max_depth)
            except DraftTooShort as problem:
                self.left_out[f"{draft.name}, {name}"] = f"it drafts {problem.slots} tokens"
            else:
                found[_shape(draft, name)] = StaticTreeDrafter(model, tree)
        for method in draft.trees_of_its_own:
            found[method] = build.build_drafter(self.evaluation((method,)), target)
        return found

    def drafters_tried(self) -> dict[str, str]:
        """For each drafter `tried`, or why it was left out."""
        names = [
            name
            for draft in self.tried
            for name in (
                draft.name,
                *(one.removeprefix("method=") for one in draft.trees_of_its_own),
            )
        ]
        left_out = {name: f"left out: {reason}" for name, reason in self.left_out.items()}
        return dict.fromkeys(names, "tried") | left_out

    def candidates(self) -> Iterator[Candidate]:
        """Every setting: rules on chains, and the exact rule on trees."""
        for draft in self.tried:
            yield from self._chains(draft)
            for name in self.cfg.trees:
                tree = written("tree", name)
                yield Candidate((draft.exact, tree), draft.name, _shape(draft, tree))
            for method in draft.trees_of_its_own:
                yield Candidate((method,), draft.name, method)

    def _chains(self, draft: _DraftKind) -> Iterator[Candidate]:
        deepest = max(self.cfg.depths, default=0)
        for options, knob, values, by_depth in self._rules(draft):
            one = self.evaluation(options)
            for value in values:
                if knob:
                    OmegaConf.update(one, knob, value)
                    build.check_method(one)
                for depth in self.cfg.depths:
                    rule: Any = build.build_rule(one, depth if by_depth else deepest)
                    chain = written("depth", depth)
                    yield Candidate(
                        (*options, chain, *([written(knob, value)] if knob else [])),
                        draft.name,
                        _shape(draft, chain),
                        TestedRule(rule, not knob, depth if by_depth else None),
                    )

    def _rules(
        self, draft: _DraftKind
    ) -> Iterator[tuple[tuple[str, ...], str, Sequence[float], bool]]:
        """The methods on chains: their options, the option that is varied, its values, and whether
        their tests depend on the depth of the chain.
        """
        yield (draft.exact,), "", [0.0], False
        yield ("method=block", *draft.others), "", [0.0], True
        if self.budget.measure != "none":
            prices, deltas = self.cfg.prices, self.cfg.deltas
            yield ("method=optimal_rsd", *draft.others), "price", prices, False
            yield ("method=uniform_rsd", *draft.others), "delta", deltas, False
            yield ("method=coolsd", *draft.others, "floor=1"), "delta", deltas, True


def _shape(draft: _DraftKind, shape: str) -> str:
    """The name of a drafter: its draft's and that of its chain or tree."""
    return f"{draft.name} {shape}"


class _RealRuns:
    """Real runs, each in a directory of its own, beside one of plain autoregression."""

    def __init__(self, settings: _Settings) -> None:
        self.settings, self.cfg = settings, settings.cfg
        cfg = settings.cfg
        self.directory = Path(str(cfg.directory)) / "runs"
        batches = [] if cfg.batch_size == 1 else [cfg.batch_size]
        self.options = [
            written("limit", cfg.images),
            written("speed.prompts", cfg.timed),
            written("speed.batches", batches),
        ]
        self.speed = "speedup" if cfg.batch_size == 1 else f"speedup_{cfg.batch_size}"
        self.rows: dict[tuple[str, ...], ReportRow] = {}

    def run(self, prediction: Prediction) -> Trial:
        """Evaluate a setting, and plain autoregression before the first one."""
        row = self.row(prediction.options)
        metrics = row["metrics"]
        loss = row["differences"].get("clip_score")
        return Trial(
            prediction,
            metrics[self.speed]["value"],
            metrics["kl_per_token"]["value"],
            metrics["tv_bound"]["value"],
            None if loss is None else -loss["low"],
        )

    def row(self, options: tuple[str, ...]) -> ReportRow:
        """The row of a run in a report, with its differences from plain autoregression."""
        wanted = [self._ran(PLAIN), self._ran(options)]
        rows, _ = collect(sorted(set(wanted)))
        for one in rows:
            if Path(one["directory"]) == wanted[1]:
                self.rows[options] = one
        return self.rows[options]

    def _ran(self, options: tuple[str, ...]) -> Path:
        """The directory of a finished run."""
        place = self.directory / ",".join(options)
        if options not in self.rows and not (options == PLAIN and self.rows):
            arguments = [*self.settings.arguments(options), *self.options]
            evaluate.main(composed_run("eval", arguments, place))
        return place

    def result(
        self, predictions: Sequence[Prediction], outcomes: Sequence[Trial], best: Trial
    ) -> dict[str, Any]:
        """The content of tune.json."""
        return {
            "budget": self.cfg.budget,
            "batch_size": self.cfg.batch_size,
            "drafters": self.settings.drafters_tried(),
            "chosen": self._summary(best),
            "runs": [self._summary(outcome) for outcome in outcomes],
            "predictions": [asdict(one) for one in predictions],
        }

    def _summary(self, outcome: Trial) -> dict[str, Any]:
        row = self.rows[outcome.prediction.options]
        return {
            "predicted": asdict(outcome.prediction),
            "measured": row["metrics"],
            "differences": row["differences"],
            "directory": row["directory"],
        }

    def table(self, outcomes: Sequence[Trial], best: Trial) -> Table:
        """Predicted against measured, and quality against plain autoregression."""
        quality = [
            metric
            for metric in table.METRICS
            if metric.section == "quality"
            and any(metric.key in row["differences"] for row in self.rows.values())
            and metric.in_report
        ]
        shown = Table(
            title=f"predicted → measured, 95% intervals; {self.cfg.images} images",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        shown.add_column("setting", overflow="fold", min_width=20)
        names = ["speed-up", "accepted length", "KL per token"]
        for name in (*names, *(f"{metric.heading} − AR's" for metric in quality)):
            shown.add_column(name, justify="right", overflow="fold")
        for outcome in sorted(outcomes, key=lambda outcome: -outcome.speedup):
            row, predicted = self.rows[outcome.prediction.options], outcome.prediction
            metrics = row["metrics"]
            shown.add_row(
                " ".join(predicted.options),
                _cell(predicted.speedup, metrics[self.speed], ".2f"),
                _cell(predicted.accepted_length, metrics["accepted_length"], ".2f"),
                _cell(predicted.kl_per_token, metrics["kl_per_token"], ".4f"),
                *(_difference(row["differences"].get(one.key), one.format) for one in quality),
                style="bold" if outcome is best else "",
            )
        return shown


def _cell(predicted: float, measured: Mapping[str, Any], form: str) -> str:
    return f"{number(predicted, form)} → {_difference(measured, form)}"


def _difference(interval: Mapping[str, Any] | None, form: str) -> str:
    if interval is None:
        return "–"
    value, low, high = (number(interval[key], form) for key in ("value", "low", "high"))
    return f"{value}\n{low} … {high}"


def _save(
    settings: _Settings,
    options: Sequence[str],
    found_under: Mapping[str, Any],
    result: Mapping[str, Any],
) -> None:
    """Write what method=auto reads."""
    path = settings.evaluation(options).drafter.path if has_own_draft(options) else None
    save_tuned(
        Path(str(settings.cfg.result)),
        settings.options(options),
        found_under,
        {name: result[name] for name in ("budget", "batch_size", "drafters", "chosen")},
        path,
    )


def _print_drafters(console: Console, settings: _Settings) -> None:
    """Which drafters were tried, and which were not."""
    shown = Table(title="drafters", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for name, outcome in settings.drafters_tried().items():
        shown.add_row(name, outcome)
    console.print(shown)


def _print_predictions(console: Console, predictions: Sequence[Prediction]) -> None:
    """The fastest predictions within the budget."""
    shown = Table(
        title="fastest settings predicted within the budget",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("setting", overflow="fold")
    for name in ("speed-up", "tokens/s", "length", "KL/token", "TV bound"):
        shown.add_column(name, justify="right")
    for one in predictions[:LISTED]:
        shown.add_row(
            " ".join(one.options),
            number(one.speedup, ".2f"),
            number(one.tokens, ".0f"),
            number(one.accepted_length, ".2f"),
            number(one.kl_per_token, ".4f"),
            number(one.tv_bound, ".1f"),
        )
    console.print(shown)


def _print_choice(console: Console, options: Sequence[str], cfg: DictConfig) -> None:
    """The command line to use."""
    console.print(f"use: {command('eval')} {shlex.join(options)}", highlight=False, soft_wrap=True)
    console.print(f"or method=auto, which reads {cfg.result}", highlight=False, soft_wrap=True)
