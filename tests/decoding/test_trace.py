import pytest
import torch
from random_drafts import SMALL
from table_models import spied

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.trace import Trace, steps
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.pipeline import Decoded, records
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.standard import Exact


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL], ids=["chain", "tree"])
def test_counts_by_depth(tree):
    output, heard = spied(tree)
    trace = output.trace
    tested, accepted = torch.zeros(60, 3, dtype=torch.int64), torch.zeros(60, 3, dtype=torch.int64)
    for row in range(60):
        for _, verdict, _, emitted in heard:
            for index in range(min(int(emitted[row]), 3)):
                node = int(verdict.path[row, index - 1]) if index else -1
                tested[row, index] += node in tree.parents.tolist()
                accepted[row, index] += index < int(verdict.accepted[row])
    assert trace.tested.equal(tested)
    assert trace.accepted.equal(accepted)
    torch.testing.assert_close(trace.accepted_length, 7 / trace.rounds)
    torch.testing.assert_close(trace.tau, accepted.sum(1) / trace.rounds)
    assert trace.depth.eq(2).sum(1).equal(accepted[:, 1])


def test_plain_autoregression():
    output = emit(TableTarget(4, 5), NoDraft(), Exact(), rows=3, diagnostics=True)
    trace = output.trace
    assert trace.accepted_length.tolist() == [1] * 3
    assert trace.tau.tolist() == [0] * 3
    assert trace.tested.shape == trace.accepted.shape == (3, 0)
    assert trace.origin.eq(BONUS).all()
    assert trace.tv.isnan().all()
    assert trace.bound.eq(0).all()
    assert trace.kl.eq(0).all()


def test_summaries_have_one_number_per_row():
    output, _ = spied(SMALL, diagnostics=True)
    summary = output.trace.cpu().summary()
    assert {values.shape for values in summary.values()} == {(60,)}
    torch.testing.assert_close(summary["perplexity"], (-summary["logprob"] / 7).exp())
    torch.testing.assert_close(summary["tv_bound"], output.trace.bound.sum(-1))
    assert summary["tv"].isfinite().all()
    always = {"rounds", "accepted_length", "tau", "logprob", "perplexity"}
    plain = spied(SMALL)[0].trace
    assert set(plain.summary()) == always < set(summary)
    assert (plain.tv, plain.bound, plain.kl, plain.figures) == (None, None, None, {})


def test_a_joined_trace_has_the_rows_of_its_batches():
    one, other = (spied(Tree.chain(3), rows=rows, diagnostics=True)[0].trace for rows in (2, 3))
    both = Trace.joined([one, other])
    left, right = one.tensors(), other.tensors()
    expected = {name: torch.cat([left[name], right[name]]) for name in left}
    assert len(expected) == 10
    torch.testing.assert_close(both.tensors(), expected, equal_nan=True)
    assert both.max_depth == Trace.joined([one]).max_depth == 3


def test_tenths_of_an_image_in_the_order_of_decoding():
    trace = spied(Tree.chain(3))[0].trace
    assert trace.step.shape[1] == 7
    which = trace.origin == ACCEPTED
    tenths = trace.by_tenth(which)  # the seven tokens begin in tenths 0, 1, 2, 4, 5, 7 and 8
    assert torch.equal(tenths[:, [0, 1, 2, 4, 5, 7, 8]], which.long())
    assert not tenths[:, [3, 6, 9]].any()


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
        assert trace.step[row].tolist() == place
        assert trace.origin[row].tolist() == origin
        assert trace.logprob[row].tolist() == logprob
        assert trace.round[row].tolist() == rounds
    assert {BONUS, RESAMPLED, ACCEPTED} == set(trace.origin.flatten().tolist()) == {0, 1, 2}


def test_a_place_may_be_beyond_two_bytes():
    origin = torch.full((1, 2**15 + 2), ACCEPTED, dtype=torch.int8)
    assert steps(origin)[0, -1] == 2**15 + 2


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
        (trace.collision, first.square().sum()),
    ):
        torch.testing.assert_close(column[:, 0].double(), value.expand(4))
    assert trace.top1[:, 1].unique().numel() > 1
    assert {"top1", "top10", "entropy", "collision"} <= set(trace.summary())


class Noted(Exact):
    """Notes how sure the target is, under a name that nobody knows."""

    def figures(self, round):
        return {"sureness": round.scores.p.amax(-1)[:, :1].expand(-1, 3)}


def test_figures_of_a_rule_of_ones_own_are_in_the_trace_and_in_the_records():
    target = TableTarget(4, 5)
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(2))
    output = emit(target, drafter, Noted(), rows=3, diagnostics=True)
    sureness = output.trace.figures["sureness"]
    assert sureness.shape == (3, 5) and sureness.min() > 0.2
    assert output.trace.summary()["sureness"].equal(sureness.mean(-1))
    assert Trace.joined([output.trace.rows(torch.arange(2)), output.trace.cpu()]).figures[
        "sureness"
    ].shape == (5, 5)
    named = [Prompt(str(row), "a") for row in range(3)]
    batch = Decoded([0, 1, 2], named, output, [1.0] * 3, 3)
    row = records(batch)[0]
    assert row["sureness_by_place"] == sureness[0].tolist()
    assert row["sureness"] == pytest.approx(float(sureness[0].mean()))
