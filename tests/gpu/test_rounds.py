"""On a GPU: a round is read once, and `eval/gpu_check.py` runs. Run them with `pytest -m gpu`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import METHODS, composed, method_options

from tempera.commands import gpu_check
from tempera.config.parts import Parts
from tempera.decoding import sequences
from tempera.decoding.loop import decode, rounds
from tempera.decoding.random_streams import RandomStreams

pytestmark = pytest.mark.gpu
PROMPTS = ["a small red ring", "a large blue star left of a small white square"]


def parts(name: str, compiled: bool) -> tuple[Any, Any, Any]:
    """The shipped model on the GPU, in float32, with a method."""
    cfg = composed(*method_options(name), "device=cuda", "dtype=float32")
    target: Any = Parts.of(cfg).target()
    target.pack()
    if compiled:
        target.compile()
    drafter = Parts.of(cfg).drafter(target)
    return target, drafter, Parts.of(cfg).rule()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_read_once(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round, PyTorch refuses all synchronisation but the reading of the counts."""
    read = sequences._Report.read
    forbid = torch.cuda.set_sync_debug_mode

    def allowed(report: sequences._Report) -> list[list[int]]:
        forbid("default")
        try:
            return read(report)
        finally:
            forbid("error")

    target, drafter, rule = parts(name, compiled)
    streams = [RandomStreams(seed, PROMPTS, "cuda") for seed in range(2)]
    decode(target, drafter, rule, streams[0], PROMPTS)  # compiles and captures
    monkeypatch.setattr(sequences._Report, "read", allowed)
    try:
        seen = sum(1 for _ in rounds(target, drafter, rule, streams[1], PROMPTS))
    finally:
        forbid("default")
    assert seen > 3


def test_the_gpu_check(tmp_path: Path) -> None:
    few = ["methods=[ar,eagle2]", "of_layouts=['sjd window=6']", f"directory={tmp_path}"]
    gpu_check.main(composed("device=cuda", *few, config="gpu_check"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert min(found["same_tokens"].values()) > 0.9 and len(found["same_tokens"]) == 5
