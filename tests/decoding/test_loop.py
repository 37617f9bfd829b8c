import inspect

import pytest
import torch
from host_reads import HostReads
from near_codes import near_rules
from random_drafts import SMALL, RowTrees, Spy

from tempera.decoding import loop as module
from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.loop import Images, decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock, timed
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.optimal import Priced
from tempera.rules.standard import BlockVerification, Exact, Relaxed


def tables(length=6, **options):
    target = TableTarget(4, length, **options)
    return target, TableDraft(target)


@pytest.mark.parametrize(
    "tree", [Tree.empty(), Tree.chain(3), SMALL, None], ids=["ar", "chain", "tree", "tree per row"]
)
@pytest.mark.parametrize("diagnostics", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(3.0, 0.9, 3, 0.9), Sampling(1.0, 0)],
    ids=["plain", "guided", "greedy"],
)
def test_one_host_read_per_round(tree, diagnostics, sampling, monkeypatch):
    for escape in ("numpy", "cpu", "item", "__bool__"):
        original = getattr(torch.Tensor, escape)
        monkeypatch.setattr(
            torch.Tensor,
            escape,
            lambda self, *a, _name=escape, _do=original, **k: (
                seen.append(_name),
                _do(self, *a, **k),
            )[1],
        )
    target, draft = tables(sampling=sampling)
    drafter = (
        RowTrees(draft)
        if tree is None
        else StaticTreeDrafter(draft, tree)
        if tree.nodes
        else NoDraft()
    )
    rounds, seen = [], []
    emit(
        target, drafter, Relaxed((1.5, 0.5)), rows=3
    )  # makes what is made once: tables of the tree, the schedule on the device
    seen.clear()
    names = [str(row) for row in range(3)]
    streams = RandomStreams(0, names)
    with HostReads() as reads:
        decode(
            target,
            drafter,
            Relaxed((1.5, 0.5)),
            streams,
            names,
            diagnostics=diagnostics,
            observe=lambda images, *_: rounds.append(images.rounds),
        )
    assert len(rounds) >= 2
    assert reads.count == {"tolist": len(rounds)}
    assert seen == []


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        (BlockVerification(), Tree.chain(3)),
        (Priced(0.8), SMALL),
        *[(rule, SMALL) for rule in near_rules(4).values()],
    ],
    ids=str,
)
def test_no_rule_reads_more(rule, tree, temperature):
    target, draft = tables(sampling=Sampling(1.0, temperature))
    drafter, rounds, names = StaticTreeDrafter(draft, tree), [], ["a", "b", "c"]
    emit(
        target, drafter, rule, rows=3
    )  # makes what is made once: tables of the tree and of neighbours
    streams = RandomStreams(0, names)
    with HostReads() as reads:
        decode(
            target,
            drafter,
            rule,
            streams,
            names,
            diagnostics=True,
            observe=lambda images, *_: rounds.append(images.rounds),
        )
    assert reads.count == {"tolist": len(rounds)}


def test_the_counter_of_host_reads_works():
    with HostReads() as reads:
        x = torch.ones(3)
        _ = x[x > 0], bool(x.sum() > 0), x.sum().item(), x.nonzero()
    assert sum(reads.count.values()) >= 4


def test_the_loop_is_short_enough_to_read():
    """Algorithm 1 stands in `decode` itself, not behind it."""
    source = inspect.getsource(module.decode)
    assert len(source.partition('"""')[2].partition('"""')[2].splitlines()) <= 25
    for step in ("propose(", "score(", "verify(", "append(", "commit(", "observe(", "read("):
        assert source.count(step) >= 1


@pytest.mark.parametrize("tree", [Tree.empty(), Tree.chain(4), SMALL], ids=["ar", "chain", "tree"])
def test_an_image_does_not_depend_on_its_batch(tree):
    target, draft = tables()
    drafter = StaticTreeDrafter(draft, tree) if tree.nodes else NoDraft()
    rule = Relaxed((1.5, 0.5))
    names = [f"prompt {i}" for i in range(6)]
    together = decode(target, drafter, rule, RandomStreams(5, names), names, diagnostics=True)
    backwards = decode(target, drafter, rule, RandomStreams(5, names[::-1]), names[::-1])
    assert backwards.tokens.flip(0).equal(together.tokens)
    for row, name in enumerate(names):
        alone = decode(target, drafter, rule, RandomStreams(5, [name]), [name], diagnostics=True)
        assert alone.tokens[0].equal(together.tokens[row])
        for field in ("place", "origin", "logprob", "bound", "kl"):
            torch.testing.assert_close(
                getattr(alone.trace, field)[0], getattr(together.trace, field)[row]
            )


