"""GSD's groups as its public code forms them."""

import pytest
import torch
from near_codes import published_gsd
from published_code.gsd import PublishedGSD, grouped
from random_drafts import SMALL, random_draft
from tiny_networks import VOCAB, tiny_target

from tempera.decoding.interfaces import Scores
from tempera.decoding.verification import verify
from tempera.drafters.jacobi import sjd
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact

DEPTH = torch.tensor(1)
CODES = 30
EMBEDDINGS = 0.4 * torch.randn(CODES, 3, generator=torch.Generator().manual_seed(5))


def group(p, x, ids=None):
    """By hand: places -7 … +6 in the order of p, the least probable first."""
    order = sorted(range(CODES), key=lambda code: (p[code].item(), code))
    place = order.index(x)
    if place < 7:
        return [x]
    window = order[place - 7 : place + 7]
    members = [y for y in window if abs(p[y] - p[x]) < 0.15]
    if ids is not None and any(ids[y] >= 10_000 for y in window):
        return members
    return [y for y in members if (EMBEDDINGS[y] - EMBEDDINGS[x]).square().sum() < 0.5]


@pytest.mark.parametrize("first", [0, 9_985, 20_000])
def test_the_groups_are_those_of_the_public_code(first):
    """With ids below 10,000, on both sides of it, and above."""
    ids = torch.arange(first, first + CODES)
    rule = PublishedGSD.on(EMBEDDINGS, ids)
    generator = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(5):
        p, q = (2 * torch.randn(2, CODES, generator=generator)).softmax(-1)
        groups = [group(p, x, ids) for x in range(CODES)]
        f = torch.stack([(p[one].sum() / q[one].sum()).clamp(max=1) for one in groups])
        torch.testing.assert_close(rule.accept(p, q, DEPTH), f)
        every = torch.arange(CODES)
        rows = p.expand(CODES, -1), q.expand(CODES, -1)
        torch.testing.assert_close(rule.accept_at(*rows, every, DEPTH), f)
        torch.testing.assert_close(
            rule.residual(p, q, DEPTH, DEPTH), Exact().residual(p, q, DEPTH, DEPTH)
        )
        sizes |= {len(one) for one in groups}
    assert len(sizes) > 4


def test_the_target_gives_the_embeddings_of_its_tokens():
    target = tiny_target()
    table = target.network.embed_tokens(torch.arange(VOCAB))
    distances = (table[:, None] - table).square().sum(-1)
    middle = distances.median().item() + 1e-3
    method, close = grouped(sjd(target, 3), distance=middle), distances < middle
    rule = method.rule
    assert rule.close.equal(close)
    assert close.sum() > VOCAB and not close.all()
    assert "close" not in repr(rule)  # a run's identity


def test_it_verifies_guesses_of_the_target_alone():
    with pytest.raises(TemperaError, match="choose drafter=sjd"):
        grouped(NoDraft())


def test_no_token_replaces_a_forced_one():
    draft, p, uniforms = random_draft(400, SMALL, vocab_size=10, forced=0.5)
    verdict = verify(
        draft, Scores(p, torch.zeros(*p.shape[:2], 0)), published_gsd(10), None, uniforms
    )
    at_root = p[:, 0].amax(-1) >= 1
    assert at_root.any()
    assert verdict.tokens[at_root, 0].equal(p[at_root, 0].argmax(-1))
