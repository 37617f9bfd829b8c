"""The benchmark measures real rounds; nothing here looks at how long they take."""

import json
import runpy

import pytest
import torch
from hydra import compose, initialize_config_dir
from paths import CONF
from tiny_networks import LENGTH, tiny_eagle, tiny_target
from tiny_targets import write_llamagen_classes

from tempera.commands import bench
from tempera.config.compose import composed
from tempera.config.instantiate import instantiate
from tempera.continuous.diffusion import DiffusionSampling
from tempera.continuous.loop import Parallel, Speculative
from tempera.continuous.mar import MAR, MARConfig
from tempera.continuous.rules import PathCoupling
from tempera.continuous.target import MARTarget, draft
from tempera.decoding.loop import Output, decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import benchmark
from tempera.evaluation.pipeline import Method
from tempera.rules.standard import Exact
from tempera.targets.conditioners import ClassLabels

CPU = torch.device("cpu")
MAR_SIZES = MARConfig((3, 4), 4, width=16, depth=1, heads=2, buffer=2, classes=5, head_width=16)


def mar_network():
    torch.manual_seed(0)
    made = MAR(MAR_SIZES)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


def mar_target():
    sampling = DiffusionSampling(guidance=2.0, denoising_steps=4, last_noise=True)
    return MARTarget(mar_network(), ClassLabels(MAR_SIZES.classes).encode, sampling)


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
    report = measured(target, batch_sizes=[2, 3], accepted_lengths=[1, 2], bandwidth=0.5)
    assert [column.title for column in report.columns] == ["eager, batch 2", "eager, batch 3"]
    for column in report.columns:
        assert set(column.parts) == {"draft", "target", "verify", "commit"}
        ratio = pytest.approx(column.ar.median / column.method.median)
        assert column.ratio == ratio and column.speedups[1] == ratio
        assert column.ratio_limit == pytest.approx(column.ar.median / column.parts["target"].median)
        images = 1000 * column.batch_size / (LENGTH * column.ar.median)
        assert column.images == pytest.approx(images) and column.memory > 0
        assert list(column.passes.target) == [1, 4, 26]
        limit = 1000 * (report.weights + column.passes.cache) / 5e8
        assert column.passes.limit == pytest.approx(limit)
    _, rows, heads, _, size = target.session.cache._shape
    layers = len(target.session.cache.entries)
    middle = target.session.prompt.prefix + LENGTH // 2
    two, three = (column.passes.cache for column in report.columns)
    assert rows == 6 and three == 2 * layers * rows * heads * middle * size * 4
    assert 3 * two == 2 * three and (report.steps, report.bandwidth) == (3, 5e8)
    model = target.network.model
    counted = (*model.layers.parameters(), *model.norm.parameters())
    expected = sum(p.numel() for p in (*counted, *target.network.lm_head.parameters()))
    assert report.weights == 4 * expected
    rows = {name: cells for name, *cells in benchmark.table(report)}
    assert {"round: draft", "round: one of 3 draft steps", "target, tokens per row: 26"} < set(rows)
    assert all(len(cells) == 2 for cells in rows.values())
    assert rows["at accepted length 2"][0].startswith(f"{report.columns[0].speedups[2]:.2f}×")
    assert json.loads(json.dumps(report.as_dict()))["columns"][1]["batch_size"] == 3


def test_the_bandwidth_is_measured():
    assert benchmark.bandwidth(CPU, repeats=1) > 1e8


@pytest.mark.parametrize("prefill", [0.3, 0.0])
def test_rounds_of_continuous_tokens_are_timed_without_the_prefill(prefill):
    model = mar_target()
    method = Speculative(draft(model, mar_network()), PathCoupling(), 3, prefill)
    plan = benchmark.BenchmarkPlan(batch_sizes=[1, 2], repeats=2)
    report = benchmark.measure(model, lambda: method, plan)
    assert (report.steps, report.bandwidth, report.weights) == (3, None, None)
    for column in report.columns:
        assert set(column.parts) == {"draft", "target", "verify", "commit"}
        assert column.ratio == pytest.approx(column.ar.median / column.method.median)
        # a draft that is the target is kept whole; the last round may have room for fewer
        assert column.accepted_length == 4 if prefill == 0 else 2 < column.accepted_length <= 4
        assert column.speedup > 0 and column.memory > 0 and column.passes is None
    rows = {name: cells for name, *cells in benchmark.table(report)}
    assert "speed-up of whole images" in rows and not any("target, tokens" in name for name in rows)
    assert json.loads(json.dumps(report.as_dict()))["columns"][1]["batch_size"] == 2
    prefilled = len(method.prefilled(12))
    times, parts, _ = benchmark._decoded(model, method, ["0"], 0, 0, benchmark.Clock)
    assert parts[: 1 + prefilled] == [{}] * (1 + prefilled) and "verify" in parts[-1]
    assert benchmark._kept(times, method, 12) == (prefilled, len(times) - 1 - prefilled)


