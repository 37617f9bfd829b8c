"""Options of the command line that have no effect beside others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, Node

from tempera.config.instantiate import takes
from tempera.errors import TemperaError


@dataclass(frozen=True)
class _Idle:
    """Options that are not read in some configurations.

    Attributes:
        options: their names; a name stands for the options below it too.
        when: whether they are not read.
        why: what follows "has no effect".
    """

    options: tuple[str, ...]
    when: Callable[[DictConfig], bool]
    why: str


NOT_TRIED = (
    "with budget=none, under which relaxed methods are not tried: give a budget, such as "
    "budget=kl:0.05"
)
ACCEPTANCE = "tempera.training.losses.AcceptanceLoss"
PARALLEL = "tempera.drafters.parallel_network.parallel_network"
IDLE = {
    "eval": (
        _Idle(
            ("data", "path", "offset"),
            lambda cfg: cfg.prompt is not None,
            "beside prompt=, which takes the place of data=: leave one out",
        ),
        _Idle(
            ("limit",),
            lambda cfg: cfg.prompt is not None and cfg.limit != 1,
            "beside prompt=, which makes one image: write the text into a file several times, and "
            "give data=file path=FILE",
        ),
        _Idle(
            ("speed.batches",),
            lambda cfg: cfg.speed.prompts == 0,
            "with speed.prompts=0, which skips all timing: give the number of prompts to time",
        ),
        _Idle(
            ("matching", "free_parameter"),
            lambda cfg: cfg.expected_length is None,
            "without expected_length=: give a length, or leave it out",
        ),
        _Idle(
            ("tree", "depth"),
            lambda cfg: (
                "tree" in cfg and not takes(cfg.drafter, "tree") and "depth" not in cfg.drafter
            ),
            "with this drafter, which has no draft tree: leave it out, or choose another drafter",
        ),
    ),
    "train_draft": (
        _Idle(
            ("limit",),
            lambda cfg: not _follows(cfg.train_data, "limit"),
            "with these training images: leave it out, or choose others with train_data=",
        ),
        _Idle(
            ("epochs",),
            lambda cfg: cfg.steps is not None and cfg.epochs is not None,
            "beside steps=, which is not null: leave one out, or give steps=null as well",
        ),
        _Idle(
            ("ttt_steps",),
            lambda cfg: cfg.ttt_steps != 0 and _is(cfg.draft, PARALLEL),
            "with draft=parallel, which learns all its slots in one step: leave it out",
        ),
        _Idle(
            ("ttt_decay",),
            lambda cfg: cfg.ttt_steps == 0 and not _is(cfg.draft, PARALLEL),
            "without unrolled steps: give ttt_steps= as well",
        ),
        _Idle(
            ("cfg_dropout",),
            lambda cfg: _is(cfg.loss, ACCEPTANCE),
            "with this loss, which takes every image with and without its caption: leave it out",
        ),
        _Idle(
            ("depth",),
            lambda cfg: cfg.decodes == 0,
            "with decodes=0: it is the depth of the decodes that measure the accepted length",
        ),
    ),
    "prepare": (
        _Idle(
            ("dtype", "guidance", "temperature", "top_k", "top_p"),
            lambda cfg: not takes(cfg.encoder, "target"),
            "with this encoder, which does not run the target: leave it out, or give "
            "encoder=target",
        ),
    ),
    "tune": (
        _Idle(("prices",), lambda cfg: _is_lossless(cfg) and bool(cfg.prices), NOT_TRIED),
        _Idle(("deltas",), lambda cfg: _is_lossless(cfg) and bool(cfg.deltas), NOT_TRIED),
    ),
    "report": (
        _Idle(
            ("project", "entity"),
            lambda cfg: cfg.publish is False,
            "without publish=true, which makes the W&B report: give it, or leave this out",
        ),
    ),
}
"""By script, options that it sometimes does not read."""


def check_effects(cfg: DictConfig, config_name: str, arguments: Sequence[str]) -> None:
    """Raise TemperaError for an argument that has no effect on a run by itself. In a sweep it may
    have one on another point.
    """
    for idle in IDLE.get(config_name, ()):
        given = [one for one in arguments if any(_names(one, idle.options))]
        if given and idle.when(cfg):
            raise TemperaError(f"`{given[-1]}` has no effect {idle.why}")


def _names(argument: str, options: Sequence[str]) -> Iterator[bool]:
    name = argument.partition("=")[0].lstrip("+")
    return (name == option or name.startswith(f"{option}.") for option in options)


def _follows(node: DictConfig, option: str) -> bool:
    """Whether a node has an argument that is this top-level option."""
    inner = node._get_node(option, validate_access=False)
    return isinstance(inner, Node) and inner._value() == f"${{{option}}}"


def _is_lossless(cfg: DictConfig) -> bool:
    """Whether `tempera-tune` tries exact methods alone."""
    return str(cfg.budget) == "none"


def _is(node: DictConfig, target: str) -> bool:
    return bool(node.get("_target_") == target)
