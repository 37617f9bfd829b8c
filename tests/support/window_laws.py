"""Exactness checks for drafters whose guesses are refined over iterations."""

import torch

from tempera.decoding.probabilities import Sampling
from tempera.exactness.tables import ExactnessReport, TableTarget, compare, emit, emitted_law
from tempera.rules.standard import Exact

INITIALISATIONS = [
    "random",
    "horizontal_repeat",
    "vertical_repeat",
    "horizontal_sample",
    "vertical_sample",
]


def local_target(vocab_size=3, grid=(2, 2), sampling=None, seed=0, share=0.5, forced=None):
    """Tables of which a share depends on the position alone, so that a guess often survives when a
    token before it changes.
    """
    length = grid[0] * grid[1]
    target = TableTarget(
        vocab_size, length, sampling or Sampling(1.0), seed, forced=forced, grid=grid
    )
    levels = target.logits.split([vocab_size**place for place in range(length)], 1)
    target.logits = torch.cat(
        [share * level.mean(1, keepdim=True) + (1 - share) * level for level in levels], 1
    )
    target.tabulate()
    return target


def check_window(make, rule=None, rows=200_000, seed=0, **options):
    """What the loop emits with the drafter that `make` makes for a target, against the target's
    law.
    """
    target = local_target(seed=seed, **options)
    output = emit(target, make(target), rule or Exact(), rows, seed)
    found = compare(emitted_law(output.tokens, target.vocab_size), target.law())
    return ExactnessReport(
        found.p_value, found.tv, found.noise, found.rows, float(output.trace.accepted_length.mean())
    )
