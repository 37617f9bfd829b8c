"""A session by itself: how many keys it loads. Its passes are tested in test_transformer.py."""

import torch
from tiny_networks import GRID, PREFIX, llamagen

from tempera.targets.forward import ROOM, Session
from tempera.targets.prompt_state import PromptState

LENGTH = GRID[0] * GRID[1]


@torch.no_grad()
def test_loaded_keys_grow_in_steps_up_to_the_whole_cache_which_compiled_passes_load():
    keep = torch.ones(2, PREFIX, dtype=torch.bool)
    session = Session(llamagen(), granularity=4)
    session.begin(PromptState(torch.randn(2, PREFIX, 16), keep, 1, LENGTH), 3)
    assert session.kv_length() == 12  # 4 before the root, and 2 + 3, in fours
    session.prompt.advance(torch.tensor([0, 5]), 5)
    assert session.kv_length() == 16
    assert session.capacity(3) == session.cache.capacity == 32  # 5 + 20 − 1 + 2 + 3 = 29, in fours
    session.compile()
    session.begin(session.prompt, 3)
    whole = -(-(26 + ROOM) // 4) * 4
    assert session.kv_length() == session.cache.capacity == whole
    shorter = PREFIX - 2  # so graphs do not depend on the length of prompts
    session.begin(PromptState(torch.randn(2, shorter, 16), keep[:, :shorter], 1, LENGTH), 3)
    assert session.kv_length() == whole
