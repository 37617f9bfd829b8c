"""Rows whose image is complete take the next prompt."""

from itertools import count

import pytest
import torch
from near_codes import near
from network_drafts import eagle
from table_models import RULE
from tiny_evaluation import tiny_pipeline
from tiny_networks import text_target, tiny_target

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import NeedsNewBatch
from tempera.decoding.loop import Recording, decode, finished, rounds
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import pipeline as pipelines
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.rules.neighbourhood import Lantern
from tempera.rules.standard import Exact

NAMES = [f"prompt {number}" for number in range(12)]


def parts():
    target = TableTarget(4, 7)
    return target, StaticTreeDrafter(TableDraft(target, noise=2.0), Tree.chain(3)), RULE


def test_rows_are_not_idle_for_long_while_prompts_wait():
    """For a quarter of a round of the batch, until prompts are started together."""
    names = [str(number) for number in range(60)]
    begun: set[int] = set()
    idle = [0]
    for one in rounds(*parts(), RandomStreams(0, names), names, rows=16):
        now = {number for number in one.sequences.prompts if number is not None}
        if now - begun:
            idle.append(0)
        begun |= now
        if len(begun) < len(names):
            idle[-1] += one.sequences.prompts.count(None)
    assert begun == set(range(60)) and 0 < max(idle) < 4


def given_away(*given, rows):
    return finished(rounds(*given, rows=rows), Recording())


def test_images_are_given_away_when_they_are_complete():
    at_once = decode(*parts(), RandomStreams(0, NAMES), NAMES)
    seen = []
    for numbers, output in given_away(*parts(), RandomStreams(0, NAMES), NAMES, rows=3):
        for number, tokens in zip(numbers, output.tokens, strict=True):
            seen.append(number)
            assert tokens.equal(at_once.tokens[number])
    assert sorted(seen) == list(range(12)) != seen  # some overtake others


def test_more_rows_than_prompts_are_not_there():
    one = next(rounds(*parts(), RandomStreams(0, NAMES), NAMES, rows=50))
    assert len(one.sequences.lengths) == 12


def test_longer_prompts_wait_for_a_batch_of_their_own():
    """Each image is that of a batch alone, whose prefix is as long as the prompt."""
    prompts = ["ab", "a", "abcd", "b", "abcde", "c", "ba", "bc"]
    names = [str(number) for number in range(len(prompts))]

    def images(texts, ids, rows=None):
        target = text_target(Sampling(2.0, temperature=3.0))
        drafter = eagle(target, Tree.chain(2))
        return decode(target, drafter, Exact(), RandomStreams(0, ids), texts, rows=rows).tokens

    together = images(prompts, names, rows=2)
    for number, (text, name) in enumerate(zip(prompts, names, strict=True)):
        assert images([text], [name])[0].equal(together[number])
    target = text_target(Sampling(2.0))
    target.begin(["a"], 0)
    with pytest.raises(NeedsNewBatch):
        target.begin(["abc"], 0, torch.tensor([0]))
    drafter = eagle(target, Tree.chain(2))
    streams = RandomStreams(0, names)
    waits = given_away(target, drafter, Exact(), streams, prompts, rows=2)
    order = [number for group, _ in waits for number in group]
    assert order.index(2) > order.index(3) and order.index(4) > order.index(5)


class Choosy(TableTarget):
    """Refuses two prompts."""

    def begin(self, prompts, nodes, rows=None):
        for name in ("prompt 5", "prompt 10"):
            if name in prompts:
                raise TemperaError(f"{name} is refused")
        super().begin(prompts, nodes, rows)


class Full(TableTarget):
    """Refuses batches of more than three after the first."""

    begun = 0

    def begin(self, prompts, nodes, rows=None):
        self.begun += 1
        if self.begun > 1 and len(prompts) > 3:
            raise TemperaError("no batch of four")
        super().begin(prompts, nodes, rows)


def test_what_refuses_no_prompt_alone_is_told_at_once():
    with pytest.raises(TemperaError, match="no batch of four"):
        decode(Full(4, 7), NoDraft(), Exact(), RandomStreams(0, NAMES), NAMES, rows=4)


@pytest.mark.parametrize("plain", [True, False], ids=["all at once", "one by one"])
def test_a_prompt_that_is_refused_is_told_when_the_others_are_complete(plain):
    target = Choosy(4, 7)
    drafter = NoDraft() if plain else StaticTreeDrafter(TableDraft(target), Tree.chain(3))
    done = []
    with pytest.raises(TemperaError, match="prompt 5 is refused"):
        for numbers, _ in given_away(
            target, drafter, Exact(), RandomStreams(0, NAMES), NAMES, rows=4
        ):
            done += numbers
    assert sorted(done) == [number for number in range(12) if number not in (5, 10)]
    with pytest.raises(TemperaError, match="prompt 5 is refused"):  # at once
        next(given_away(target, drafter, Exact(), RandomStreams(0, NAMES), NAMES, rows=6))


def test_nan_names_the_prompt_that_has_the_row():
    class Sick(TableTarget):
        def begin(self, prompts, nodes, rows=None):
            super().begin(prompts, nodes, rows)
            if prompts == ["prompt 7"]:
                self.table[0] = torch.nan

    done = []
    target = Sick(4, 7)
    drafter = StaticTreeDrafter(TableDraft(target, noise=2.0), Tree.chain(3))
    with pytest.raises(TemperaError, match="the target gave NaN .* prompt 'prompt 7'"):
        for numbers, _ in given_away(target, drafter, RULE, RandomStreams(0, NAMES), NAMES, rows=3):
            done += numbers
    assert done and 7 not in done


def test_diagnostics_follow_an_image_to_its_row():
    """A rule with a figure of its own, on a network with a cache."""
    names = NAMES[:5]

    def traced(rows):
        target = tiny_target(Sampling(1.0, temperature=5.0))
        drafter = eagle(target, Tree.chain(3))
        rule = Lantern(near(target.vocab_size, 3), 0.2)
        streams = RandomStreams(0, names)
        return decode(target, drafter, rule, streams, names, rows=rows, diagnostics=True)

    found, expected = traced(2).trace.tensors(), traced(1).trace.tensors()
    assert set(found) == set(expected) >= {"tv", "bound", "entropy", "proximity"}
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, equal_nan=True, msg=name)


def test_the_seconds_of_images_add_up_to_those_of_all_rounds(monkeypatch):
    """On a clock that a round puts on by a second, as does what lies between two images."""
    ticks = count()
    monkeypatch.setattr(pipelines.time, "perf_counter", lambda: float(next(ticks)))
    pipeline = tiny_pipeline()
    prompts = [Prompt(name, name) for name in NAMES]
    done = []
    groups = list(pipeline.decoded(prompts, 3, watch=[done.append]))
    assert sum(sum(group.seconds) for group in groups) == pytest.approx(len(done))
    assert sorted(place for group in groups for place in group.indices) == list(range(12))
    assert all(second > 0 for group in groups for second in group.seconds)
    assert {group.batch for group in groups} == {3}
