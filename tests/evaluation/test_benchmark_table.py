"""The benchmark's tables: which rows there are, and what stands in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from paths import CONF
from tiny_networks import tiny_eagle, tiny_target
from tiny_targets import composed, write_llamagen_classes

from tempera.commands import bench
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import benchmark_table
from tempera.evaluation.benchmark import BenchmarkPlan
from tempera.evaluation.benchmark_table import HEADINGS, BenchmarkJob, BenchmarkTable, measure_rows
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact


def chain(target: Any, depth: int = 2) -> Method:
    return Method(
        StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), Tree.chain(depth)), Exact()
    )


def plan(**options: Any) -> BenchmarkPlan:
    return BenchmarkPlan(**{"batch_sizes": [1, 2], "repeats": 1, "trees": [], **options})


@pytest.mark.slow
def test_a_row_for_each_method_batch_and_kind_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    made: list[tuple[str, bool]] = []

    def target() -> Any:
        made.append(("target", False))
        return tiny_target()

    def method(target: Any) -> Method:
        made.append(("method", target.compiled))
        return chain(target)

    jobs = [BenchmarkJob("tiny", target, {"chain": method})]
    parts: list[str] = []
    rows = list(measure_rows(jobs, plan(compile="both"), 1e9, progress=parts.append))
    assert [(row.steps, row.batch_size) for row in rows] == [
        ("eager", 1),
        ("eager", 2),
        ("compiled", 1),
        ("compiled", 2),
    ]
    assert made == [("target", False), ("method", False), ("method", True)]
    assert parts[0] == "tiny: weights" and "tiny, chain, compiled, batch 2: rounds" in parts
    for row in rows:
        assert row.problem is None and row.column is not None
        assert (row.column.batch_size, row.column.compiled) == (row.batch_size, row.compiled)


@pytest.mark.slow
def test_a_row_that_cannot_be_measured_says_why_and_the_next_one_follows() -> None:
    def broken(target: Any) -> Method:
        raise ZeroDivisionError("of\nrounds")

    class Small(StaticTreeDrafter):
        """A drafter that has room for one row."""

        def begin(self, prompts: list[str]) -> None:
            if len(prompts) > 1:
                raise torch.OutOfMemoryError("80 GiB")
            super().begin(prompts)

    def small(target: Any) -> Method:
        drafter = Small(EagleDraft(tiny_eagle(target), target), Tree.chain(2))
        return Method(drafter, Exact())

    def no_target() -> Any:
        raise MemoryError

    methods = {"small": small, "broken": broken, "ar": lambda target: Method(NoDraft(), Exact())}
    jobs = [
        BenchmarkJob("tiny", tiny_target, methods),
        BenchmarkJob("huge", no_target, {"chain": chain}),
    ]
    rows = list(measure_rows(jobs, plan(), 1e9))
    assert [(row.model, row.method, row.problem) for row in rows if row.batch_size == 2] == [
        ("tiny", "small", "out of memory"),
        ("tiny", "broken", "failed with ZeroDivisionError: of rounds"),
        ("tiny", "ar", rows[4].problem),
        ("huge", "chain", "out of memory"),
    ]
    assert str(rows[4].problem).startswith("method=ar is the baseline")
    assert [row.column is not None for row in rows] == [True] + [False] * 7


@pytest.mark.slow
def test_rows_are_left_out_when_the_minutes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 59.0, 60.0])
    monkeypatch.setattr(benchmark_table.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(benchmark_table, "measure_column", lambda *given: None)
    rows = list(measure_rows([BenchmarkJob("tiny", tiny_target, {"chain": chain})], plan(), 1e9, 1))
    assert [row.problem for row in rows] == [None, "left out: 1 minutes were over"]


@pytest.mark.slow
def test_the_table_in_markdown_has_a_line_for_each_row() -> None:
    jobs = [BenchmarkJob("tiny", tiny_target, {"chain": chain})]
    rows = list(measure_rows(jobs, plan(batch_sizes=[1]), 1e9))
    absent = benchmark_table.TableRow("tiny", "tree", 16, True, problem="out of memory")
    table = BenchmarkTable("a GPU, bfloat16", [*rows, absent])
    lines = table.markdown().splitlines()
    assert all(line.count(" | ") == len(HEADINGS) - 1 for line in lines[:4])
    assert lines[3].startswith("| tiny | tree | 16 | compiled | out of memory |")
    assert lines[5].startswith("a GPU, bfloat16. Medians")
    column = rows[0].column
    assert column is not None
    cells = dict(zip(HEADINGS, table.cells()[0], strict=True))
    assert cells["speed-up ÷ length"] == f"{column.ratio:.2f} of {column.ratio_limit:.2f}"
    rest = column.parts["verify"].median + column.parts["commit"].median
    assert cells["draft + target + rest"].endswith(f" + {benchmark_table.milliseconds(rest)}")
    assert cells["its limit"].endswith(f"({column.ar.median / column.limit:.1f}×)")
    assert json.loads(json.dumps(table.as_dict()))["rows"][1]["problem"] == "out of memory"


@pytest.mark.slow
def test_the_gpu_preset_runs_on_tiny_models_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["device=cpu", "dtype=float32", "compile=false", "repeats=1", "bandwidth=9"]
    shared.append("batch_sizes=[1,2]")
    cfg = composed("preset=gpu", *shared, f"directory={tmp_path / 'out'}", config="bench")
    tiny = [option.replace(" ", "") for option in write_llamagen_classes(tmp_path)]
    methods = ["method=eagle drafter.path=random", "method=sjd window=3"]
    cfg.jobs = [{"target": " ".join(tiny), "methods": methods}]
    result = bench.main(cfg)
    assert [(row["method"], row["batch_size"], row["problem"]) for row in result["rows"]] == [
        ("eagle drafter.path=random", 1, None),
        ("eagle drafter.path=random", 2, None),
        ("sjd window=3", 1, None),
        ("sjd window=3", 2, None),
    ]
    stored = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(result))  # whose keys are numbers
    written = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert written.count("| llamagen_b_c2i |") == 4 and "float32, 9 GB/s" in written
    assert "bench.md" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_the_jobs_of_a_preset_compose(name: str) -> None:
    jobs = OmegaConf.to_container(OmegaConf.load(CONF / "preset" / f"{name}.yaml").jobs)
    assert isinstance(jobs, list)
    for node in jobs:
        made = bench._job(node, ["dtype=bfloat16"])
        methods = [method for method in made.methods if method != "parallel"]
        assert methods == ["eagle", "eagle tree=mc_sim_7b_63", "sjd window=16"]
        assert ("parallel" in made.methods) == ("llamagen_xl" in node["target"])


@pytest.mark.slow
def test_what_a_table_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = composed("preset=gpu", "directory=x", "overrides=[]", config="bench")
    with pytest.raises(TemperaError, match=r"is for a GPU, and PyTorch finds none.*preset=cpu"):
        bench.main(cfg)
    cfg.device = "cpu"
    for jobs in (["method=sjd"], [{"target": "model=shapes", "methods": []}], [{"target": "x"}]):
        cfg.jobs = jobs
        with pytest.raises(TemperaError, match=r"is no job of a table: write \{target"):
            bench.main(cfg)
    cfg.jobs = [{"target": "model=mar_base", "methods": ["method=cspd"]}]
    with pytest.raises(TemperaError, match="time a method for continuous tokens by itself"):
        bench.main(cfg)
    cfg.overrides = ["preset=gpu", "dtype=float16", "+drafter.path=random"]
    with pytest.raises(TemperaError, match=r"`\+drafter.path=random` has no effect on a table"):
        bench.main(cfg)
