"""Drafts made up for tests."""

import torch

from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import one_hot, sample
from tempera.decoding.trees import Tree, take
from tempera.exactness.tables import lookup

SMALL = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def random_draft(rows, tree, vocab_size=6, seed=0, forced=0.0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    p = (3 * torch.randn(rows, 1 + tree.nodes, vocab_size, generator=generator)).softmax(-1)
    q = (p[:, 1:].log() + torch.randn(rows, tree.nodes, vocab_size, generator=generator)).softmax(
        -1
    )
    tokens = sample(q, rand(rows, tree.nodes))
    fixed = (rand(rows, 1 + tree.nodes) < forced)[..., None]
    p = torch.where(
        fixed,
        one_hot(torch.randint(vocab_size, (rows, 1 + tree.nodes), generator=generator), vocab_size),
        p,
    )
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


class RowTrees:
    """Deterministic proposals on another tree for every row and round, as in EAGLE-2: a node is its
    parent's next most probable token.
    """

    nodes, depth = 5, 4
    uniforms = 1
    shapes = torch.tensor(
        [[-1, -1, -1, 0, 0], [-1, 0, 1, 2, 1], [-1, -1, 1, 1, 3], [-1, 0, 0, 1, 1]]
    )

    def __init__(self, draft):
        self.draft = draft

    def begin(self, prompts):
        self.draft.begin(prompts, self.nodes)

    def propose(self, uniforms):
        parents = self.shapes[(uniforms[:, 0] * len(self.shapes)).long()]
        tree = Tree(parents, self.depth, 3)
        self.draft.roots()
        prefixes = self.draft._frontier.expand(-1, 1 + self.nodes)
        for _ in range(self.depth):
            above = take(prefixes, 1 + parents)
            ranks = tree.earlier_siblings.sum(-1)
            tokens = (
                lookup(self.draft.table, above)
                .argsort(-1, descending=True)
                .gather(-1, ranks.unsqueeze(-1))
                .squeeze(-1)
            )
            prefixes = torch.cat([prefixes[:, :1], above * self.draft.vocab_size + 1 + tokens], 1)
        return Draft(tokens, one_hot(tokens, self.draft.vocab_size), tree)

    def observe(self, *decided):
        self.draft.observe(*decided)
