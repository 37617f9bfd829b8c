"""`tempera-tune`: the fastest setting within a budget on this machine, for `method=auto`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from tempera.commands import evaluate
from tempera.config import build
from tempera.config.compose import composed, composed_run, written
from tempera.config.families import check_suited
from tempera.config.instantiate import check_value, check_values, instantiate
from tempera.config.tuned import PLAIN, beside, conditions, option_name, save_tuned
from tempera.data.captions import check_prompts
from tempera.decoding.interfaces import Drafter
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
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
    *("budget", "batch_size", "depths", "trees", "prices", "deltas", "limit", "offset"),
    *("repeats", "runs", "images", "timed", "result", "directory", "overrides", "plan"),
)
"""Options of conf/tune.yaml that are not those of an evaluation."""
KINDS: dict[str, Any] = {
    "budget": str,
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
    shared = [one for one in cfg.overrides if option_name(one) not in OWN]
    prompts, plan = instantiate(cfg.data), instantiate(cfg.plan)
    candidates = list(_candidates(cfg, shared, budget))
    base = _evaluation(shared, ("method=eagle",))
    build.check_draft(base)
    if (captions := build.build_captions(cfg)) is not None:
        check_prompts(prompts, captions)
    target: Any = build.build_target(base)
    build.make_fast(base, target)
    console = Console()
    with console.status("measuring") as status:
        predictions = predict(
            target,
            _drafters(cfg, shared, target),
            candidates,
            prompts,
            plan,
            lambda part: status.update(f"measuring: {part}"),
        )
    del target
    _print_predictions(console, [one for one in predictions if budget.admits(one)], budget)
    trials = _RealRuns(cfg, shared)
    outcomes = try_out(predictions, budget, cfg.runs, trials.run)
    best = fastest(outcomes, budget)
    result = trials.result(predictions, outcomes, best)
    write_json(Path(str(cfg.directory)) / "tune.json", result)
    save_tuned(
        Path(str(cfg.result)),
        best.prediction.options,
        conditions(base),
        {name: result[name] for name in ("budget", "batch_size", "chosen")},
    )
    console.print(trials.table(outcomes, best))
    _print_choice(console, beside(shared, best.prediction.options), cfg)
    return result


def _checked(cfg: DictConfig) -> Budget:
    """The budget; raises TemperaError for options that are wrong or do not suit the model."""
    if cfg.model.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"`{command('tune')}` chooses among methods for discrete tokens, but those of "
            f"model={cfg.model.name} are continuous: compare its methods with "
            "experiment=frontier_continuous."
        )
    check_suited(cfg)
    build.check_compile(cfg)
    for name, kind in KINDS.items():
        check_value(cfg, name, cfg[name], kind)
    for name in ("runs", "images", "timed"):
        if cfg[name] < 1:
            raise TemperaError(f"{name}={cfg[name]} is too small: give at least 1.")
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


def _evaluation(shared: Sequence[str], options: Sequence[str]) -> DictConfig:
    """An evaluation's configuration."""
    return composed("eval", [*shared, *options])


def _drafters(cfg: DictConfig, shared: Sequence[str], target: Any) -> dict[str, Drafter]:
    """The drafters by the name of their shape: chains and static trees of one draft, and EAGLE-2's
    trees.
    """
    first: Any = build.build_drafter(_evaluation(shared, ("method=eagle",)), target)
    found: dict[str, Drafter] = {
        written("depth", depth): StaticTreeDrafter(first.model, Tree.chain(depth))
        for depth in cfg.depths
    }
    for name in cfg.trees:
        found[written("tree", name)] = StaticTreeDrafter(first.model, Tree.named(name))
    found["eagle2"] = build.build_drafter(_evaluation(shared, ("method=eagle2",)), target)
    return found


def _candidates(cfg: DictConfig, shared: Sequence[str], budget: Budget) -> Iterator[Candidate]:
    """Every setting to predict: rules on chains, and the exact rule on trees."""
    deepest = max(cfg.depths, default=0)
    for options, knob, values, by_depth in _rules(cfg, budget):
        one = _evaluation(shared, options)
        for value in values:
            if knob:
                OmegaConf.update(one, knob, value)
                build.check_method(one)
            for depth in cfg.depths:
                rule: Any = build.build_rule(one, depth if by_depth else deepest)
                shape = written("depth", depth)
                yield Candidate(
                    (*options, shape, *([written(knob, value)] if knob else [])),
                    shape,
                    TestedRule(rule, not knob, depth if by_depth else None),
                )
    for name in cfg.trees:
        yield Candidate(("method=eagle", written("tree", name)), written("tree", name))
    yield Candidate(("method=eagle2",), "eagle2")


def _rules(
    cfg: DictConfig, budget: Budget
) -> Iterator[tuple[tuple[str, ...], str, Sequence[float], bool]]:
    """The methods on chains: their options, the option that is varied, its values, and whether
    their tests depend on the depth of the chain.
    """
    yield ("method=eagle",), "", [0.0], False
    yield ("method=block",), "", [0.0], True
    if budget.measure != "none":
        yield ("method=optimal_rsd",), "price", cfg.prices, False
        yield ("method=uniform_rsd",), "delta", cfg.deltas, False
        yield ("method=coolsd", "floor=1"), "delta", cfg.deltas, True


class _RealRuns:
    """Real runs, each in a directory of its own, beside one of plain autoregression."""

    def __init__(self, cfg: DictConfig, shared: Sequence[str]) -> None:
        self.cfg, self.directory = cfg, Path(str(cfg.directory)) / "runs"
        batches = [] if cfg.batch_size == 1 else [cfg.batch_size]
        self.options = [
            *shared,
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
            evaluate.main(composed_run("eval", beside(self.options, options), place))
        return place

    def result(
        self, predictions: Sequence[Prediction], outcomes: Sequence[Trial], best: Trial
    ) -> dict[str, Any]:
        """The content of tune.json."""
        return {
            "budget": self.cfg.budget,
            "batch_size": self.cfg.batch_size,
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


def _print_predictions(console: Console, predictions: Sequence[Prediction], budget: Budget) -> None:
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
