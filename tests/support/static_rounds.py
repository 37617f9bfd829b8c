"""Methods whose rounds are static, on a tiny target, and what their recorded rounds are compared
with.
"""

from operator import attrgetter

import torch
from near_codes import near_rules
from tiny_networks import PROMPTS, TREE, VOCAB, llamagen, tiny_eagle, tiny_parallel, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.jacobi import jacobi, scd, sjd, sjd_pac
from tempera.drafters.none import NoDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.optimal import Priced
from tempera.rules.schedules import exponential
from tempera.rules.standard import BlockVerification, Exact, Match, Relaxed

CHAIN = Tree.chain(3)
BATCHES = [PROMPTS[:3], PROMPTS[1:], PROMPTS[:3]]


def made(granularity=64, compiled=False, **options):
    """A target whose passes all load the same number of keys, if the granularity is large, so that
    results are equal to the bit.
    """
    target = tiny_target(
        Sampling(3.0, temperature=2.0, top_k=7), granularity=granularity, **options
    )
    target.fuse()
    if compiled:
        target.compile()
    return target


def eagle(target, tree=CHAIN, **options):
    return StaticTreeDrafter(EagleDraft(tiny_eagle(target, **options), target), tree)


def eagle2(target):
    return DynamicTreeDrafter(
        EagleDraft(tiny_eagle(target), target, attrgetter("ranking")), VOCAB, 2, 3, 6
    )


def parallel(target, tree=CHAIN):
    return StaticTreeDrafter(ParallelDraft(tiny_parallel(target), target, 3), tree)


def independent(target, tree=CHAIN):
    return StaticTreeDrafter(
        IndependentDraft(made(compiled=target.compiled, network=llamagen(5)), target), tree
    )


def tree_of(make):
    return lambda target: make(target, TREE)


COOL = Relaxed(exponential(2.0, 3))
CASES = {
    "ar": (lambda target: NoDraft(), Exact()),
    "eagle": (eagle, Exact()),
    "eagle tree": (tree_of(eagle), Exact()),
    "eagle features": (lambda target: eagle(target, features=(1,)), Exact()),
    "eagle2": (eagle2, Exact()),
    "coolsd": (eagle, COOL),
    "uniform_rsd": (eagle, Relaxed((1.5,))),
    "optimal_rsd": (eagle, Priced(0.8)),
    "block": (eagle, BlockVerification()),
    "lantern": (eagle, near_rules(VOCAB)["lantern published"]),
    "lanternpp": (tree_of(eagle), near_rules(VOCAB)["lantern++ optimal"]),
    "parallel": (parallel, COOL),
    "parallel tree": (tree_of(parallel), Exact()),
    "independent": (independent, Exact()),
    "independent tree": (tree_of(independent), Exact()),
    "jacobi": (lambda target: jacobi(target, 4), Match()),
    "sjd": (lambda target: sjd(target, 4), Exact()),
    "sjd repeats": (lambda target: sjd(target, 4, "horizontal_repeat"), Exact()),
    "sjd samples": (lambda target: sjd(target, 2, "vertical_sample"), Exact()),
    "sjd unrefined": (lambda target: sjd(target, 4, refinement=False), BlockVerification()),
    "scd": (lambda target: scd(target, 4), Exact()),
    "scd maximal": (lambda target: scd(target, 4, coupling="maximal"), COOL),
    "sjd_pac": (lambda target: sjd_pac(target, 8, branches=2, levels=2), Exact()),
    "gsd": (lambda target: sjd(target, 4), near_rules(VOCAB)["grouped published"]),
}


def images(target, drafter, rule, prompts, seed=0, **options):
    return decode(target, drafter, rule, RandomStreams(seed, prompts), prompts, **options)


def check_same(found, expected):
    assert found.tokens.equal(expected.tokens)
    mine, theirs = found.trace.tensors(), expected.trace.tensors()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


class Forgetful(EagleDraft):
    """A draft that does not carry how many tokens the last round emitted."""

    def carried(self):
        tokens, hidden, _, *padding = super().carried()
        return tokens, hidden, *padding

    def carry(self, tensors):
        tokens, hidden, *padding = tensors
        super().carry([tokens, hidden, self._true[2], *padding])


class Counting(EagleDraft):
    """A draft with a Python value that changes from round to round."""

    turn = 0

    def roots(self):
        self.turn += 1
        return super().roots().roll(self.turn, -1)


class Curious(EagleDraft):
    """A draft that lets the host read."""

    def roots(self):
        law = super().roots()
        return law if float(law.sum()) > 0 else law * 2
