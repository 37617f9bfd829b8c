"""`eval/gpu_check.py`, on a CPU and without compiling: no GPU is at hand."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

from tempera.config.compose import composed
from tempera.errors import TemperaError


@pytest.mark.slow
def test_the_check_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = runpy.run_path(str(ROOT / "eval" / "gpu_check.py"))["main"]
    script = main.__globals__
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    script["METHODS"] = [name for name in script["METHODS"] if name[:3] in ("med", "sjd")]
    script["SHIPPED"] = []
    script["ROUNDS"] = {"chain": "eagle tree=chain depth=3"}
    quick = ["families=[shapes,lumina]", "real=[llamagen_b_c2i]", "batch_sizes=[1]", "repeats=1"]
    cfg = composed("gpu_check", ["device=cpu", f"directory={tmp_path}", *quick])
    found = main(cfg)
    assert len(same := found["same_tokens"]) == 4 and min(same.values()) > script["AGREE"]
    (row,) = found["rounds"]
    assert row["ms"] > row["AR, ms"] > 0 and row["AR's limit, ms"] > 0
    assert json.loads((tmp_path / "gpu.json").read_text()) == found
    assert (tmp_path / "gpu.md").read_text().count("llamagen_b_c2i") == 1
    without_numbers = {"model": "lumina", "batch": 16, "round": "tree"}
    assert script["table"]([row, without_numbers]).splitlines()[-1].count("–") == 5
    script["AGREE"], cfg.families, cfg.real = 1.1, ["lumina"], []
    with pytest.raises(TemperaError, match="lumina sjd"):
        main(cfg)
