"""Drafts made up for tests."""

import torch

from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import one_hot, sample
from tempera.decoding.trees import Tree

SMALL = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])

ROWS = [[-1, -1, 0, 0, 1], [-1, 0, 1, 2, 3], [-1, -1, -1, 1, 3], [-1, 0, 0, 0, 3], [-1] * 5]
"""Parents in trees of five nodes."""


def random_draft(rows, tree, vocab_size=6, seed=0, forced=0.0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    p = (3 * torch.randn(rows, 1 + tree.nodes, vocab_size, generator=generator)).softmax(-1)
    noise = torch.randn(rows, tree.nodes, vocab_size, generator=generator)
    q = (p[:, 1:].log() + noise).softmax(-1)
    tokens = sample(q, rand(rows, tree.nodes))
    fixed = (rand(rows, 1 + tree.nodes) < forced)[..., None]
    other = torch.randint(vocab_size, (rows, 1 + tree.nodes), generator=generator)
    p = torch.where(fixed, one_hot(other, vocab_size), p)
    return Draft(tokens, q, tree), p, rand(rows, 1 + tree.nodes)


def random_parents(nodes, generator):
    """Parents of a random tree whose nodes are sorted by depth, but not by parent."""
    parents, depths = [], [0]  # the root's depth, then the nodes'
    for _ in range(nodes):
        allowed = [place for place, depth in enumerate(depths) if depth + 1 >= depths[-1]]
        above = allowed[int(torch.randint(len(allowed), (), generator=generator))]
        parents.append(above - 1)
        depths.append(depths[above] + 1)
    return parents


def new_images(rows, length=6, depth=3):
    """Images without tokens."""
    return Images([str(row) for row in range(rows)], length, depth, torch.device("cpu"))


class Spy:
    """Passes everything on and writes down what the loop said."""

    def __init__(self, drafter):
        self.drafter, self.heard = drafter, []
        self.tree, self.compiles = drafter.tree, drafter.compiles
        self.nodes, self.depth, self.uniforms = drafter.nodes, drafter.depth, drafter.uniforms

    def begin(self, prompts, images):
        self.prompts = prompts
        self.drafter.begin(prompts, images)

    def propose(self, images, uniforms):
        assert uniforms.shape == (len(self.prompts), self.uniforms)
        return self.drafter.propose(images, uniforms)

    def observe(self, images, draft, verdict, scores):
        self.heard.append((draft, verdict, scores, images.emitted.clone()))
        self.drafter.observe(images, draft, verdict, scores)
