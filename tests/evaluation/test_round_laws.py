"""The rounds that are predicted from unused drafts are those of the real loop."""

from functools import cache
from typing import Any

import pytest
import torch

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trace import Trace
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation import round_laws
from tempera.evaluation.round_laws import AcceptNothing, RoundLaws, TestedRule, decoded
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.rules.optimal import Priced
from tempera.rules.standard import BlockVerification, Exact, Relaxed
from tempera.shapes.scenes import world_prompts

LENGTH, DEPTH, ROWS = 7, 4, 1500
CPU = torch.device("cpu")
RULES = {
    "exact": TestedRule(Exact()),
    "relaxed": TestedRule(Relaxed((2.0, 1.0, 0.5))),
    "priced": TestedRule(Priced(0.6)),
    "block": TestedRule(BlockVerification()),
    "block of 2": TestedRule(BlockVerification(), 2),
}


def table_target() -> TableTarget:
    return TableTarget(5, LENGTH, Sampling(guidance=1.0, top_k=3))


@cache
def outcomes() -> dict[TestedRule, torch.Tensor]:
    target = table_target()
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(DEPTH))
    rules = list(RULES.values())
    watcher = round_laws.law_watcher(rules)
    decoded(target, drafter, AcceptNothing(), world_prompts(ROWS), 0, CPU, [watcher])
    return round_laws.outcomes(watcher, rules)


def emitted(rule: Any, depth: int) -> Trace:
    target = table_target()
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(depth))
    streams = RandomStreams(7, [str(row) for row in range(ROWS)])
    return decode(target, drafter, rule, streams, [""] * ROWS, diagnostics=True).trace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth"),
    [
        *((name, depth) for name in ("exact", "relaxed", "priced") for depth in (1, 2, DEPTH)),
        ("block", DEPTH),
        ("block of 2", 2),
    ],
)
def test_predictions_are_those_of_the_loop(name: str, depth: int) -> None:
    """One measurement serves every rule and every shorter chain. Relaxed rules see the target's
    images, not their own: then 10% is what tuning promises.
    """
    tested = RULES[name]
    law = RoundLaws.predicted(outcomes()[tested], depth)
    trace = emitted(tested.rule, depth)
    rounds = trace.rounds.double()
    error = float(rounds.std()) / ROWS**0.5 / float(rounds.mean())
    allowed = 4 * 2**0.5 * error if tested.rule.exact else 0.1
    assert law.accepted_length == pytest.approx(LENGTH / float(rounds.mean()), rel=allowed)
    assert trace.kl is not None and trace.bound is not None
    for value, terms in (
        (law.kl_per_token, trace.kl.mean()),
        (law.tv_bound, trace.bound.sum(-1).mean()),
    ):
        assert value == pytest.approx(float(terms), rel=0.1, abs=1e-6)


@pytest.mark.slow
def test_rounds_of_a_tree_are_counted() -> None:
    target, tree = table_target(), Tree.from_paths([[0], [1], [0, 0]])
    drafter = StaticTreeDrafter(TableDraft(target), tree)
    law = RoundLaws.counted(decoded(target, drafter, Exact(), world_prompts(200), 0, CPU))
    assert law.rounds.shape == (200, LENGTH)
    assert 1 < law.accepted_length < 3
    assert law.kl_per_token == law.tv_bound == 0


def certain(kept: list[float], tokens: int) -> torch.Tensor:
    """Outcomes of one image whose rounds keep at least 0, 1, … drafts with these probabilities."""
    outcome = torch.zeros(1, tokens, 3, len(kept), dtype=torch.float64)
    outcome[:, :, 0] = torch.tensor(kept)
    outcome[:, :, 1, :-1] = 1
    outcome[:, :, 2, :-1] = 0.5
    return outcome


def test_the_law_of_rounds_by_hand() -> None:
    law = RoundLaws.predicted(certain([1, 1, 1], 8), 2)
    assert law.rounds.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]  # it ends inside its last round
    assert law.accepted_length == pytest.approx(8 / 3)
    assert law.tv_bound == pytest.approx(6)  # two tested drafts in each round
    assert law.kl_per_token == pytest.approx(3 / 8)
    assert law.median_rounds() == pytest.approx(3)
    shorter = RoundLaws.predicted(certain([1, 1, 1], 8), 1)
    assert shorter.accepted_length == 2 and shorter.tv_bound == pytest.approx(4)
    law = RoundLaws.predicted(certain([1, 0.25], 3), 1)
    # 3 rounds: the first two keep nothing; 2 rounds otherwise
    assert law.rounds[0].tolist() == pytest.approx([0, 1 - 0.75**2, 0.75**2])


def test_a_batch_lasts_as_long_as_its_longest_image() -> None:
    law = RoundLaws.predicted(certain([1, 0.5], 64), 1)
    assert law.median_rounds() == pytest.approx(64 / 1.5, rel=0.02)
    drawn = torch.multinomial(law.rounds[0], 16 * 2001, replacement=True).view(2001, 16)
    assert law.median_rounds(16) == pytest.approx(1 + float(drawn.amax(1).median()), abs=0.7)
    assert law.median_rounds(16) > law.median_rounds(1)
