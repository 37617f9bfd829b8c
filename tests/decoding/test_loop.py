import pytest
import torch
from host_reads import HostReads
from near_codes import near_rules
from random_drafts import SMALL, Spy, new_sequences
from table_models import check_rows

from tempera.decoding.loop import decode, rounds
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.jacobi import scd
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.cactus import Cactus
from tempera.rules.fly import FLy
from tempera.rules.mentored import Mentored
from tempera.rules.mixture import Mixture
from tempera.rules.optimal import Priced
from tempera.rules.standard import BlockVerification, Exact, Relaxed
from tempera.rules.traversal import Traversal

RELAXED = Relaxed((1.5, 0.5))


def drafting(draft, tree):
    if tree == "dynamic":
        return DynamicTreeDrafter(draft, draft.vocab_size, branches=2, depth=3, nodes=6)
    return StaticTreeDrafter(draft, tree) if tree else NoDraft()


def tables(length=6, **options):
    target = TableTarget(4, length, **options)
    return target, TableDraft(target)


READ = {
    "ar": (None, RELAXED),
    "chain": (Tree.chain(3), RELAXED),
    "tree": (SMALL, RELAXED),
    "tree per row": ("dynamic", RELAXED),
    "block": (Tree.chain(3), BlockVerification()),
    "traversal": (SMALL, Traversal()),
    "priced": (SMALL, Priced(0.8)),
    "mentored": (SMALL, Mentored(0.1)),
    "cactus": (SMALL, Cactus(0.3)),
    "mixture": (SMALL, Mixture(0.3)),
    "fly": (Tree.chain(3), FLy(0.1, 1)),
    **{
        name: (SMALL, rule)
        for name, rule in near_rules(4).items()
        if "published" in name or name in ("lantern++ optimal", "grouped kl")
    },
}
SAMPLINGS = {
    "guided": Sampling(3.0, 0.9, 3, 0.9),
    "greedy": Sampling(1.0, 0),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_host_read_per_round(name, sampling, monkeypatch):
    tree, rule = READ[name]
    names = ["a", "b", "c"]
    seen, rounds = [], []

    def noted(escape, original):
        def call(self, *arguments):
            seen.append(escape)
            return original(self, *arguments)

        return call

    for escape in ("numpy", "cpu", "item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, escape, noted(escape, getattr(torch.Tensor, escape)))
    target, draft = tables(sampling=SAMPLINGS[sampling])
    drafter = drafting(draft, tree)
    emit(target, drafter, rule, rows=3)  # makes what is made once, such as tables of the tree
    seen.clear()
    with HostReads() as reads:
        decode(target, drafter, rule, RandomStreams(0, names), names, watch=[rounds.append])
    assert len(rounds) >= 2
    assert reads.count == {"tolist": 2 + len(rounds)}  # two are checks of the first round
    assert seen == []


def test_what_the_host_waits_for_is_counted():
    x = torch.arange(6)
    for reads in (
        lambda: x.repeat_interleave(x),
        lambda: x.bincount(),
        lambda: x.unique(),
        lambda: x.unique_consecutive(),
        lambda: x.nonzero(),
        lambda: x[x > 2],
        lambda: x[: x[3]],
        lambda: bool(x.any()),
        lambda: x.allclose(x),
        lambda: x.numpy(),
        lambda: x.tolist(),
    ):
        with HostReads() as counted:
            reads()
        assert counted.count.total() == 1, reads
    with HostReads() as counted:
        x.repeat_interleave(2)
        x.repeat_interleave(x, output_size=15)
        torch.where(x > 2, x, 0)
    assert not counted.count


@pytest.mark.parametrize("tree", [None, Tree.chain(4), SMALL], ids=["ar", "chain", "tree"])
def test_an_image_does_not_depend_on_its_batch(tree):
    target, draft = tables()
    check_rows(target, drafting(draft, tree), RELAXED)


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
        pieces = [verdict.tokens[row, : counts[row]] for _, verdict, _, counts in spy.heard]
        assert torch.cat(pieces).equal(output.tokens[row])


def test_a_perfect_draft_is_always_accepted():
    target = TableTarget(4, 8)
    drafter = StaticTreeDrafter(TableDraft(target, noise=0.0), Tree.chain(3))
    assert emit(target, drafter, Exact(), rows=50).trace.rounds.tolist() == [2] * 50
    assert emit(target, NoDraft(), Exact(), rows=5).trace.rounds.tolist() == [8] * 5
    assert emit(TableTarget(3, 1), NoDraft(), Exact(), rows=1).trace.rounds.tolist() == [1]


def test_whoever_watches_sees_every_round():
    """`decode` emits what the rounds emit, one after the other."""
    target, draft = tables()
    names, seen, pieces = ["a", "b"], [], [[], []]
    parts = target, drafting(draft, Tree.chain(2)), Exact()
    output = decode(*parts, RandomStreams(0, names), names, watch=[seen.append])
    for number, one in enumerate(rounds(*parts, RandomStreams(0, names), names)):
        assert one.sequences.rounds == number + 1
        for row, count in enumerate(one.sequences.emitted.tolist()):
            pieces[row] += one.verdict.tokens[row, :count].tolist()
        written = [*pieces[0], 0, 0, 0, 0, 0, 0][:6], [*pieces[1], 0, 0, 0, 0, 0, 0][:6]
        assert one.tokens.tolist() == list(written)
        assert torch.equal(one.scores.p, seen[number].scores.p)
    assert len(seen) == number + 1
    assert output.tokens.tolist() == pieces


def test_a_clock_runs_the_parts_of_all_rounds():
    target, draft = tables()
    names, clock = ["a", "b"], Clock()
    parts = target, drafting(draft, Tree.chain(2)), Exact()
    timed = decode(*parts, RandomStreams(0, names), names, run=clock)
    assert clock.rounds == int(timed.trace.rounds.max())
    assert set(clock.seconds) == {"draft", "target", "verify", "commit"}
    assert min(clock.seconds.values()) > 0
    assert timed.tokens.equal(decode(*parts, RandomStreams(0, names), names).tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("sick", ["target", "draft"])
def test_nan_is_reported_with_its_prompt(sick, temperature):
    target, draft = tables(sampling=Sampling(1.0, temperature))
    names = [f"prompt {i}" for i in range(40)]
    table = target.table if sick == "target" else draft.table
    table[1:5] = torch.nan  # after the first token, whatever it is
    drafter = StaticTreeDrafter(draft, Tree.chain(2))
    with pytest.raises(TemperaError, match=f"the {sick} gave NaN .* prompt 'prompt 0'"):
        decode(target, drafter, Exact(), RandomStreams(0, names), names)


class Undrawable(Exact):
    """A rule whose residual of the second token is no distribution."""

    def __init__(self, residual):
        self._residual = residual

    def residual(self, p, q, token, depth):
        right = super().residual(p, q, token, depth)
        return torch.where(depth.unsqueeze(-1) > 1, self._residual(p, q), right)


UNDRAWABLE = {
    "no mass": lambda p, q: 0 * p,
    "negative": lambda p, q: p - q,
    "nan": lambda p, q: torch.nan * p,
    "infinite": lambda p, q: p / 0,
}


@pytest.mark.parametrize("residual", UNDRAWABLE)
def test_a_rule_without_a_distribution_is_reported_with_its_prompt(residual):
    target, draft = tables()
    names = [f"prompt {i}" for i in range(40)]
    parts = target, StaticTreeDrafter(draft, Tree.chain(2)), Undrawable(UNDRAWABLE[residual])
    with pytest.raises(TemperaError, match="the rule gave prompt 'prompt .* no next token"):
        decode(*parts, RandomStreams(0, names), names)


def test_nan_of_a_finished_row_is_no_fault():
    images = new_sequences(2, 3, 0)

    def play(row, counts=(1, 1)):
        broken = torch.stack([torch.arange(2) == row, torch.arange(2) == 2])
        tokens = torch.zeros(2, 1, dtype=torch.int64)
        images.tell(images.append(tokens, torch.tensor(counts), broken), 1)
        return images.counts

    assert play(2, (0, 3)) == [0, 3]
    assert play(1) == [1, 3]
    with pytest.raises(TemperaError, match="the target gave NaN .* prompt '0'"):
        play(0)


def test_nan_is_told_before_its_image_is_given_away():
    """With its own name, also where the row takes another prompt."""
    images = new_sequences(2, 6, 0)

    def play(sick):
        broken = torch.zeros(2, 2, dtype=torch.int64)
        broken[1, 1] = sick
        tokens = torch.zeros(2, 2, dtype=torch.int64)
        images.tell(images.append(tokens, torch.tensor([2, 2]), broken), 2)

    play(True)
    assert images.finished == []  # nobody needs to know yet
    play(False)
    with pytest.raises(TemperaError, match="the draft gave NaN .* prompt '1'"):
        _ = images.finished
    play(True)
    with pytest.raises(TemperaError, match="the draft gave NaN .* prompt '1'"):
        images.begin([1], [2], ["another"])


def test_prompts_and_streams_must_match_in_number():
    target, _ = tables()
    with pytest.raises(TemperaError, match="2 prompts but 1 random streams"):
        decode(target, NoDraft(), Exact(), RandomStreams(0, ["a"]), ["a", "b"])


def test_the_tokens_are_pinned():
    """A change of these is a change of every image that anyone has made with a seed."""
    target, draft = tables()
    drafters = drafting(draft, Tree.chain(3)), drafting(draft, SMALL), scd(target, 3)
    tokens = [emit(target, one, Exact(), rows=2, seed=3).tokens.tolist() for one in drafters]
    assert tokens == [
        [[3, 3, 1, 1, 3, 0], [2, 0, 0, 2, 1, 0]],
        [[3, 0, 1, 1, 0, 0], [0, 2, 2, 3, 3, 1]],
        [[3, 2, 1, 1, 1, 2], [2, 2, 2, 2, 2, 3]],
    ]
