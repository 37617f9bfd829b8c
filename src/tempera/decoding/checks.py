"""What the parts of a round owe each other, checked in the first round of a batch: a mistake in a
part of one's own is told in a sentence that names the part, and nothing is decoded with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Drafter, DraftModel, Rule, Scores, Target
from tempera.decoding.probabilities import at
from tempera.decoding.sequences import Sequences, version
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError, shown

ROUNDING = 1e-3
"""How far the sum of float32 probabilities may be from 1."""
DRAFTER = ("nodes", "depth", "propose", "compiles")
TARGET = ("length", "vocab_size", "compiled", "begin", "score", "commit")


def check_parts(target: object, drafter: object, rule: object, rows: int | None) -> None:
    """Raise TemperaError for parts that are something else, and for fewer than one row."""
    if not isinstance(rule, Rule):
        raise TemperaError(f"the rule is {shown(rule)}: give a tempera.Rule, as in tempera.Exact()")
    if isinstance(drafter, DraftModel):
        raise TemperaError(
            f"{type(drafter).__name__} is a draft model: give a drafter that drafts with it, as in "
            "StaticTreeDrafter(model, tree)"
        )
    if isinstance(drafter, type):
        raise TemperaError(f"{drafter.__name__} is a class: give an instance of it as the drafter")
    for who, part, needs in (("drafter", drafter, DRAFTER), ("target", target, TARGET)):
        for name in needs:
            if not hasattr(part, name):
                raise TemperaError(
                    f"{type(part).__name__} has no `{name}`, which every {who} needs: add it"
                )
    if rows is not None and rows < 1:
        raise TemperaError(f"rows={rows} is not valid: give 1 or more")


def check_draft(drafter: Drafter, draft: Draft, target: Target, sequences: Sequences) -> None:
    """Raise TemperaError unless a draft has at most the nodes and the depth that its drafter
    declares, tokens of the target, and distributions q.
    """
    who = f"{type(drafter).__name__}.propose"
    model = getattr(drafter, "model", None)
    if isinstance(model, DraftModel):
        who += f" with {type(model).__name__}"
    _check_type(who, draft, Draft)
    tree, device = draft.tree, sequences.device
    if tree.nodes > drafter.nodes or tree.max_depth > drafter.depth:
        raise TemperaError(
            f"{who} returned a tree with nodes={tree.nodes} and depth={tree.max_depth}, but the "
            f"drafter declares nodes={drafter.nodes} and depth={drafter.depth}: declare the "
            "largest tree that it drafts"
        )
    shape = len(sequences.lengths), tree.nodes
    _check_tensor(f"tokens of {who}", draft.tokens, shape, torch.int64, device)
    outside = (draft.tokens < 0) | (draft.tokens >= target.vocab_size)
    faults = {f"{who} drafted tokens outside of 0 … {target.vocab_size - 1}": outside.any()}
    if draft.q is not None:
        name, shape_of_q = f"q of {who}", (*shape, target.vocab_size)
        _check_tensor(name, draft.q, shape_of_q, torch.float32, device)
        faults |= _not_distributions(name, draft.q, ~draft.has_nan)
    _raise_any(faults)


def check_scores(
    target: Target, rule: Rule, draft: Draft, scores: Scores, uniforms: Tensor
) -> None:
    """Raise TemperaError unless p are distributions over the target's tokens, and what a rule that
    tests tokens one by one returns for the first node fits them.
    """
    who = f"{type(target).__name__}.score"
    _check_type(who, scores, Scores)
    p = scores.p
    shape = len(draft.tokens), 1 + draft.tree.nodes, target.vocab_size
    _check_tensor(f"p of {who}", p, shape, torch.float32, draft.tokens.device)
    faults = _not_distributions(f"p of {who}", p, ~scores.has_nan)
    drafted = draft.tree.nodes and scores.untempered is None
    if drafted and isinstance(rule, TokenRule) and type(rule).walk is TokenRule.walk:
        faults |= _faults_of(rule, draft, scores, uniforms)
    _raise_any(faults)


def _faults_of(
    rule: TokenRule, draft: Draft, scores: Scores, uniforms: Tensor
) -> dict[str, Tensor]:
    """What is wrong with f and the residual of the root's first child."""
    p = scores.p[:, 0]
    q, token, depth = (part[:, 0] for part in draft.at(draft.tree.ids[:1], p.shape[-1]))
    named = type(rule).__name__
    with unchanged(f"{named}.accept", p=p, q=q, depth=depth):
        f = rule.accept(p, q, depth)
    _check_tensor(f"what {named}.accept returned", f, p.shape, torch.float32, p.device)
    with unchanged(f"{named}.residual", p=p, q=q, token=token, depth=depth):
        residual = rule.residual(p, q, token, depth)
    name = f"what {named}.residual returned"
    _check_tensor(name, residual, p.shape, torch.float32, p.device)
    whole = ~(scores.has_nan | draft.has_nan)
    f = torch.where(q > 0, f, 0.0)
    wrong = ~((f >= 0) & (f <= 1)).all(-1)
    rejected = uniforms[:, 0] >= at(f, token)
    return {
        f"{named}.accept returned values outside of 0 … 1": (whole & wrong).any(),
        **_not_distributions(name, residual, whole & rejected),
    }


def predicted(model: DraftModel, method: str, returned: object, *places: int) -> tuple[Tensor, Any]:
    """What a method of a draft model returned: Q, float32 [*places, V], and what the next call
    needs.

    Raises:
        TemperaError: it returned something else.
    """
    who = f"{type(model).__name__}.{method}"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TemperaError(f"{who} must return two values: Q, and the state that `expand` needs")
    q, above = returned
    if q.shape[:-1] != places:
        raise TemperaError(
            f"{who} returned Q of {list(q.shape)}, not [{', '.join(map(str, places))}, V]"
        )
    return q, above


@contextmanager
def unchanged(who: str, **given: Tensor) -> Iterator[None]:
    """Raise TemperaError if what a part was given is changed in place inside the `with` block."""
    before = {name: version(tensor) for name, tensor in given.items()}
    yield
    for name, tensor in given.items():
        if version(tensor) != before[name]:
            raise TemperaError(f"{who} changed its argument `{name}` in place: change a copy of it")


def _check_type(who: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TemperaError(
            f"{who} returned an object of {type(value).__name__}: return a {kind.__name__}"
        )


def _check_tensor(
    name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise TemperaError unless a value is a tensor of this shape and dtype on this device."""
    found = f"an object of {type(value).__name__}"
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)} on {value.device}"
    wanted = f"{dtype} {list(shape)} on {device}"
    if found != wanted:
        raise TemperaError(f"{name} should be {wanted}, but it is {found}")


def _not_distributions(name: str, values: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Whether some of these rows, bool [B], are no distributions, [B, ..., V]; and what to say."""
    fits = (values.amin(-1) >= 0) & ((values.sum(-1) - 1).abs() <= ROUNDING)
    fits = fits.flatten(1).all(-1) if fits.dim() > 1 else fits
    return {
        f"{name} is not a probability distribution: it has negative numbers or NaN, or does not "
        "sum to 1": (rows & ~fits).any()
    }


def _raise_any(faults: dict[str, Tensor]) -> None:
    """Raise TemperaError for the first fault that there is."""
    for sentence, found in zip(faults, torch.stack(list(faults.values())).tolist(), strict=True):
        if found:
            raise TemperaError(sentence)
