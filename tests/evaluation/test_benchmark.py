"""The benchmark measures real rounds; nothing here looks at how long they take."""

import json
import runpy

import pytest
import torch
from hydra import compose, initialize_config_dir
from paths import CONF
from tiny_networks import LENGTH, tiny_eagle, tiny_target
from tiny_targets import write_llamagen_classes

from tempera.config.instantiate import instantiate
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import benchmark
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact


def method(target, depth=3):
    return Method(
        StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), Tree.chain(depth)), Exact()
    )


def measured(target, **plan):
    return benchmark.measure(
        target,
        lambda: method(target),
        benchmark.BenchmarkPlan(repeats=2, trees=["mc_sim_7b_63"], **plan),
    )


def test_every_part_is_measured_and_the_speedup_follows_from_the_rounds():
    target = tiny_target()
    report = measured(target, batch_sizes=[2, 3], accepted_lengths=[1, 2])
    assert [column.title for column in report.columns] == ["eager, batch 2", "eager, batch 3"]
    for column in report.columns:
        assert list(column.target) == [1, 4, 26]
        assert set(column.parts) == {"draft", "target", "verify", "commit"}
        assert column.speedups == {
            length: pytest.approx(length * column.ar.median / column.method.median)
            for length in (1, 2)
        }
        assert column.ratio == pytest.approx(column.ar.median / column.method.median)
        assert column.ratio_limit == pytest.approx(column.ar.median / column.parts["target"].median)
        assert column.images == pytest.approx(
            1000 * column.batch_size / (LENGTH * column.ar.median)
        )
        assert (
            column.limit == pytest.approx(1000 * (report.weights + column.cache) / report.bandwidth)
            and column.memory > 0
        )
    _, rows, heads, _, size = target.session.cache._shape
    layers = len(target.session.cache.entries)
    middle = target.session.prompt.prefix + LENGTH // 2
    assert rows == 6 and report.columns[1].cache == 2 * layers * rows * heads * middle * size * 4
    assert 3 * report.columns[0].cache == 2 * report.columns[1].cache
    assert (report.drafted, report.depth) == (3, 3) and report.bandwidth > 0
    layers = target.network.model.layers
    expected = sum(
        p.numel()
        for p in [
            *layers.parameters(),
            *target.network.model.norm.parameters(),
            *target.network.lm_head.parameters(),
        ]
    )
    assert report.weights == 4 * expected
    assert json.loads(json.dumps(report.as_dict()))["columns"][1]["batch_size"] == 3


def test_the_table_has_a_row_for_every_part_of_a_round():
    report = measured(tiny_target(), batch_sizes=[1], bandwidth=0.5)
    assert report.bandwidth == 5e8
    rows = dict(benchmark.table(report))
    assert set(rows) >= {
        "target, 1 token per row",
        "target, 4 tokens per row",
        "target, 26 tokens per row",
        "sampling, inside the target's",
        "round: draft",
        "round: one of 3 draft steps",
        "round: verify",
        "round: commit",
        "verify + commit, of it",
        "round of the method",
        "round of AR",
        "bandwidth limit of AR",
        "memory at the peak, GiB",
        "images/s of AR",
        "and over the first column",
        "at accepted length 3",
    }
    column = report.columns[0]
    assert f"AR takes {column.ar.median / column.limit:.2f}×" in rows["bandwidth limit of AR"]
    share = 100 * column.parts["target"].median / column.method.median
    assert rows["speed-up ÷ accepted length"] == (
        f"{column.ratio:.2f} of at most {column.ratio_limit:.2f} ({share:.0f}%)"
    )
    assert rows["at accepted length 3"].startswith(f"{column.speedups[3.0]:.2f}×")


def test_eager_and_compiled_steps_are_shown_side_by_side(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: function
    )  # what is compiled is the business of test_compiled.py
    target, made = tiny_target(), []

    def make_method():
        made.append(target.compiled)
        return method(target)

    report = benchmark.measure(
        target,
        make_method,
        benchmark.BenchmarkPlan(
            batch_sizes=[1], compile="both", repeats=1, trees=[], bandwidth=9.0
        ),
    )
    assert [column.title for column in report.columns] == ["eager, batch 1", "compiled, batch 1"]
    assert made == [False, True]
    assert all(len(row) == 3 for row in benchmark.table(report))
    assert benchmark.BenchmarkPlan(compile=True).kinds == [True]


