"""`tempera-tune`: the fastest setting within a budget on this machine."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from tempera.commands import evaluate
from tempera.config import build
from tempera.config.compose import composed, composed_run, option_name, written
from tempera.config.instantiate import from_options, instantiate, parsed
from tempera.config.options import Role, role_of
from tempera.data.prompts import check_prompts
from tempera.decoding.interfaces import Drafter
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
from tempera.reporting.collect import Run, collect
from tempera.reporting.tables import Output, cell, number, show
from tempera.runtime.files import write_json
from tempera.runtime.installation import command

PLAIN = ("method=ar",)
"""The options of plain autoregression, which may be the fastest setting."""
OWN_DRAFT = ("method=parallel", "drafter=parallel", "method=medusa", "drafter=medusa")
"""Options of settings whose draft is not the one that `drafter.path` names."""


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


DRAFTS = (
    _DraftKind("eagle", "drafter.path", dynamic=("eagle2",)),
    _DraftKind("parallel", "++model.parallel", others=("drafter=parallel",)),
    _DraftKind("medusa", "++model.medusa", others=("drafter=medusa",)),
)


def main(cfg: DictConfig) -> dict[str, Any]:
    """Predict, run the best settings, print a table and the command to use, and return what it
    writes to tune.json.
    """
    budget = _checked(cfg)
    settings = _Settings(cfg, lossless=budget.measure == "none")
    prompts = instantiate(cfg.data)
    plan = from_options(cfg, TuningPlan)
    candidates = list(settings.candidates())
    base = settings.evaluation((DRAFTS[0].exact,))
    if (captions := build.build_captions(cfg)) is not None:
        check_prompts(prompts, captions)
    target: Any = build.build_fast_target(base)
    drafters = settings.drafters(target)
    known = [one for one in candidates if one.shape in drafters]
    console = Output()
    with console.status("measuring") as status:
        predictions = predict(
            target, drafters, known, prompts, plan, PLAIN, lambda part: status.update(part)
        )
    del target, drafters
    for name, outcome in settings.tried.items():
        console.print(f"{name}: {outcome}", highlight=False, soft_wrap=True)
    runs = _RealRuns(settings)
    outcomes = try_out(predictions, budget, cfg.runs, runs)
    best = fastest(outcomes, budget)
    about = {"budget": cfg.budget, "batch_size": cfg.batch_size, "drafters": settings.tried}
    about["chosen"] = runs.summary(best.options)
    result = about | {
        "runs": [runs.summary(one.options) for one in outcomes],
        "predictions": [asdict(one) for one in predictions],
    }
    write_json(Path(str(cfg.directory)) / "tune.json", result)
    compared = runs.compared()
    show(compared, f"predicted → measured, 95% intervals; {cfg.images} images")
    use = shlex.join(settings.arguments(best.options))
    console.print(f"use: {command('eval')} {use}", highlight=False, soft_wrap=True)
    values = {"use": use, **asdict(best)}
    place = Path(str(cfg.directory))
    build.track(cfg, place, "tune", values, compared, [place / "tune.json"])
    return result


def _checked(cfg: DictConfig) -> Budget:
    """The budget; raises TemperaError for options that are wrong or do not suit the model."""
    build.check_discrete(cfg, f"`{command('tune')}` chooses among methods for discrete tokens")
    for name in cfg.trees:
        Tree.named(name)  # raises TemperaError
    parsed(cfg.tracking)
    instantiate(cfg.metrics).check(cfg.model.name)
    return Budget.parse(cfg.budget)


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
        self.cfg, self.lossless = cfg, lossless
        self.shared = [one for one in cfg.overrides if not _is_own(option_name(one))]
        self.drafts, self.tried = list(DRAFTS), dict[str, str]()
        for draft in DRAFTS:
            try:
                build.check_draft(self.evaluation((draft.exact,)), draft.path)
                self.tried |= dict.fromkeys((draft.name, *draft.dynamic), "tried")
            except TemperaError as problem:
                self._leave_out(draft, problem)

    def _leave_out(self, draft: _DraftKind, problem: TemperaError) -> None:
        """Go on without a draft, unless the user named it or there is no other."""
        named = any(option_name(given) == option_name(draft.path) for given in self.cfg.overrides)
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
        kept = [one for one in self.shared if not (dropped and one.startswith(dropped))]
        return [*kept, *options]

    def evaluation(self, options: Sequence[str]) -> DictConfig:
        """The configuration of an evaluation with a setting."""
        return composed("eval", self.arguments(options))

    def drafters(self, target: Any) -> dict[str, Drafter]:
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

    def _drafters_of(self, draft: _DraftKind, target: Any) -> dict[str, Drafter]:
        found: dict[str, Drafter] = {}
        trees = {written("depth", depth): Tree.chain(depth) for depth in self.cfg.depths}
        trees |= {written("tree", name): Tree.named(name) for name in self.cfg.trees}
        by_depth = sorted(trees, key=lambda name: trees[name].max_depth)
        for shallowest in by_depth[:1]:
            first: Any = build.build_drafter(self.evaluation((draft.exact, shallowest)), target)
        for name, tree in trees.items():
            try:
                model = first.model.for_depth(tree.max_depth)
                found[f"{draft.name} {name}"] = StaticTreeDrafter(model, tree)
            except DraftTooShort as problem:
                self.tried[f"{draft.name}, {name}"] = f"left out: it drafts {problem.slots} tokens"
        for method in draft.dynamic:
            dynamic = self.evaluation((f"method={method}",))
            found[method] = build.build_drafter(dynamic, target)
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
        for options, knob, values, by_depth in self._rules(draft):
            cfg = self.evaluation(options)
            for value in values:
                if knob:
                    OmegaConf.update(cfg, knob, value)
                for depth in self.cfg.depths:
                    OmegaConf.update(cfg, "depth", depth if by_depth else deepest)
                    rule = build.build_rule(cfg)
                    chain = written("depth", depth)
                    yield Candidate(
                        (*options, chain, *([written(knob, value)] if knob else [])),
                        draft.name,
                        f"{draft.name} {chain}",
                        TestedRule(rule, not knob, depth if by_depth else None),
                    )

    def _rules(
        self, draft: _DraftKind
    ) -> Iterator[tuple[tuple[str, ...], str, Sequence[float], bool]]:
        """The methods on chains: their options, the option that is varied, its values, and whether
        their tests depend on the depth of the chain.
        """
        prices, deltas = self.cfg.prices, self.cfg.deltas
        yield (draft.exact,), "", [0.0], False
        yield ("method=block", *draft.others), "", [0.0], True
        if not self.lossless:
            yield ("method=optimal_rsd", *draft.others), "price", prices, False
            yield ("method=uniform_rsd", *draft.others), "delta", deltas, False
            yield ("method=coolsd", *draft.others, "floor=1"), "delta", deltas, True


class _RealRuns:
    """Real runs, each in a directory of its own."""

    def __init__(self, settings: _Settings) -> None:
        self.settings, self.cfg = settings, settings.cfg
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
        evaluate.main(composed_run("eval", arguments, place))
        (row,), _ = collect([place])
        self.found[options] = prediction, row
        speed, kl, tv = (row.value(name) for name in (self.speed, "kl_per_token", "tv_bound"))
        return replace(prediction, speedup=speed, kl_per_token=kl, tv_bound=tv)

    def summary(self, options: tuple[str, ...]) -> dict[str, Any]:
        """What tune.json says about a run."""
        one, row = self.found[options]
        return {"predicted": asdict(one), "measured": row.metrics, "directory": row.directory}

    def compared(self) -> pd.DataFrame:
        """Predicted against measured, as text."""
        rows = []
        for one, row in self.found.values():
            compared = {
                "speed-up": (one.speedup, self.speed, ".2f"),
                "accepted length": (one.accepted_length, "accepted_length", ".2f"),
                "KL per token": (one.kl_per_token, "kl_per_token", ".4f"),
            }
            cells = {
                heading: f"{number(value, form)} → {cell(row.metrics[key], form)}"
                for heading, (value, key, form) in compared.items()
            }
            rows.append({"setting": " ".join(one.options)} | cells)
        return pd.DataFrame(rows)
