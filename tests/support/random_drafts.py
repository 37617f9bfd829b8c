"""Drafts made up for tests."""

import torch

from tempera.continuous.noise import Noise
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import one_hot, sample
from tempera.decoding.random_streams import Draws, RandomStreams
from tempera.decoding.sequences import Sequences
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


def new_sequences(rows: int, length: int = 6, depth: int = 3) -> Sequences:
    """Images that have begun, without tokens."""
    sequences = Sequences(rows, length, depth, torch.device("cpu"))
    sequences.begin(range(rows), range(rows), [str(row) for row in range(rows)])
    return sequences


def new_draws(seed: int, ids: list[str]) -> Draws:
    """The draws of a batch of prompts."""
    draws = Draws(RandomStreams(seed, ids), len(ids))
    draws.begin(range(len(ids)), 0)
    return draws


def new_noise(ids: list[str]) -> Noise:
    """The noise of a batch of prompts."""
    noise = Noise(RandomStreams(0, ids), len(ids))
    noise.begin(range(len(ids)), 0)
    return noise


class Spy:
    """Passes everything on and writes down what the loop said."""

    def __init__(self, drafter):
        self.drafter, self.heard = drafter, []
        self.tree, self.compiles = drafter.tree, drafter.compiles
        self.nodes, self.depth, self.uniforms = drafter.nodes, drafter.depth, drafter.uniforms
        self.first_uniforms = drafter.first_uniforms

    def begin(self, prompts, sequences, uniforms, rows):
        self.prompts = prompts
        self.drafter.begin(prompts, sequences, uniforms, rows)

    def propose(self, sequences, uniforms):
        assert uniforms.shape == (len(self.prompts), self.uniforms)
        return self.drafter.propose(sequences, uniforms)

    def observe(self, sequences, draft, verdict, scores):
        self.heard.append((draft, verdict, scores, sequences.emitted.clone()))
        self.drafter.observe(sequences, draft, verdict, scores)
