"""Table models of target and draft that several tests share."""

import torch
from random_drafts import Spy

from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.standard import Relaxed

RULE = Relaxed((2.0, 0.6, 1.3))


def tables(length=4, **options):
    """Target and draft of three tokens, and their conditionals."""
    target = TableTarget(3, length, **options)
    draft = TableDraft(target)
    return target, draft, target.conditionals(), draft.conditionals()


def spied(tree, rule=RULE, rows=60, **options):
    """What a static tree emits on tables of four tokens, and what its drafter heard."""
    target = TableTarget(4, 7)
    spy = Spy(StaticTreeDrafter(TableDraft(target, noise=2.0), tree))
    return emit(target, spy, rule, rows=rows, **options), spy.heard


def check_rows(target, drafter, rule):
    """An image and its trace do not depend on the batch that they are in, nor on its order."""
    names = [f"prompt {row}" for row in range(6)]

    def decoded(ids, rows=None):
        streams = RandomStreams(5, ids)
        return decode(target, drafter, rule, streams, ids, diagnostics=True, rows=rows)

    together = decoded(names)
    assert decoded(names[::-1]).tokens.flip(0).equal(together.tokens)
    refilled = [decoded(names, rows) for rows in (1, 2, 4)]
    for row, name in enumerate(names):
        for place, other in [(0, decoded([name])), *[(row, one) for one in refilled]]:
            assert other.tokens[place].equal(together.tokens[row])
            for field in ("step", "origin", "logprob", "bound", "kl"):
                found, expected = (getattr(one.trace, field) for one in (other, together))
                torch.testing.assert_close(found[place], expected[row])


class FirstRoundOnly(StaticTreeDrafter):
    """Drafts in the first round only; the target continues alone (Cool-SD, the P̂ of Theorem 2)."""

    def begin(self, *batch):
        self.fresh = True
        super().begin(*batch)

    def propose(self, images, uniforms):
        if not self.fresh:
            return NoDraft().propose(images, uniforms[:, :0])
        self.fresh = False
        return super().propose(images, uniforms)

    def observe(self, *_):
        pass
