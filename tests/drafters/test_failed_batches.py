"""A batch that failed leaves nothing behind."""

import pytest
import torch
from tiny_networks import PROMPTS, captions, tiny_eagle, tiny_parallel, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact

TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
DRAFTERS = {
    "ar": lambda target: (NoDraft(), None),
    "chain": lambda target: with_model(target, EagleDraft, tiny_eagle, Tree.chain(3)),
    "tree": lambda target: with_model(target, EagleDraft, tiny_eagle, TREE),
    "eagle2": lambda target: dynamic(target),
    "parallel": lambda target: with_model(target, parallel, tiny_parallel, Tree.chain(3)),
}


def with_model(target, kind, network, tree):
    model = kind(network(target), target)
    return StaticTreeDrafter(model, tree), model


def parallel(network, target):
    return ParallelDraft(network, target, 3)


def dynamic(target):
    model = EagleDraft(tiny_eagle(target), target)
    return DynamicTreeDrafter(model, target.vocab_size, 2, 3, 5), model


class Sick:
    """Captions whose encoding is NaN while `now`."""

    now = False

    def __call__(self, prompts):
        condition, keep = captions(prompts)
        return (condition * torch.nan if self.now else condition), keep


def images(target, drafter):
    return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens


@pytest.mark.parametrize("where", ["encoding", "mid-image", "draft"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_failed_batch_leaves_nothing_behind(name, where, monkeypatch):
    if (name, where) == ("ar", "draft"):
        pytest.skip("there is no draft")
    expected = images(fresh := tiny_target(), DRAFTERS[name](fresh)[0])
    conditioner = Sick()
    target = tiny_target(conditioner=conditioner)
    drafter, model = DRAFTERS[name](target)
    with monkeypatch.context() as patch, pytest.raises(TemperaError, match="gave NaN"):
        if where == "encoding":
            patch.setattr(conditioner, "now", True)
        elif where == "mid-image":
            embed = target.head.embed
            patch.setattr(target.head, "embed", lambda tokens: embed(tokens) * torch.nan)
        else:
            forward = model.network.forward
            patch.setattr(model.network, "forward", lambda *args: forward(*args) * torch.nan)
        images(target, drafter)
    assert torch.equal(images(target, drafter), expected)
