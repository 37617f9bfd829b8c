"""Drafts made up for tests."""

import torch

from tempera.probs import one_hot, sample
from tempera.trees import Tree
from tempera.types import Draft

SMALL = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def random_draft(rows, tree, vocab_size=6, seed=0, forced=0.0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    p = (3 * torch.randn(rows, 1 + tree.nodes, vocab_size, generator=generator)).softmax(-1)
    q = (p[:, 1:].log() + torch.randn(rows, tree.nodes, vocab_size, generator=generator)).softmax(-1)
    tokens = sample(q, rand(rows, tree.nodes))
    fixed = (rand(rows, 1 + tree.nodes) < forced)[..., None]
    p = torch.where(fixed, one_hot(torch.randint(vocab_size, (rows, 1 + tree.nodes), generator=generator), vocab_size), p)
    return Draft(tokens, q, tree), p, rand(rows, 1 + tree.nodes)


class Spy:
    """Passes everything on and writes down what the loop said."""

    def __init__(self, drafter):
        self.drafter, self.heard = drafter, []
        self.nodes, self.depth, self.uniforms = drafter.nodes, drafter.depth, drafter.uniforms

    def begin(self, prompts):
        self.prompts = prompts
        self.drafter.begin(prompts)

    def propose(self, uniforms):
        assert uniforms.shape == (len(self.prompts), self.uniforms)
        return self.drafter.propose(uniforms)

    def observe(self, draft, verdict, scores, emitted):
        self.heard.append((draft, verdict, scores, emitted))
        self.drafter.observe(draft, verdict, scores, emitted)
