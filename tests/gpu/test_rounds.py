"""On a GPU: compiled rounds emit the tokens of eager ones, a round is read once, and the smallest
size of `eval/bench.py` is measured. Run them with `pytest -m gpu`.
"""

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import composed

from tempera.commands.bench import main
from tempera.config.build import build_drafter, build_rule, build_target
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams

pytestmark = pytest.mark.gpu
PROMPTS = ["a small red ring", "a large blue star left of a small white square"]
METHODS = {
    "ar": [],
    "eagle": ["tree=chain"],
    "eagle tree": ["tree=mc_sim_7b_63"],
    "eagle2": [],
    "coolsd": [],
    "parallel": ["drafter.path=random", "depth=3"],
    "parallel tree": ["drafter.path=random", "tree=mc_sim_7b_63"],
    "sjd": ["window=16"],
    "jacobi": ["window=16"],
    "scd": ["window=16"],
    "sjd_pac": ["window=32"],
}


def parts(name: str, compiled: bool) -> tuple[Any, Any, Any]:
    """The shipped model on the GPU, in float32, with a method."""
    options = [f"method={name.split()[0]}", *METHODS[name], "device=cuda", "dtype=float32"]
    cfg = composed(*options)
    target: Any = build_target(cfg)
    target.pack()
    if compiled:
        target.compile()
    drafter = build_drafter(cfg, target)
    return target, drafter, build_rule(cfg)


def decoded(name: str, compiled: bool, batches: int = 2) -> list[torch.Tensor]:
    """The images of several batches; the second one replays the graphs of the first."""
    target, drafter, rule = parts(name, compiled)
    streams = [RandomStreams(seed, PROMPTS, "cuda") for seed in range(batches)]
    return [decode(target, drafter, rule, one, PROMPTS).tokens.cpu() for one in streams]


@pytest.mark.parametrize("name", METHODS)
def test_compiled_rounds_emit_the_tokens_of_eager_ones(name: str) -> None:
    eager, compiled = decoded(name, False), decoded(name, True)
    same = [
        float((one == other).float().mean()) for one, other in zip(eager, compiled, strict=True)
    ]
    assert all(one[:, 0].equal(other[:, 0]) for one, other in zip(eager, compiled, strict=True))
    assert min(same) > 0.9, "rounding may flip a draw near a boundary, not many"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_read_once(name: str, compiled: bool) -> None:
    """PyTorch warns of every synchronisation; those of a decode are one per round, and as many
    more as its beginning and end need.
    """
    target, drafter, rule = parts(name, compiled)
    streams = [RandomStreams(seed, PROMPTS, "cuda") for seed in range(2)]
    decode(target, drafter, rule, streams[0], PROMPTS)  # compiles and captures
    reads: list[int] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decode(
                target,
                drafter,
                rule,
                streams[1],
                PROMPTS,
                observe=lambda *_: reads.append(
                    sum("synchroniz" in str(one.message) for one in seen)
                ),
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    later = [after - before for before, after in pairwise(reads)]
    assert len(later) > 3 and set(later) == {1}


def test_a_real_size_is_timed(tmp_path: Path) -> None:
    options = ["model=llamagen_xl_stage1", "weights=random", "drafter.path=random"]
    options += ["batch_sizes=[1]", "repeats=2", "compile=both", f"directory={tmp_path}"]
    columns = main(composed(*options, config="bench"))["columns"]
    assert [column["compiled"] for column in columns] == [False, True]
    assert all(column["memory"] > column["passes"]["cache"] for column in columns)
