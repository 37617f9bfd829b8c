"""A session by itself: passes over random prefixes, compared with the network's forward pass."""

import gc
import weakref

import pytest
import torch
from tiny_networks import GRID, PREFIX, llamagen

from tempera.decoding.trees import Tree
from tempera.targets.forward import ROOM, Session
from tempera.targets.masks import causal_mask
from tempera.targets.prompt_state import PromptState

LENGTH = GRID[0] * GRID[1]


def started_session(nodes: int = 3, granularity: int = 4) -> Session:
    """Two prompts without guidance, the first with one padded token."""
    keep = torch.ones(2, PREFIX, dtype=torch.bool)
    keep[0, 0] = False
    embeds = torch.randn(2, PREFIX, 16, generator=torch.Generator().manual_seed(0))
    session = Session(llamagen(), granularity)
    with torch.no_grad():
        session.begin(PromptState(embeds, keep, 1, LENGTH), nodes)
    return session


def hidden_of(session: Session, embeds: torch.Tensor) -> torch.Tensor:
    """Hidden states of whole sequences, by the Hugging Face decoder without a cache."""
    count = embeds.shape[1]
    mask = causal_mask(session.prompt.keep, count, embeds.dtype)
    positions = torch.arange(count).expand(len(embeds), -1)
    model = session.network.model
    return model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state


@torch.no_grad()
def test_scoring_a_chain_equals_a_plain_forward_pass():
    session = started_session()
    prompt, new = session.prompt, torch.randn(2, 3, 16)
    embeds = torch.cat([prompt.embeds[:, -1:], new], 1)
    hidden = session.score(embeds, session.layout_of(Tree.chain(3)))
    expected = hidden_of(session, torch.cat([prompt.embeds, new], 1))
    torch.testing.assert_close(hidden, expected[:, PREFIX - 1 :], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(session.prefix_hidden[1], expected[1, : PREFIX - 1])


@torch.no_grad()
def test_after_compaction_the_next_round_continues_the_accepted_branch():
    session = started_session()
    prompt, new, more = session.prompt, torch.randn(2, 3, 16), torch.randn(2, 1, 16)
    tree = Tree.from_paths([[0], [1], [1, 0]])
    session.score(torch.cat([prompt.embeds[:, -1:], new], 1), session.layout_of(tree))
    session.compact(torch.tensor([[1, 2], [0, -1]]))  # accepted: nodes 1 and 2; node 0
    prompt.advance(torch.tensor([3, 2]), 3)
    hidden = session.score(more, session.layout_of(Tree.empty()))
    for row, branch in enumerate([[1, 2], [0]]):
        sequence = torch.cat([prompt.embeds[row], new[row, branch], more[row]])[None]
        keep = prompt.keep[row : row + 1]
        mask = causal_mask(keep, sequence.shape[1], sequence.dtype)
        states = session.network.model(
            inputs_embeds=sequence,
            attention_mask=mask,
            position_ids=torch.arange(sequence.shape[1])[None],
            use_cache=False,
        ).last_hidden_state
        torch.testing.assert_close(hidden[row, 0], states[0, -1], atol=1e-5, rtol=1e-4)


def test_loaded_keys_grow_in_steps_and_a_cache_with_room_is_kept():
    session = started_session()
    assert session.kv_length() == 12  # 4 before the root, and 2 + 3, in fours
    session.prompt.advance(torch.tensor([0, 5]), 5)
    assert session.kv_length() == 16
    assert session.capacity(3) == 32  # 5 + 20 − 1 + 2 + 3 = 29, in fours
    cache = session.cache
    with torch.no_grad():
        session.begin(session.prompt, 3)
        assert session.cache is cache
        session.begin(session.prompt, 10)
        assert session.cache is not cache
        cache = session.cache
        session.begin(session.prompt, 3)
        assert session.cache is cache and session.capacity(3) < cache.capacity


def test_compiled_passes_load_the_whole_cache():
    session = started_session()
    session.compile()
    with torch.no_grad():
        session.begin(session.prompt, 3)
    assert session.kv_length() == session.cache.capacity == -(-(26 + ROOM) // 4) * 4


def test_a_cache_that_makes_room_for_another_is_freed_at_once(monkeypatch):
    session = started_session()
    old, make = weakref.ref(session.cache), session.new_cache
    monkeypatch.setattr(session, "new_cache", lambda *sizes: made.append(old()) or make(*sizes))
    made = []
    gc.disable()
    try:
        with torch.no_grad():
            session.begin(session.prompt, 10)
    finally:
        gc.enable()
    assert made == [None]


def test_a_cache_that_did_not_fit_is_made_again(monkeypatch):
    session = started_session()
    make = session.new_cache

    def full(*sizes):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(session, "new_cache", full)
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            session.begin(session.prompt, 10)
        monkeypatch.setattr(session, "new_cache", make)
        session.begin(session.prompt, 10)
    assert session.cache.capacity == session.capacity(10)
