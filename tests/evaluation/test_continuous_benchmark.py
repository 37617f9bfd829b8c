"""The benchmark of continuous tokens measures real rounds; nothing here looks at how long they
take.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_rows_but
from paths import ROOT
from torch import nn

from tempera.commands import bench
from tempera.config.compose import composed
from tempera.continuous.diffusion import DiffusionSampling
from tempera.continuous.loop import Parallel, Speculative
from tempera.continuous.mar import MAR, MARConfig
from tempera.continuous.rules import CSpD, DensityRule, PathCoupling
from tempera.continuous.target import MARTarget, draft
from tempera.errors import TemperaError
from tempera.evaluation import continuous_benchmark
from tempera.evaluation.continuous_benchmark import continuous_table, measure_continuous
from tempera.targets.conditioners import ClassLabels

TINY = MARConfig((3, 4), 4, width=16, depth=1, heads=2, buffer=2, classes=5, head_width=16)
CPU = torch.device("cpu")


def network(seed: int = 0) -> MAR:
    torch.manual_seed(seed)
    made = MAR(TINY)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


def target() -> MARTarget:
    sampling = DiffusionSampling(guidance=2.0, denoising_steps=4, last_noise=True)
    return MARTarget(network(), ClassLabels(TINY.classes).encode, sampling)


@pytest.mark.parametrize(
    ("rule", "prefill"),
    slow_rows_but(
        [(PathCoupling(), 0.3), (PathCoupling(), 0.0), (CSpD(), 0.3)], (PathCoupling(), 0.3)
    ),
)
def test_rounds_are_timed_without_the_prefill(rule: DensityRule, prefill: float) -> None:
    model = target()
    same = Speculative(draft(model, network()), rule, 3, prefill)
    report = measure_continuous(model, same, [1, 2], 2, CPU)
    assert [column.batch_size for column in report.columns] == [1, 2] and report.gamma == 3
    for column in report.columns:
        assert set(column.parts) == {"draft", "target", "verify", "commit"}
        assert column.ratio == pytest.approx(column.step.median / column.round.median)
        assert column.ratio_limit == pytest.approx(
            column.step.median / column.parts["target"].median
        )
        assert 1 <= column.accepted_length <= 4 and column.speedup > 0 and column.memory > 0
    rows = {name: cells for name, *cells in continuous_table(report)}
    assert "round, γ = 3" in rows and "round: one of 3 draft steps" in rows
    assert all(len(cells) == 2 for cells in rows.values())
    assert json.loads(json.dumps(report.as_dict()))["columns"][1]["batch_size"] == 2


def test_a_draft_that_is_the_target_is_kept_whole() -> None:
    model = target()
    method = Speculative(draft(model, network()), PathCoupling(), 3, 0.0)
    (column,) = measure_continuous(model, method, [1], 1, CPU).columns
    assert column.accepted_length == 4  # three drafted tokens and the bonus token


def test_a_prefill_of_whole_images_leaves_nothing_to_time() -> None:
    model = target()
    whole = Speculative(draft(model, network()), CSpD(), 3, 0.99, steps=1)
    with pytest.raises(TemperaError, match="prefill=0.99 draws all 12 tokens of an image"):
        measure_continuous(model, whole, [1], 1, CPU)


def test_the_clock_does_not_see_the_prefill() -> None:
    model, clock = target(), continuous_benchmark.Clock(CPU)
    method = Speculative(draft(model, network()), CSpD(), 3, 0.95)
    timed = continuous_benchmark._decoded(model, method, ["0"], 0, CPU, clock)
    assert timed.rounds == 0 and timed.length == 0 and not clock.seconds
    plain = continuous_benchmark._decoded(model, Parallel(), ["0"], 0, CPU)
    assert plain.rounds == 12 and plain.image == plain.in_rounds > 0


def test_a_method_without_rounds_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    options = ["model=shapes_mar", f"directory={tmp_path}", "weights=nowhere"]
    for method in ("ar", "draft"):
        with pytest.raises(TemperaError, match=r"choose method=cspd, cspd_published or cspd_exact"):
            bench.main(composed("bench", [*options, f"method={method}"]))


@pytest.mark.slow
def test_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> Any:
        quick = ["model=shapes_mar", "denoising_steps=2", "repeats=1", "batch_sizes=[1]"]
        monkeypatch.setattr(
            sys, "argv", ["bench.py", *quick, *options, f"hydra.run.dir={tmp_path}"]
        )
        try:
            runpy.run_path(str(ROOT / "eval" / "bench.py"), run_name="__main__")
        except SystemExit as stop:
            return stop.code
        return 0

    assert run("method=cspd", "gamma=2") == 0
    assert "round, γ = 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["gamma"] == 2
