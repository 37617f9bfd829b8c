"""A target's rounds against forward passes without a cache."""

import torch
from random_drafts import random_parents
from tiny_networks import full_hidden, node_paths, random_draft, random_rounds

from tempera.decoding.trees import Tree


def per_row_tree(batch: int, generator: torch.Generator) -> Tree:
    rows = [random_parents(6, generator) for _ in range(batch)]
    return Tree.from_parents(torch.tensor(rows))


class RandomDrafts:
    """A drafter of random tokens on the tree of each round."""

    uniforms = 0

    def __init__(self, nodes, tree_of_round, generator, vocab_size):
        self.nodes = self.depth = nodes
        self.tree_of_round = tree_of_round
        self.generator, self.vocab_size = generator, vocab_size

    def begin(self, prompts, images, uniforms, rows):
        pass

    def propose(self, images, uniforms):
        return random_draft(self.tree_of_round(), len(uniforms), self.generator, self.vocab_size)

    def observe(self, *_):
        pass


@torch.no_grad()
def check_rounds(target, prompts, nodes, tree_of_round, generator, forced=None):
    """Random rounds to the end of every image; every score is compared with a forward pass over the
    whole sequence.
    """
    drafter = RandomDrafts(nodes, tree_of_round, generator, target.vocab_size)
    for draft, images in random_rounds(target, drafter, prompts, generator):
        assert target.runner.prompt.lengths.tolist() == [len(image) for image in images]
        scores = target.score(draft, max(map(len, images)))
        assert scores.p.shape == (len(prompts), 1 + draft.tree.nodes, target.vocab_size)
        check_scores(target, prompts, draft, scores, images, forced)


def check_scores(target, prompts, draft, scores, images, forced):
    nodes = [
        (row, node, torch.cat([images[row], draft.tokens[row, path]]))
        for row in range(len(prompts))
        for node, path in enumerate(node_paths(draft.tree, row))
        if len(images[row]) + len(path) < target.length  # past the image, a score is not used
    ]
    rows, _, whole = zip(*nodes, strict=True)
    references = full_hidden(target, [prompts[row] for row in rows], list(whole))
    for (row, node, image), states in zip(nodes, references, strict=True):
        torch.testing.assert_close(
            scores.hidden[row :: len(prompts), node], states[:, -1], atol=1e-5, rtol=1e-4
        )
        token = None if forced is None else forced[len(image)][None]
        p = target.sampling.distribution(target.head.lm_logits(states[:, -1]), token)[0]
        torch.testing.assert_close(scores.p[row, node], p, atol=1e-5, rtol=1e-4)
