"""A sweep builds one target and draft after another; none waits for the garbage collector."""

import gc
import weakref

import pytest
from tiny_networks import PROMPTS, llamagen, tiny_eagle, tiny_parallel, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.standard import Exact
from tempera.targets import compiled

DRAFTS = {
    "ar": None,
    "eagle": lambda target: EagleDraft(tiny_eagle(target), target),
    "eagle2": lambda target: EagleDraft(tiny_eagle(target), target),
    "parallel": lambda target: ParallelDraft(tiny_parallel(target), target, 2),
    "independent": lambda target: IndependentDraft(tiny_target(network=llamagen(5)), target),
}


def drafter_of(name, target):
    """The drafter of a name, and what must not outlive it: its networks and caches."""
    if DRAFTS[name] is None:
        return NoDraft(), []
    model = DRAFTS[name](target)
    parts = [model, model.draft.network if name == "independent" else model.network]
    if name == "eagle2":
        return DynamicTreeDrafter(model, target.vocab_size, 2, 2, 4), parts
    return StaticTreeDrafter(model, Tree.chain(2)), parts


@pytest.mark.parametrize("ways", [(), ("fuse", "compile")], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DRAFTS)
def test_of_several_targets_and_drafts_only_the_last_one_is_alive(name, ways, monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: function)
    made = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            network = llamagen()
            target = tiny_target(network=network)
            for way in ways:
                getattr(target, way)()
            drafter, parts = drafter_of(name, target)
            decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
            made.append([weakref.ref(part) for part in (network, target.session.cache, *parts)])
            del network, parts
        alive = [[part() is not None for part in parts] for parts in made]
    finally:
        gc.enable()
    assert alive == [[index == 3] * len(made[0]) for index in range(4)]