def test_eager_and_compiled_steps_are_shown_side_by_side(monkeypatch):
    # what is compiled is the business of test_compiled.py
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    target, made = tiny_target(), []

    def make_method():
        made.append(target.compiled)
        return method(target)

    plan = benchmark.BenchmarkPlan([1], "both", 1, 9.0, [])
    report = benchmark.measure(target, make_method, plan)
    assert [column.title for column in report.columns] == ["eager, batch 1", "compiled, batch 1"]
    assert made == [False, True]
    with pytest.raises(TemperaError, match="continuous tokens are not compiled"):
        benchmark.measure(mar_target(), make_method, plan)


def test_an_excerpt_starts_in_the_middle_and_ends_in_time():
    target = tiny_target()
    excerpt = benchmark.Excerpt(target, 4)
    output = decode(excerpt, NoDraft(), Exact(), RandomStreams(0, ["a"]), ["a"])
    assert output.tokens.shape == (1, 4)
    assert target.session.prompt.lengths.tolist() == [(LENGTH - 4) // 2 + 4]


class Slow(Method):
    """A method whose round k takes `seconds[k]` in each of two parts, on the clock `hand`."""

    hand, seconds = 0.0, ()

    def decode(self, target, streams, prompts, *, clock, observe):
        for spent in self.seconds:
            for part in ("draft", "target"):
                self.__dict__["hand"] = self.hand + spent
                if clock is not None:
                    clock.seconds[part] = clock.seconds.get(part, 0.0) + spent
            observe()
        return Output(None, None)


@pytest.mark.parametrize(
    ("seconds", "later"), [([100.0, 1.0, 2.0, 3.0], 2.0), ([100.0, 4.0], 4.0), ([7.0], 7.0)]
)
def test_later_rounds_are_all_but_the_first(seconds, later, monkeypatch):
    """What the first takes longer belongs to the beginning; if it is alone, it has the parts."""
    target = tiny_target()
    slow = Slow(method(target).drafter, Exact())
    slow.__dict__["seconds"] = seconds
    monkeypatch.setattr(benchmark, "now", lambda device: slow.hand)
    parts, _ = benchmark._time_parts(target, slow, ["a"], 1)
    assert {part: spread.median for part, spread in parts.items()} == {
        "draft": 1000 * later,
        "target": 1000 * later,
    }
    pace = benchmark.time_rounds(target, {"slow": slow}, ["a"], 2)["slow"]
    alone = len(seconds) == 1
    assert pace.round.median == (0 if alone else 2000 * later)
    assert pace.beginning.median == 2000 * (seconds[0] - (0 if alone else later))
    assert pace.whole.median == 2000 * sum(seconds)


def test_impossible_benchmarks_raise_one_sentence():
    target, model = tiny_target(), mar_target()
    whole = Speculative(draft(model, mar_network()), PathCoupling(), 3, 0.99, steps=1)
    plan = benchmark.BenchmarkPlan(bandwidth=1.0)
    for one, made, what in (
        (target, Method(NoDraft(), Exact()), "choose another method, such as method=eagle"),
        (model, Parallel(), "choose another method"),
        (model, whole, "prefill=0.99 draws all 12 tokens of an image"),
    ):
        with pytest.raises(TemperaError, match=what):
            benchmark.measure(one, lambda made=made: made, plan)
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


def test_continuous_methods_without_rounds_are_refused_before_weights_are_read(tmp_path):
    options = ["model=shapes_mar", f"directory={tmp_path}", "weights=nowhere"]
    for name in ("ar", "draft"):
        with pytest.raises(TemperaError, match="choose method=cspd, cspd_published or cspd_exact"):
            bench.main(composed("bench", [*options, f"method={name}"]))


@pytest.mark.slow
def test_the_shipped_model_of_continuous_tokens(tmp_path, capsys):
    quick = ["denoising_steps=2", "repeats=1", "batch_sizes=[1]", "gamma=2", "method=cspd"]
    cfg = composed("bench", ["model=shapes_mar", *quick, f"directory={tmp_path}"])
    assert bench.main(cfg)["steps"] == 2
    assert "one of 2 draft steps" in capsys.readouterr().out and (tmp_path / "bench.json").exists()
