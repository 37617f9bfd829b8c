"""`tempera-gpu-check`, on a CPU and without compiling."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import CONF
from tiny_networks import tiny_eagle, tiny_target

from tempera.commands import gpu_check
from tempera.config.compose import composed
from tempera.decoding import compiled
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact

CONTINUOUS = {"cspd", "cspd_exact", "draft"}


def options(directory: Path, *more: str) -> Any:
    return composed("gpu_check", ["device=cpu", f"directory={directory}", *more])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compiled.forget()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    yield
    compiled.forget()


def test_the_check_on_a_cpu(tmp_path: Path, uncompiled: None, capsys: Any) -> None:
    gpu_check.main(options(tmp_path, "models=[lumina]", "of_layouts=[ar,'sjd window=6']"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["same_tokens"] == {"lumina ar": 1.0, "lumina sjd window=6": 1.0}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2 checks on cpu") and said[-1].startswith("passed: 2 checks")
    assert said[2].startswith("lumina ar … 100% equal (")


def test_every_method_of_discrete_tokens_is_checked(tmp_path: Path) -> None:
    named = {str(method).split()[0] for method in options(tmp_path).methods}
    assert named == {path.stem for path in (CONF / "method").glob("*.yaml")} - CONTINUOUS


def test_a_dry_run_tells_the_checks_and_refuses_unknown_ones(tmp_path: Path, capsys: Any) -> None:
    few = ("models=[shapes,lumina]", "methods=[ar,sjd]", "dry_run=true")
    gpu_check.main(options(tmp_path, *few, "of_layouts=[ar]"))
    told = capsys.readouterr().out
    assert "to do: 2 checks of model=shapes: ar, sjd\nto do: 1 check of model=lumina: ar\n" in told
    assert not (tmp_path / "gpu.json").exists()
    with pytest.raises(TemperaError, match="did you mean eagle"):
        gpu_check.main(options(tmp_path, *few, "of_layouts=[eagl]"))


def test_nothing_to_check_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match="nothing to check"):
        gpu_check.main(options(tmp_path, "methods=[]", "models=[shapes]"))


def test_an_exception_costs_one_check_and_gpu_json_holds_the_others(
    tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def tokens(parts: Any, *_: Any) -> torch.Tensor:
        written.append(json.loads((tmp_path / "gpu.json").read_text()))
        if len(written) == 1:
            raise ValueError("planted\nin line 3")
        same = 0.0 if len(written) % 2 else 0.2  # eager and compiled rounds in turn
        return (torch.arange(10) / 10 >= 1 - same).double()

    monkeypatch.setattr(gpu_check, "tokens", tokens)
    given = options(tmp_path, "models=[lumina]", "of_layouts=[ar,sjd]")
    with pytest.raises(
        TemperaError, match=r"failed: 1 checks .*sjd; .*ValueError: planted: th"
    ) as e:
        gpu_check.main(given)
    assert "\n" not in str(e.value)
    assert written[0]["result"] == "unfinished" and written[1]["errors"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["same_tokens"] == {"lumina sjd": 0.8} and found["result"] == "failed"
    assert found["errors"] == {"lumina ar": "ValueError: planted"}


@pytest.mark.slow
def test_it_needs_neither_pandas_nor_pyarrow_nor_wandb() -> None:
    """Which a bare GPU machine may lack."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('pandas', 'pyarrow', 'wandb'))); "
        "import tempera.commands.gpu_check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
