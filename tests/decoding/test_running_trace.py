import pytest
import torch
from random_drafts import SMALL
from table_models import spied

from tempera.decoding.running_trace import _origins
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.exactness.tables import TableTarget, emit
from tempera.rules.standard import Exact


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL], ids=["chain", "tree"])
def test_every_token_has_its_origin(tree):
    output, heard = spied(tree)
    trace, parents = output.trace, tree.parents.tolist()
    for row in range(60):
        place, origin, logprob, rounds = [], [], [], []
        for number, (_, verdict, scores, emitted) in enumerate(heard):
            accepted = int(verdict.accepted[row])
            for index in range(int(emitted[row])):
                node = int(verdict.path[row, index - 1]) if index else -1
                drawn = RESAMPLED if node in parents else BONUS
                place.append(index + 1)
                rounds.append(number)
                origin.append(ACCEPTED if index < accepted else drawn)
                logprob.append(scores.p[row, 1 + node, verdict.tokens[row, index]].log().item())
        assert trace.place[row].tolist() == place
        assert trace.origin[row].tolist() == origin
        assert trace.logprob[row].tolist() == logprob
        assert trace.round[row].tolist() == rounds
    assert {BONUS, RESAMPLED, ACCEPTED} == set(trace.origin.flatten().tolist())


def test_origins_do_not_depend_on_whether_the_tree_is_the_rows_own():
    stops = torch.arange(1 + SMALL.nodes)
    own = Tree.from_parents(SMALL.parents.expand(len(stops), -1))
    shared = _origins(SMALL, stops, SMALL.max_depth + 1)
    assert shared.dtype == torch.int8
    for depth, mine, theirs in zip(
        [0, *SMALL.depths.tolist()], shared, _origins(own, stops, SMALL.max_depth + 1), strict=True
    ):
        assert mine[: depth + 1].equal(theirs[: depth + 1])
        assert mine[:depth].eq(ACCEPTED).all() and mine[depth] != ACCEPTED


def test_diagnostics_are_optional(monkeypatch):
    monkeypatch.setattr("tempera.decoding.running_trace.diagnose", None)
    output, _ = spied(Tree.chain(3))
    assert (output.trace.tv, output.trace.bound, output.trace.kl, output.trace.running_bound) == (
        None,
    ) * 4


def test_how_sure_the_target_is_of_the_next_token():
    """LANTERN, Figure 2c: at every token that is drawn, of the distribution it is drawn from."""
    target = TableTarget(12, 2)
    trace = emit(target, NoDraft(), Exact(), rows=4, diagnostics=True).trace
    first = target.table[:1].double()
    ranked = first.sort(descending=True).values
    for column, value in (
        (trace.top1, ranked[0, 0]),
        (trace.top10, ranked[0, :10].sum()),
        (trace.entropy, -(first * first.log()).sum()),
    ):
        torch.testing.assert_close(column[:, 0].double(), value.expand(4))
    assert trace.top1[:, 1].unique().numel() > 1
    assert trace.proximity.isnan().all()
    assert {"top1", "top10", "entropy", "proximity"} <= set(trace.summary())
