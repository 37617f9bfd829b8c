"""What a round gives the device to do."""

from tiny_networks import tiny_eagle, tiny_target

from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact


def test_operators_of_a_round_are_counted() -> None:
    """Those of the rounds alone: as many whatever the image's beginning and end take."""
    target = tiny_target()
    chain = Tree.chain(3)
    method = Method(StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), chain), Exact())
    with target.encoded(["1"]):
        found = launches(target, method, ["1"])
        plain = launches(target, method.plain, ["1"])
    assert found.operators > plain.operators > 10
    assert found.kernels is None and found.graph_replays is None
