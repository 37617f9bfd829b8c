"""Rules that need a codebook, on one of a few made-up codes."""

import torch
from published_code.gsd import PublishedGSD

from tempera.rules.codebook_neighbours import Neighbours
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP


def near(codes, k, proximity="l2"):
    """The k nearest of some random codes."""
    return Neighbours.build(
        torch.randn(codes, 3, generator=torch.Generator().manual_seed(5)), k, proximity
    )


def next_codes(codebook):
    """The next five instead of the nearest, which take longer for a large codebook."""
    codes = len(codebook)
    return Neighbours((torch.arange(codes)[:, None] + torch.arange(5)) % codes, "l2", "0")


def published_gsd(codes):
    """The groups of GSD's public code, for random embeddings."""
    embeddings = 0.4 * torch.randn(codes, 3, generator=torch.Generator().manual_seed(5))
    return PublishedGSD.on(embeddings, torch.arange(codes))


def near_rules(codes, k=3):
    """By name, with both residuals."""
    table = near(codes, k)
    return {
        f"{name} {residual}": make(residual)
        for residual in ("published", "optimal", "kl")
        for name, make in {
            "lantern": lambda residual: Lantern(table, 0.3, "tvd", residual),
            "lantern jsd": lambda residual: Lantern(table, 0.2, "jsd", residual),
            "lantern++": lambda residual: LanternPP(table, 1.5, residual),
            "grouped": lambda residual: GSD(table, 1, residual),
            "grouped static": lambda residual: GSD(table, None, residual),
        }.items()
    }
