"""The experiment of docs/decode.md runs, and keeps the law of its target."""

import re
from pathlib import Path
from typing import Any

import torch

import tempera

PAGE = Path(__file__).parents[2] / "docs/decode.md"


def test_the_experiment_runs_and_keeps_the_law() -> None:
    code, by_rounds, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    many = code.replace("range(100)", "range(20_000)")
    assert many != code
    names: dict[str, Any] = {}
    exec(many, names)
    exec(by_rounds, names)
    assert torch.equal(names["round"].tokens, names["output"].tokens)
    tokens, table = names["output"].tokens, names["target"].table
    assert tokens.shape == (20_000, 16)
    assert 1 < names["accepted_length"] < 4
    assert isinstance(names["target"], tempera.Target)
    first = torch.bincount(tokens[:, 0], minlength=8) / len(tokens)
    torch.testing.assert_close(first, table[8], atol=0.02, rtol=0)
    pairs = torch.bincount((tokens[:, :-1] * 8 + tokens[:, 1:]).flatten(), minlength=64)
    law = pairs.view(8, 8) / pairs.view(8, 8).sum(1, keepdim=True)
    torch.testing.assert_close(law, table[:8], atol=0.02, rtol=0)
