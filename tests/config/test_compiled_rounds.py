"""`compile=auto` compiles where it can be done and pays, and otherwise says why not."""

from typing import Any

import pytest
import torch

from tempera.config import parts
from tempera.decoding import compiled
from tempera.errors import TemperaError

GPU = torch.device("cuda")


def test_a_long_run_on_a_gpu_is_compiled(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(parts, "why_not", lambda device: None)
    assert parts.pays(GPU, parts.EARNED) and parts.pays(GPU, None)
    assert not parts.pays(torch.device("cpu"), None) and not capsys.readouterr().out
    assert not parts.pays(GPU, parts.EARNED - 1) and "compile=true" in capsys.readouterr().out


def test_where_nothing_can_be_compiled_rounds_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(*arguments: Any) -> Any:
        raise TemperaError("no Triton")

    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # there is no such device
    monkeypatch.setattr(compiled, "graph_of", lambda part: refused)
    assert not parts.pays(GPU, None)
    assert capsys.readouterr().out == "rounds are not compiled: no Triton\n"
    monkeypatch.setattr(compiled, "graph_of", lambda part: lambda *_: None)
    assert parts.pays(GPU, None) and not capsys.readouterr().out
