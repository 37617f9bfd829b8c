"""A session by itself: passes over random prefixes, compared with the network's forward pass."""

import torch
from tiny_networks import GRID, PREFIX, llamagen

from tempera.decoding.trees import Tree
from tempera.targets.forward import ROOM, Session
from tempera.targets.masks import causal_mask
from tempera.targets.prompt_state import PromptState

LENGTH = GRID[0] * GRID[1]


@torch.no_grad()
def started_session() -> Session:
    """Two prompts without guidance, the first with one padded token."""
    keep = torch.ones(2, PREFIX, dtype=torch.bool)
    keep[0, 0] = False
    embeds = torch.randn(2, PREFIX, 16, generator=torch.Generator().manual_seed(0))
    session = Session(llamagen(), granularity=4)
    session.begin(PromptState(embeds, keep, 1, LENGTH), 3)
    return session


def hidden_of(session: Session, row: int, embeds: torch.Tensor) -> torch.Tensor:
    """Hidden states of a row's whole sequence, by the Hugging Face decoder without a cache."""
    count = len(embeds)
    mask = causal_mask(session.prompt.keep[row : row + 1], count, embeds.dtype)
    positions = torch.arange(count)[None]
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    return session.network.model(inputs_embeds=embeds[None], **options).last_hidden_state[0]


@torch.no_grad()
def test_scoring_a_chain_equals_a_plain_forward_pass():
    session = started_session()
    prompt, new = session.prompt, torch.randn(2, 3, 16)
    embeds = torch.cat([prompt.embeds[:, -1:], new], 1)
    hidden = session.run(embeds, session.layout_of(Tree.chain(3)))
    for row in range(2):
        expected = hidden_of(session, row, torch.cat([prompt.embeds[row], new[row]]))
        torch.testing.assert_close(hidden[row], expected[PREFIX - 1 :], atol=1e-5, rtol=1e-4)
        states, real = session.prefix_hidden[row], prompt.keep[row, :-1]
        torch.testing.assert_close(states[real], expected[: PREFIX - 1][real])


@torch.no_grad()
def test_after_compaction_the_next_round_continues_the_accepted_branch():
    session = started_session()
    prompt, new, more = session.prompt, torch.randn(2, 3, 16), torch.randn(2, 1, 16)
    tree = Tree.from_paths([[0], [1], [1, 0]])
    session.run(torch.cat([prompt.embeds[:, -1:], new], 1), session.layout_of(tree))
    session.compact(torch.tensor([[1, 2], [0, -1]]))  # accepted: nodes 1 and 2; node 0
    prompt.advance(torch.tensor([3, 2]), 3)
    hidden = session.run(more, session.layout_of(Tree.empty()))
    for row, branch in enumerate([[1, 2], [0]]):
        sequence = torch.cat([prompt.embeds[row], new[row, branch], more[row]])
        expected = hidden_of(session, row, sequence)[-1]
        torch.testing.assert_close(hidden[row, 0], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_loaded_keys_grow_in_steps_up_to_the_whole_cache_which_compiled_passes_load():
    session = started_session()
    assert session.kv_length() == 12  # 4 before the root, and 2 + 3, in fours
    session.prompt.advance(torch.tensor([0, 5]), 5)
    assert session.kv_length() == 16
    assert session.capacity(3) == session.cache.capacity == 32  # 5 + 20 − 1 + 2 + 3 = 29, in fours
    session.compile()
    session.begin(session.prompt, 3)
    assert session.kv_length() == session.cache.capacity == -(-(26 + ROOM) // 4) * 4
