"""`eval/gpu_check.py`, on a CPU and without compiling: no GPU is at hand."""

import json
from pathlib import Path

import pytest
import torch

from tempera.commands import gpu_check
from tempera.config.compose import composed
from tempera.errors import TemperaError


@pytest.mark.slow
def test_the_check_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    quick = ["families=[shapes,lumina]", "real=[llamagen_b_c2i]", "batch_sizes=[1]", "repeats=1"]
    cfg = composed("gpu_check", ["device=cpu", f"directory={tmp_path}", *quick])
    cfg.methods, cfg.shipped = ["method=sjd window=6"], []
    cfg.rounds = {"chain": "method=eagle tree=chain depth=3"}
    found = gpu_check.main(cfg)
    assert len(found["same_tokens"]) == 2
    assert min(found["same_tokens"].values()) > gpu_check.AGREE
    (row,) = found["rounds"]
    assert row["ms"] > row["ar_ms"] > 0 and row["limit_ms"] > 0
    assert json.loads((tmp_path / "gpu.json").read_text()) == found
    assert (tmp_path / "gpu.md").read_text().count("| llamagen_b_c2i | 1 | chain |") == 1
    monkeypatch.setattr(gpu_check, "AGREE", 1.1)
    cfg.families, cfg.real = ["lumina"], []
    with pytest.raises(TemperaError, match="lumina method=sjd"):
        gpu_check.main(cfg)


def test_a_size_that_does_not_fit_has_no_numbers() -> None:
    line = gpu_check.table([{"model": "lumina", "batch": 16, "round": "tree"}]).splitlines()[-1]
    assert line == "| lumina | 16 | tree | out of memory | – | – | – | – |"
