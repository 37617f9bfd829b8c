"""Dynamic trees. That they are what EAGLE-2 defines is tested in test_eagle.py, and that decoding
with them is lossless in exactness/test_laws.py.
"""

import pytest
import torch
from random_drafts import new_sequences

from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import TableDraft, TableTarget, check
from tempera.rules.standard import Exact


def drafter_of(branches, depth, nodes):
    return lambda draft: DynamicTreeDrafter(draft, draft.vocab_size, branches, depth, nodes)


def test_nan_of_a_row_is_no_other_rows():
    draft = TableDraft(TableTarget(4, 6))
    drafter, images = drafter_of(2, 3, 6)(draft), new_sequences(3)
    drafter.begin(["a", "b", "c"], images, torch.empty(3, 0), None)
    draft._roots = torch.tensor([1, 2, 3])
    draft.table[2] = torch.nan  # the root's law of the second row
    assert drafter.propose(images, torch.rand(3, 0)).has_nan.tolist() == [False, True, False]
    draft.table[2], draft.table[4 * 3 + 1 : 4 * 3 + 5] = 0.25, torch.nan  # below the third row's
    assert drafter.propose(images, torch.rand(3, 0)).has_nan.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((2, 0, 1), "depth=0 "),
        ((5, 2, 4), "branches=5 "),
        ((2, 3, 11), "nodes=11 "),
    ],
)
def test_bad_input_is_reported_in_one_sentence(size, message):
    with pytest.raises(TemperaError, match=message):
        drafter_of(*size)(TableDraft(TableTarget(4, 3)))


@pytest.mark.parametrize("size", [(1, 5, 3), (2, 5, 1), (2, 5, 3)])
def test_a_tree_is_not_deeper_than_it_has_nodes(size):
    """Those of fewer nodes than levels decode losslessly, too."""
    report = check(Exact(), lambda _, draft: drafter_of(*size)(draft), length=5, rows=20_000)
    assert report.agrees, report
    assert drafter_of(*size)(TableDraft(TableTarget(4, 6))).depth == min(size[1:])


@pytest.mark.parametrize(("size", "room"), [((2, 3, 6), 6), ((3, 4, 4), 9), ((1, 1, 1), 1)])
def test_the_draft_makes_room_for_the_tree_and_for_the_nodes_that_it_expands(size, room):
    draft, asked = TableDraft(TableTarget(4, 6)), []
    draft.identity = "weights"
    assert drafter_of(*size)(draft).identity == "weights"
    draft.begin = lambda prompts, nodes, *_: asked.append(nodes)
    drafter_of(*size)(draft).begin(["a"], new_sequences(1), torch.empty(1, 0), None)
    assert asked == [room]
