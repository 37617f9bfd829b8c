"""The Jacobi family: the law of every method, the definition of every initialisation, and real
networks.
"""

from collections import Counter

import pytest
import torch
from cases import slow_but
from host_reads import HostReads
from published_code.sjd import published
from random_drafts import Spy
from table_models import check_rows
from tiny_networks import PROMPTS, tiny_target
from window_laws import INITIALISATIONS, check_window, local_target

import tempera
from tempera.decoding.interfaces import Draft
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling, at, normalise, one_hot, sample
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.jacobi import (
    Guesses,
    Stale,
    by_shared_noise,
    continued,
    jacobi,
    reused,
    scd,
    sjd,
    sjd_pac,
)
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.exactness.tables import emit
from tempera.rules.standard import Exact, Match, Relaxed


def continuation(target, window, initialisation="random"):
    return sjd_pac(target, window, initialisation, proactive=False)


METHODS = {
    "jacobi": (jacobi, Match()),
    "sjd": (sjd, Exact()),
    "scd": (scd, Exact()),
    "continuation": (continuation, Exact()),
}
GUIDED, TOP_K, TOP_P, GREEDY = (
    Sampling(3.0, 1.7),
    Sampling(2.0, 1.3, 2),
    Sampling(1.0, 1.0, 0, 0.8),
    Sampling(1.0, 0),
)
ROWS = 40_000


# Laws