def test_an_excerpt_starts_in_the_middle_and_ends_in_time():
    target = tiny_target()
    excerpt = benchmark.Excerpt(target, 4)
    output = decode(excerpt, NoDraft(), Exact(), RandomStreams(0, ["a"]), ["a"])
    assert output.tokens.shape == (1, 4)
    assert target.session.prompt.lengths.tolist() == [(LENGTH - 4) // 2 + 4]


def test_what_a_first_round_takes_longer_belongs_to_the_beginning(monkeypatch):
    """Each excerpt begins at 10 s; its first round ends after 3 s, and two others take 1 s each."""
    times = [10.0, 13.0, 14.0, 15.0]
    monkeypatch.setattr(benchmark, "_excerpt", lambda *given: times)
    target = tiny_target()
    pace = benchmark.time_rounds(target, {"ar": method(target).plain}, ["a"], 2)["ar"]
    assert pace.round.median == 1000 and pace.beginning.median == 2000


def test_impossible_benchmarks_raise_one_sentence():
    target = tiny_target()
    with pytest.raises(TemperaError, match="method=ar is the baseline that methods"):
        benchmark.measure(
            target, lambda: Method(NoDraft(), Exact()), benchmark.BenchmarkPlan(bandwidth=1.0)
        )
    for options, what in (
        ({"batch_sizes": [1, 0]}, r"batch_sizes=\[1, 0\]"),
        ({"batch_sizes": []}, r"batch_sizes=\[\]"),
        ({"repeats": 0}, "repeats=0"),
        ({"trees": ["binary"]}, "there is no draft tree 'binary'"),
        ({"bandwidth": 0.0}, "bandwidth=0.0 GB/s"),
    ):
        with pytest.raises(TemperaError, match=what):
            benchmark.BenchmarkPlan(**options)
    with pytest.raises(TemperaError, match=f"is too short to time 99: give at most {LENGTH}"):
        benchmark.Excerpt(target, 99)


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("no"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_names_the_options_that_help(monkeypatch, problem):
    target = tiny_target()

    def refuse(draft):
        raise problem

    monkeypatch.setattr(target, "score", refuse)
    with pytest.raises(
        TemperaError,
        match=r"out of memory at batch 16: take a smaller batch, half precision, or fewer drafted",
    ):
        measured(target, batch_sizes=[16], bandwidth=1.0)


@pytest.mark.slow
def test_other_errors_are_not_reported_as_out_of_memory(monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(target, "score", lambda draft: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        measured(target, bandwidth=1.0)


def test_quartiles_are_in_order():
    spread = benchmark.Spread.of([0.003, 0.001, 0.002])
    assert (spread.low, spread.median, spread.high) == pytest.approx((1.5, 2.0, 2.5))


def test_the_options_compose():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "bench",
            overrides=[
                "method=coolsd",
                "batch_sizes=[4]",
                "compile=both",
                "bandwidth=300",
                "trees=[]",
                "directory=x",
            ],
        )
    plan = instantiate(cfg.plan)
    assert (
        plan.batch_sizes == [4]
        and plan.kinds == [False, True]
        and plan.bandwidth == 300
        and plan.trees == []
        and cfg.rule._target_.endswith("Relaxed")
    )
    cfg.compile = "maybe"
    with pytest.raises(TemperaError, match="compile"):
        instantiate(cfg.plan)


@pytest.mark.slow
def test_random_weights_use_a_random_draft_and_print_so(tmp_path, capsys):
    tiny = write_llamagen_classes(tmp_path)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        options = [option for option in tiny if not option.startswith("model.weights")]
        cfg = compose(
            "bench",
            overrides=[
                *options,
                "weights=random",
                "repeats=1",
                "batch_sizes=[1]",
                f"directory={tmp_path}",
            ],
        )
    runpy.run_path(str(CONF.parent / "eval" / "bench.py"))["main"](cfg)
    said = capsys.readouterr().out
    assert (
        "draft: random weights" in said
        and "llamagen_b_c2i (random weights and draft)" in " ".join(said.split())
    )
    written = json.loads((tmp_path / "bench.json").read_text())
    assert (written["model"], written["made_of"]) == (
        "llamagen_b_c2i",
        {"weights": "random", "draft": "random"},
    )


class Slow:
    """A method whose round k takes `seconds[k]` in each of two parts, on the clock `hand`."""

    def __init__(self, seconds, monkeypatch):
        self.seconds, self.hand = seconds, 0.0
        monkeypatch.setattr("tempera.decoding.timing.now", lambda device: self.hand)

    def decode(self, target, streams, prompts, progress, clock):
        for number, spent in enumerate(self.seconds, start=1):
            for part in ("draft", "target"):
                with clock(part):
                    self.hand += spent
            progress(number, number)


@pytest.mark.parametrize(
    ("seconds", "mean"), [([100.0, 1.0, 2.0, 3.0], 2.0), ([100.0, 4.0], 4.0), ([7.0], 7.0)]
)
def test_the_parts_are_those_of_all_rounds_but_the_first(seconds, mean, monkeypatch):
    excerpt = benchmark.Excerpt(tiny_target(), 4)
    found = benchmark._seconds_by_part(excerpt, Slow(seconds, monkeypatch), ["a"], 0)
    assert found == {"draft": mean, "target": mean}
