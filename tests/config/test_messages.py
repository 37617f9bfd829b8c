"""What a script says when the machine, not the command line, is at fault; the command line's
mistakes are in test_configs.py.
"""

from pathlib import Path

import pytest
import torch

from tempera.config.messages import sentence


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_says_which_options_help(problem: Exception) -> None:
    told = sentence(problem, Path("conf"), "eval", [])
    assert told is not None and told.startswith(
        "out of memory: give a smaller batch_size, dtype=bfloat16 or a shorter draft"
    )
    assert "\n" not in told


def test_a_bug_is_not_the_users() -> None:
    assert sentence(RuntimeError("shape mismatch"), Path("conf"), "eval", []) is None
