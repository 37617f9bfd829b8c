"""What `tempera-eval` is asked for: its configuration, checked and in plain objects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import NonNegativeInt

from tempera.commands.expected_length import Wanted
from tempera.config.compose import given, option_name
from tempera.config.instantiate import Part, from_options, instantiate, part
from tempera.config.nodes import plain
from tempera.config.parts import Parts
from tempera.config.scorers import build_scorers
from tempera.config.tracking import Tracking
from tempera.data.prompts import Prompt, described, one_prompt
from tempera.errors import TemperaError, shown
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.run_identity import about
from tempera.metrics.evaluators import Evaluator, NoEvaluator


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/eval.yaml says what each is."""

    directory: Path
    prompt: str | None
    expected_length: float | None
    replays: NonNegativeInt
    scores: str | None
    against: str | None
    optimized_metric: str | None
    diagnostics: bool
    verbose: bool
    dry_run: bool
    paper: Any
    choices: dict[str, str | None]
    overrides: list[str]


@dataclass(frozen=True)
class Asked:
    """An evaluation that is asked for. Nothing of it is read yet.

    Attributes:
        options: those that the command reads itself.
        parts: model and method.
        read: reads the prompts.
        limit: how many at most; None for all of the set.
        source: what run.json says of the prompts' source.
        wanted: the length to find; None to take the method's options as they are.
        protocol: how speed is measured.
        scorers: measure the pictures.
        tracking: makes the tracker.
        changes: what the run is named by.
        toy: whether the model comes with its files.
    """

    options: Options
    parts: Parts
    read: Callable[[], list[Prompt]]
    limit: int | None
    source: dict[str, Any]
    wanted: Wanted | None
    protocol: SpeedProtocol
    scorers: list[Evaluator]
    tracking: Tracking
    changes: dict[str, Any]
    toy: bool

    @classmethod
    def of(cls, cfg: DictConfig) -> "Asked":
        """What a configuration asks for.

        Raises:
            TemperaError: an option is not possible.
        """
        options, wanted, protocol, scorers = read_options(cfg)
        tracking = Tracking.of(cfg, "eval", options.choices, options.overrides)
        parts = Parts.of(cfg)
        source: dict[str, Any] = {"prompts": options.prompt, "preset": "prompt"}
        if options.prompt is None:
            source = {"prompts": plain(cfg.data, resolve=True), "preset": options.choices["data"]}
        return cls(
            options=options,
            parts=parts,
            read=reader(cfg),
            limit=part(cfg.data).options.get("limit"),
            source=source,
            wanted=wanted,
            protocol=protocol,
            scorers=scorers,
            tracking=tracking,
            changes=parts.changes(given(cfg)),
            toy=cfg.family.toy,
        )

    def notes(self, prompts: Sequence[Prompt], unread: Sequence[str]) -> dict[str, Any]:
        """What run.json says about the run beside its identity.

        Args:
            prompts: those of the run.
            unread: what the model does not understand of them.
        """
        return about(self.parts.placement.device, self.options.overrides) | {
            "paper": self.options.paper,
            "draft_from": self.parts.draft_from(),
            "data": self.source | described(prompts) | {"warnings": unread},
            "changes": self.changes,
        }


def read_options(
    cfg: DictConfig,
) -> tuple[Options, Wanted | None, SpeedProtocol, list[Evaluator]]:
    """What this command reads itself; a sweep reads it of all jobs before the first begins."""
    options = from_options(cfg, Options)
    _check_paper(options.paper)
    scorers = build_scorers(cfg, options.scores, options.against)
    if options.prompt is not None and not is_given(options, "metrics"):
        scorers[0] = NoEvaluator()
    return options, Wanted.of(cfg), _protocol(cfg, options), scorers


def reader(cfg: DictConfig) -> Callable[[], list[Prompt]]:
    """What reads the prompts."""
    data: Part[object] = part(cfg.data)
    return partial(_of_data, data) if cfg.prompt is None else partial(one_prompt, cfg.prompt)


def _of_data(data: Part[object]) -> list[Prompt]:
    """The prompts of `data=`, which may be a function of the user's own.

    Raises:
        TemperaError: they are no list of prompts, or none.
    """
    prompts = data.make()
    if isinstance(prompts, list) and prompts and all(isinstance(one, Prompt) for one in prompts):
        return prompts
    raise TemperaError(
        f"{data.described['_target_']} returned {shown(prompts)}: it must return a non-empty list "
        "of tempera.data.prompts.Prompt",
        option="data",
    )


def _protocol(cfg: DictConfig, options: Options) -> SpeedProtocol:
    """How speed is measured: that of one `prompt=` only on demand, as its metrics are, since it
    takes longer than the picture.
    """
    protocol: SpeedProtocol = instantiate(cfg.speed)
    asked = options.prompt is None or is_given(options, "speed.prompts")
    return protocol if asked else replace(protocol, prompts=0)


def is_given(options: Options, name: str) -> bool:
    """Whether the command line names an option, or one of its group."""
    given = [option_name(option) for option in options.overrides]
    return any(one == name or one.startswith(f"{name}.") for one in given)


def _check_paper(paper: Any) -> None:
    """Raise TemperaError if the option `paper` is no table's."""
    if paper is not None:
        from tempera.reporting.paper_results import find

        find(paper.get("table") if isinstance(paper, Mapping) else paper)
