import pytest
import torch
from round_checks import check_rounds, per_row_tree
from tiny_networks import (
    PREFIX,
    PROMPTS,
    TREE,
    captions,
    llamagen,
    random_draft,
    text_target,
    tiny_eagle,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.runtime.network_identity import identity_of

TREES = {"ar": Tree.empty(), "chain": Tree.chain(4), "tree": TREE}


@pytest.mark.parametrize(
    ("name", "guidance"), [("ar", 1.0), ("chain", 3.0), ("tree", 1.0), ("tree", 3.0)]
)
def test_scores_equal_a_forward_pass_without_a_cache(name, guidance):
    target = tiny_target(Sampling(guidance), granularity=4)
    tree, generator = TREES[name], torch.Generator().manual_seed(2)
    check_rounds(target, PROMPTS[:3], tree.nodes, lambda: tree, generator)


def test_trees_and_batches_may_change():
    """Trees from round to round and from row to row, batch sizes and shapes of the cache."""
    target, generator = tiny_target(granularity=4), torch.Generator().manual_seed(3)
    trees = [lambda: per_row_tree(3, generator), lambda: Tree.chain(2), lambda: TREE]

    def any_tree():
        return trees[int(torch.randint(3, (), generator=generator))]()

    for prompts, nodes, tree in (
        (PROMPTS[:3], TREE.nodes, any_tree),
        (PROMPTS[1:], 3, lambda: Tree.chain(3)),
        (PROMPTS[:1], 0, Tree.empty),
    ):
        check_rounds(target, prompts, nodes, tree, generator)


def test_attention_loads_the_keys_that_the_longest_image_can_reach():
    target, loaded = tiny_target(granularity=1), []
    drafter = StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), Tree.chain(5))
    score = target.score

    def scored(draft, longest):
        scores = score(draft, longest)
        lengths = target.runner.prompt.lengths
        longest = int(lengths[lengths < target.length].max())
        loaded.append((target.runner.kv_length(), PREFIX - 1 + longest + 2 + 5))
        return scores

    target.score = scored
    decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    assert len(loaded) > 4 and all(found == needed for found, needed in loaded)


def test_padding_content_has_no_effect():
    def noisy(prompts):
        features, keep = captions(prompts)
        return torch.where(keep[..., None], features, 7.0), keep

    generator = torch.Generator().manual_seed(0)
    draft = random_draft(TREE, 3, generator)
    results = []
    for conditioner in (captions, noisy):
        target = tiny_target(Sampling(1.0), conditioner=conditioner)
        target.begin(PROMPTS[:3], TREE.nodes)
        results.append(target.score(draft, 0).p)
    torch.testing.assert_close(results[0], results[1])


def test_a_plain_language_model_with_text_and_image_tokens_and_forced_positions():
    target = text_target(Sampling(2.0, top_k=3), 2, 2, 4, line_end=19)
    assert target.vocab_size == 5 and target.length == 6
    generator = torch.Generator().manual_seed(0)
    prompts = ["xyz", "a", "bc"]
    check_rounds(target, prompts, 3, lambda: Tree.chain(3), generator, target.head.forced)
    generated = decode(target, NoDraft(), Exact(), RandomStreams(0, prompts), prompts).tokens
    assert (generated[:, [2, 5]] == 4).all() and (generated[:, [0, 1, 3, 4]] < 4).all()


def test_identity_depends_on_the_weights_and_not_on_their_dtype():
    name = tiny_target().identity
    assert len(name) == 16 and name == identity_of(llamagen().bfloat16())
    for other in (llamagen(seed=1), llamagen(intermediate_size=32), llamagen(rope_base=5.0)):
        assert name != identity_of(other)
    assert tiny_target(identity="mine").identity == "mine"


def test_bad_input_is_reported_in_one_sentence():
    with pytest.raises(TemperaError, match="no prompts to generate"):
        decode(tiny_target(), NoDraft(), Exact(), RandomStreams(0, []), [])
    mirrored = tiny_target(conditioner=lambda texts: [part.flip(1) for part in captions(texts)])
    with pytest.raises(TemperaError, match="pad prompts on the left"):
        mirrored.begin(["a", "b"], 0)