CASES = [
    # window, initialisation, grid, options; with a window smaller than what remains at first, most
    # positions enter later
    (2, "random", (2, 3), {}),
    (2, "horizontal_repeat", (2, 3), {}),
    (2, "vertical_repeat", (2, 3), {}),
    (2, "horizontal_sample", (2, 2), {"sampling": GUIDED}),
    (2, "vertical_sample", (2, 3), {}),
    (1, "vertical_sample", (2, 3), {"vocab_size": 2, "seed": 1}),  # looks back beyond the window
    (4, "random", (2, 2), {"sampling": TOP_P}),  # the whole image
    (3, "vertical_repeat", (3, 2), {"vocab_size": 2, "sampling": TOP_K}),
    (2, "horizontal_repeat", (2, 2), {"forced": {1: 2, 2: 0}}),
    (2, "horizontal_repeat", (2, 2), {"sampling": GREEDY}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_the_targets(method, case):
    (make, rule), (size, initialisation, grid, options) = METHODS[method], CASES[case]
    result = check_window(
        lambda target: make(target, size, initialisation), rule, ROWS, grid=grid, **options
    )
    assert result.agrees, result
    assert result.accepted_length > 1.1


def test_without_refinement_every_guess_starts_anew():
    """SJD, Appendix H: rejected guesses are replaced by initial ones."""
    target = local_target(grid=(2, 3))
    anew, refined = (Spy(sjd(target, 4, refinement=refinement)) for refinement in (False, True))
    for spy in (anew, refined):
        emit(target, spy, Exact(), 50)
    assert all((draft.q == 1 / 3).all() for draft, *_ in anew.heard)
    assert not (refined.heard[1][0].q == 1 / 3).all()
    repeats = Spy(sjd(target, 4, "horizontal_repeat", refinement=False))
    emit(target, repeats, Exact(), 50)
    (_, verdict, *_), (draft, *_) = repeats.heard[:2]
    assert (draft.tokens == verdict.next_token.unsqueeze(1)).all()


# As defined


def neighbour(position, last, columns):
    """The nearest known neighbour, -1 for none."""
    while position > last:
        position -= columns
    return max(position, -1)


@pytest.mark.parametrize(
    ("window", "grid"),
    slow_but([(1, (2, 6)), (3, (3, 4)), (5, (4, 3))], (1, (2, 6)), (3, (3, 4))),
)
@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_every_q_is_as_defined(initialisation, window, grid):
    target, rows = local_target(2, grid), 20
    spy = Spy(sjd(target, window, initialisation))
    emit(target, spy, Relaxed((1.6,)), rows)
    columns = grid[1] if initialisation.startswith("vertical") else 1
    entered = 0
    for row in range(rows):
        stale, tokens, length, known = {}, {}, 0, -1
        for draft, verdict, scores, emitted in spy.heard:
            if not (count := int(emitted[row])):
                break
            for place in range(window):
                position, token = length + place, int(draft.tokens[row, place])
                source = position if position <= known else neighbour(position, known, columns)
                if source < 0 or (initialisation == "random" and position > known):
                    expected = torch.full((2,), 0.5)
                elif position <= known or initialisation.endswith("sample"):
                    expected = stale[source]
                else:
                    expected = one_hot(torch.tensor(tokens[source]), 2)
                    entered += 1
                assert draft.q[row, place].equal(expected)
                assert expected[token] > 0
                tokens[position] = token
            stale |= {length + place: probs for place, probs in enumerate(scores.p[row])}
            emitted_here = enumerate(verdict.tokens[row, :count])
            tokens |= {length + place: int(token) for place, token in emitted_here}
            known, length = length + window, length + count
    assert entered or not initialisation.endswith("repeat") or window == 1


def test_a_guess_is_continued_and_replaced_by_draws_of_their_own():
    """The first ones decide which guesses are kept, the others replace the rest."""
    generator = torch.Generator().manual_seed(0)
    q, old = torch.rand(2, 50, 4, 6, generator=generator).softmax(-1)
    guesses = Guesses(torch.randint(6, (50, 4), generator=generator), old)
    places, draws = torch.arange(4).expand(50, -1), torch.rand(50, 8, generator=generator)
    found = continued(Stale(q, guesses, places, places, draws, draws[:, :0])).tokens
    kept = draws[:, :4] < at(q, guesses.tokens) / at(old, guesses.tokens)
    others = sample(normalise((q - old).clamp(min=0), otherwise=q), draws[:, 4:])
    assert found.equal(torch.where(kept, guesses.tokens, others)) and not kept.all()


def test_a_reused_guess_follows_its_label():
    """q' = (½, ½), q = (.9, .1) and τ = ½: the first token is always kept, the second never, so the
    guess has the law (.95, .05) and not q.
    """
    rows = 40_000
    old, q = (torch.tensor(law).expand(rows, 2, 2) for law in ([0.5, 0.5], [0.9, 0.1]))
    last = Guesses(sample(old, torch.rand(rows, 2)), old)
    places = torch.tensor([[1, 2]]).expand(rows, 2)  # the second position is new
    for threshold, law in ((0.5, 0.95), (0.0, 0.5), (2.0, 0.9)):
        uniforms = torch.rand(rows, 2)
        stale = Stale(q, last, places, places, uniforms, uniforms[:, :0])
        guesses = reused(stale, threshold)
        label = guesses.q[0, :, 0].tolist()
        assert label == pytest.approx([law, 0.9])
        assert guesses.tokens.eq(0).double().mean(0).tolist() == pytest.approx(label, abs=0.01)
    assert published(stale, 0.5).q.equal(q)


@pytest.mark.parametrize(
    ("seed", "position"), slow_but([(1055837, 111), (1369712, 90)], (1369712, 90))
)
def test_scd_draws_no_token_without_mass(seed, position):
    """At these two, E was infinite for the token that has all mass."""
    found, expected = (
        tempera.generate("a large green star", method=method, temperature=0.001, seed=seed).tokens
        for method in ("scd", "ar")
    )
    assert found[0, : position + 1].equal(expected[0, : position + 1])


def test_a_shared_noise_takes_the_token_that_has_the_mass():
    noise = torch.tensor([[0.0, 0.0, 12345 * 2.0**-24]], dtype=torch.float64)
    positions = torch.tensor([[1217]])
    q = one_hot(torch.full_like(positions, 13590), 16384)
    stale = Stale(q, None, positions, positions, noise[:, :0], noise)
    assert by_shared_noise(stale).tokens.item() == 13590


def test_an_infinite_threshold_is_sjd():
    target = local_target(grid=(2, 3))
    plain, reused = (
        emit(target, sjd(target, 3, reuse=reuse), Exact(), 200) for reuse in (None, float("inf"))
    )
    assert plain.tokens.equal(reused.tokens) and plain.trace.rounds.equal(reused.trace.rounds)


@pytest.mark.parametrize("options", [{"reuse": -1.0}, {"reuse": 0.5, "refinement": False}])
def test_guesses_that_cannot_be_reused_are_refused(options):
    with pytest.raises(TemperaError, match="reuse="):
        sjd(local_target(), 3, **options)


@pytest.mark.parametrize("window", slow_but([2, 5, 12], 5))
@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_jacobi_generates_the_image_of_plain_autoregression(window, initialisation):
    target = local_target(2, (3, 4), GUIDED, share=0.9)
    plain = emit(target, NoDraft(), Exact(), rows=300)
    fast = emit(target, jacobi(target, window, initialisation), Match(), rows=300)
    assert fast.tokens.equal(plain.tokens)
    assert fast.trace.accepted_length.mean() > 1.3


# The loop


ALL = {
    name: (lambda target, make=make: make(target, 4, "vertical_repeat"), rule)
    for name, (make, rule) in METHODS.items()
}
ALL["sjd_pac"] = (
    lambda target: sjd_pac(target, 8, "vertical_sample", branches=2, levels=2),
    Exact(),
)


@pytest.mark.parametrize("method", ALL)
def test_a_round_is_read_once_has_static_shapes_and_adds_nothing_to_the_bound(method):
    make, rule = ALL[method]
    target = local_target(3, (3, 3), GUIDED)
    drafter, rounds, names = make(target), [], [str(row) for row in range(50)]
    emit(target, drafter, rule, rows=50)
    parts = target, drafter, rule
    options = {"diagnostics": True, "watch": [rounds.append]}
    with HostReads() as reads:
        trace = decode(*parts, RandomStreams(0, names), names, **options).trace
    assert len(rounds) > 2 and reads.count == Counter(tolist=2 + len(rounds))
    assert trace.bound.abs().max() < 1e-5 and trace.kl.abs().max() < 1e-5
    assert trace.tv.nanmean() > 0.1
    for one in rounds:
        draft, verdict = one.draft, one.verdict
        assert draft.tree is rounds[0].draft.tree and draft.q.shape == (50, drafter.nodes, 3)
        assert verdict.tokens.shape == (50, drafter.depth + 1)
        torch.testing.assert_close(draft.q.sum(-1), torch.ones(50, drafter.nodes))


@pytest.mark.parametrize("method", ALL)
def test_an_image_does_not_depend_on_its_batch(method):
    (make, rule), target = ALL[method], local_target(3, (3, 3))
    check_rows(target, make(target), rule)


# The network


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("guidance", slow_but([1.0, 3.0], 3.0))
def test_every_method_on_a_network_is_greedy_at_temperature_0(method, guidance):
    make, rule = ALL[method]
    target = tiny_target(Sampling(guidance, 0))
    plain = decode(target, NoDraft(), Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    fast = decode(target, make(target), rule, RandomStreams(0, PROMPTS), PROMPTS)
    assert fast.tokens.equal(plain.tokens)


@pytest.mark.parametrize("method", ALL)
def test_the_trace_has_the_networks_probabilities(method):
    """The log-probabilities in the trace are those of a forward pass over the finished image:
    cache, mask and positions are right. Jacobi decoding gives the image of plain autoregression.
    """
    make, rule = ALL[method]
    target = tiny_target()
    output = decode(target, make(target), rule, RandomStreams(1, PROMPTS), PROMPTS)
    if method == "jacobi":
        plain = decode(target, NoDraft(), Exact(), RandomStreams(1, PROMPTS), PROMPTS)
        assert output.tokens.equal(plain.tokens) and (output.trace.rounds < 20).all()
    target.begin(PROMPTS, target.length)
    whole = target.score(Draft(output.tokens, torch.zeros(0), Tree.chain(target.length)), 0).p[
        :, :-1
    ]
    expected = at(whole, output.tokens).log()
    torch.testing.assert_close(output.trace.logprob, expected, atol=1e-3, rtol=1e-3)
