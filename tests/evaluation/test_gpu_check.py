"""`tempera-gpu-check`, on a CPU and without compiling: no GPU is at hand."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_networks import tiny_eagle, tiny_target

from tempera.commands import gpu_check
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.decoding import compiled
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact


def options(directory: Path, *more: str) -> Any:
    quick = ["device=cpu", "batch_sizes=[1]", "repeats=1", f"directory={directory}"]
    return composed("gpu_check", ["tracking=none", *quick, *more])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few methods, nothing compiled."""
    compiled._compile.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    methods = ("medusa drafter.path=random depth=3", "sjd window=6")
    monkeypatch.setattr(gpu_check, "METHODS", methods)
    monkeypatch.setattr(gpu_check, "SHIPPED_METHODS", ())
    monkeypatch.setattr(gpu_check, "ROUNDS", {"chain": "eagle tree=chain depth=3"})
    yield
    compiled._compile.cache_clear()


@pytest.mark.slow
def test_the_check_on_a_cpu(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gpu_check.main(options(tmp_path, "families=[shapes,lumina]", "real=[llamagen_b_c2i]"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    same = found["same_tokens"]
    assert len(same) == 4 and min(same.values()) > gpu_check.AGREE
    (row,) = found["rounds"]
    assert row["ms"] > row["AR, ms"] > 0 and row["AR's limit, ms"] > 0
    assert row["operators"] > row["AR's operators"] > 0 and row["graph replays"] is None
    assert (tmp_path / "gpu.md").read_text().count("llamagen_b_c2i") == 1
    assert "llamagen_b_c2i, chain" in capsys.readouterr().out
    made = iter([torch.zeros(2, 10), torch.tensor([[0.0] * 8 + [1.0] * 2] * 2)] * 9)
    monkeypatch.setattr(gpu_check, "tokens", lambda *_: next(made))
    with pytest.raises(TemperaError, match="failed: .*lumina sjd"):
        gpu_check.main(options(tmp_path, "families=[lumina]", "real=[]"))


def test_a_model_that_does_not_fit_costs_its_rows(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In building or in timing; the others are timed."""

    def built(parts: Parts) -> str:
        if parts.model == "lumina":
            raise torch.OutOfMemoryError("no room")
        return parts.model

    monkeypatch.setattr(Parts, "fast_target", built)
    monkeypatch.setattr(gpu_check, "timed", lambda *_: {"ms": 2.0})
    gpu_check.main(options(tmp_path, "families=[]", "real=[lumina,llamagen_b_c2i]"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row.get("ms") for row in found["rounds"]] == [None, 2.0]
    first, second = (tmp_path / "gpu.md").read_text().splitlines()[2:]
    assert first.count("–") == 1 and "lumina" in first and " 2 " in second


def test_an_exception_costs_one_check_and_gpu_json_holds_the_others(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def timed(target: Any, parts: Any, plan: Any) -> Any:
        if plan.batch_sizes == [1]:
            raise RuntimeError("no such kernel\nin line 3")
        return {"ms": 2.0}

    def tokens(parts: Any, *_: Any) -> torch.Tensor:
        written.append(json.loads((tmp_path / "gpu.json").read_text()))
        if len(written) == 1:
            raise ValueError("planted")
        return torch.zeros(2, 3)

    written: list[Any] = []
    monkeypatch.setattr(gpu_check, "tokens", tokens)
    monkeypatch.setattr(gpu_check, "timed", timed)
    monkeypatch.setattr(Parts, "fast_target", lambda parts: parts.model)
    both = options(tmp_path, "families=[lumina]", "real=[lumina]", "batch_sizes=[1,2]")
    with pytest.raises(TemperaError, match=r"failed: 1 checks .*no such kernel; .*planted") as why:
        gpu_check.main(both)
    assert "\n" not in str(why.value)
    assert written[0]["result"] == "unfinished" and len(written[0]["rounds"]) == 2
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row.get("ms") for row in found["rounds"]] == [None, 2.0]
    assert list(found["same_tokens"]) == ["lumina sjd window=6"] and found["result"] == "failed"
    assert list(found["errors"].values()) == ["RuntimeError: no such kernel", "ValueError: planted"]
    assert "lumina, chain" in (tmp_path / "gpu.md").read_text()


def test_it_needs_neither_pandas_nor_pyarrow_nor_wandb() -> None:
    """Which a bare GPU machine may lack."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('pandas', 'pyarrow', 'wandb'))); "
        "import tempera.commands.gpu_check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_begins_too_late_is_named(tmp_path: Path, quick: None) -> None:
    late = options(tmp_path, "families=[lumina]", "real=[lumina]", "minutes=0")
    gpu_check.main(late)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["rounds"] == [] and found["same_tokens"] == {}
    names = ["lumina, chain, batch 1", *(f"lumina {method}" for method in gpu_check.METHODS)]
    assert found["left_out"] == names


def test_operators_of_a_round_are_counted() -> None:
    """Those of the rounds alone: as many whatever the image's beginning and end take."""
    target = tiny_target()
    chain = Tree.chain(3)
    method = Method(StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), chain), Exact())
    with target.encoded(["1"]):
        found = launches(target, method, ["1"])
        plain = launches(target, method.plain, ["1"])
    assert found.operators > plain.operators > 10
    assert found.kernels is None and found.graph_replays is None
