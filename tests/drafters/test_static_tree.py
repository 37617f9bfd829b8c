import pytest
import torch
from random_drafts import SMALL, new_sequences
from tiny_networks import (
    PROMPTS,
    llamagen,
    tiny_dflash,
    tiny_eagle,
    tiny_medusa,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding.interfaces import DraftModel
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.dflash import DFlashDraft
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.medusa import MedusaDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError

IMAGES = new_sequences(2)


class Written(DraftModel):
    """A draft model whose distribution after a token puts more mass on the tokens near it."""

    def __init__(self, vocab_size):
        tokens = torch.arange(vocab_size)
        self.table = (-(tokens[:, None] - tokens).abs() / 2).softmax(-1)

    def roots(self, images):
        return self.table[[0, 3]], None

    def expand(self, above, tokens, level):
        return self.table[tokens], None


def test_every_node_has_the_q_it_was_drawn_from():
    model, apart = Written(9), Tree.from_parents(torch.tensor([-1, -1, 1, 0, 1, 0, 2, 5, 3]))
    for tree in (Tree.chain(3), SMALL, Tree.named("mc_sim_7b_63"), apart):
        draft = StaticTreeDrafter(model, tree).propose(IMAGES, torch.rand(2, tree.nodes))
        parents = tree.parents.tolist()
        for row in range(2):
            for node, parent in enumerate(parents):
                law = model.table[3 * row] if parent < 0 else model.table[draft.tokens[row, parent]]
                earlier = [n for n in range(node) if parents[n] == parent]
                left = law.index_fill(0, draft.tokens[row, earlier], 0.0)
                torch.testing.assert_close(draft.q[row, node], left / left.sum())
                assert draft.tokens[row, node] not in draft.tokens[row, earlier]


def test_greedy_siblings_are_the_most_probable_tokens_in_turn():
    model = Written(9)
    model.greedy = True
    draft = StaticTreeDrafter(model, SMALL).propose(IMAGES, torch.rand(2, SMALL.nodes))
    for row in range(2):
        for node, parent in enumerate(SMALL.parents.tolist()):
            law = model.table[3 * row] if parent < 0 else model.table[draft.tokens[row, parent]]
            rank = SMALL.earlier_siblings[node].sum()
            token = draft.tokens[row, node]
            assert law[token] == law.sort(descending=True).values[rank]


MODELS = {
    "eagle": lambda target: EagleDraft(tiny_eagle(target), target),
    "parallel": lambda target: ParallelDraft(tiny_parallel(target), target),
    "dflash": lambda target: DFlashDraft(tiny_dflash(target), target),
    "medusa": lambda target: MedusaDraft(tiny_medusa(target), target),
    "independent": lambda target: IndependentDraft(
        tiny_target(Sampling(1.0, top_k=3), llamagen(5)), target
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.inference_mode()
def test_greedy_drafts_are_ranked_at_temperature_1_without_top_k(make):
    def laws(sampling):
        target = tiny_target(Sampling(2.0, top_k=3))
        model = make(target)
        target.sampling = sampling  # it may be replaced between images
        images = new_sequences(len(PROMPTS), target.length, 2)
        target.begin(PROMPTS, 2)
        model.begin(PROMPTS, 2, images)
        assert model.greedy == sampling.greedy
        root, above = model.roots(images)
        after, _ = model.expand(above, root.argmax(-1, keepdim=True), Tree.chain(2).levels[0])
        return torch.cat([root.unsqueeze(1), after], 1)

    greedy = laws(Sampling(3.0, temperature=0, top_k=2, top_p=0.5))
    torch.testing.assert_close(greedy, laws(Sampling(3.0)))
    assert (greedy > 0).all()


def test_an_empty_tree_is_refused():
    with pytest.raises(TemperaError, match="a tree of depth 0 drafts nothing"):
        StaticTreeDrafter(Written(3), Tree.empty())