def test_rows_finish_independently_and_tokens_past_the_image_are_dropped():
    target, draft = tables(length=7)
    spy = Spy(StaticTreeDrafter(draft, Tree.chain(3)))
    output = emit(target, spy, Exact(), rows=200)
    emitted = torch.stack([emitted for *_, emitted in spy.heard], 1)
    accepted = torch.stack([verdict.accepted for _, verdict, *_ in spy.heard], 1)
    before = emitted.cumsum(1) - emitted
    assert emitted.equal(torch.minimum(accepted + 1, 7 - before))
    assert emitted.sum(1).eq(7).all()
    assert output.trace.rounds.equal((emitted > 0).sum(1))
    assert output.trace.rounds.unique().numel() > 1
    assert (emitted[:, -1] == 0).any()
    for row in range(200):
        pieces = [
            verdict.tokens[row, :count]
            for _, verdict, _, counts in spy.heard
            for count in [int(counts[row])]
        ]
        assert torch.cat(pieces).equal(output.tokens[row])


def test_plain_autoregression_emits_one_token_per_round():
    target, _ = tables()
    output = emit(target, NoDraft(), Exact(), rows=5)
    assert output.trace.rounds.tolist() == [6] * 5


def test_a_perfect_draft_is_always_accepted():
    target = TableTarget(4, 8)
    output = emit(
        target, StaticTreeDrafter(TableDraft(target, noise=0.0), Tree.chain(3)), Exact(), rows=50
    )
    assert output.trace.rounds.tolist() == [2] * 50


def test_draws_of_a_round_are_distinct():
    class Recorder(RandomStreams):
        def next(self, count):
            self.counts = [*getattr(self, "counts", []), count]
            return super().next(count)

    target, draft = tables()
    names = ["a", "b"]
    streams = Recorder(0, names)
    decode(target, StaticTreeDrafter(draft, SMALL), Exact(), streams, names)
    assert set(streams.counts) == {7 + 7 + 1}  # drafting, acceptance, and the next token


def test_observers_see_every_round_and_clocks_its_parts():
    target, draft = tables()
    message, clock, names = [], Clock(), ["a", "b"]
    drafter = StaticTreeDrafter(draft, Tree.chain(2))
    decode(
        *timed(target, drafter, clock),
        Exact(),
        RandomStreams(0, names),
        names,
        observe=lambda images, *_: message.append((images.rounds, images.written)),
    )
    assert [rounds for rounds, _ in message] == list(range(1, len(message) + 1))
    assert message[-1][1] == 12
    assert set(clock.seconds) == {"draft", "target", "verify", "commit"}
    assert clock.total == pytest.approx(sum(clock.seconds.values()))


@pytest.mark.parametrize("sick", ["target", "draft"])
def test_nan_is_reported_with_its_prompt(sick):
    target, draft = tables()
    names = [f"prompt {i}" for i in range(40)]
    table = target.table if sick == "target" else draft.table
    table[1:5] = torch.nan  # after the first token, whatever it is
    with pytest.raises(
        TemperaError, match=f"the {sick} gave NaN probabilities for prompt 'prompt 0'"
    ):
        decode(
            target, StaticTreeDrafter(draft, Tree.chain(2)), Exact(), RandomStreams(0, names), names
        )


def test_nan_of_a_finished_row_is_no_fault():
    images = Images(RandomStreams(0, ["a", "b"]), 3, 0)
    images.lengths[1] = 3
    draft = Draft(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, 0), Tree.empty())
    p = torch.full((2, 1, 4), 0.25)

    def play(row):
        p[row] = torch.nan
        scores = Scores(p, p)
        images.append(draft, verify(draft, scores, Exact(), torch.full((2, 1), 0.5)), scores)
        return images.read(), images.written

    assert play(1) == (3, 4)
    with pytest.raises(TemperaError, match="the target gave NaN .* prompt 'a'"):
        play(0)


def test_an_image_may_have_a_single_token():
    output = emit(TableTarget(3, 1), NoDraft(), Exact(), rows=1)
    assert output.trace.rounds.tolist() == [1]


def test_prompts_and_streams_must_match_in_number():
    target, _ = tables()
    with pytest.raises(TemperaError, match="2 prompts but 1 random streams"):
        decode(target, NoDraft(), Exact(), RandomStreams(0, ["a"]), ["a", "b"])


def test_the_tokens_are_pinned():
    """A change of these is a change of every image that anyone has made with a seed."""
    target, draft = tables()
    tokens = [
        emit(target, StaticTreeDrafter(draft, tree), Exact(), rows=2, seed=3).tokens.tolist()
        for tree in (Tree.chain(3), SMALL)
    ]
    assert tokens == [
        [[3, 3, 1, 1, 3, 0], [2, 0, 0, 2, 1, 0]],
        [[3, 0, 1, 1, 0, 0], [0, 2, 2, 3, 3, 1]],
    ]
