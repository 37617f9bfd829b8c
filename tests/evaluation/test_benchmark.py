"""The benchmark measures real rounds; nothing here looks at how long they take."""

import json
import runpy
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from paths import CONF
from tiny_networks import LENGTH, tiny_eagle, tiny_target
from tiny_targets import write_llamagen_classes
from torch.autograd import DeviceType

from tempera.commands import bench, bfloat16
from tempera.config.compose import composed
from tempera.config.instantiate import from_options
from tempera.continuous.diffusion import DiffusionSampling
from tempera.continuous.loop import Parallel, Speculative
from tempera.continuous.mar import MAR, MARConfig
from tempera.continuous.rules import PathCoupling
from tempera.continuous.target import MARTarget, draft
from tempera.decoding.loop import Output
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import benchmark
from tempera.evaluation.launches import kernels_by_name
from tempera.evaluation.pipeline import Method
from tempera.reporting.tables import texts
from tempera.rules.standard import Exact
from tempera.runtime.processor import Placement
from tempera.targets.conditioners import ClassLabels

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


def test_every_part_is_measured_and_the_ratio_follows_from_the_rounds():
    target = tiny_target()
    plan = benchmark.BenchmarkPlan([2, 3], repeats=2, bandwidth=0.5, kernels=False)
    report = benchmark.measure(target, method(target), plan)
    for column in report.columns:
        assert {"draft", "target", "verify", "commit", "round"} < set(column.method)
        ratio = column.ar["round"].median / column.method["round"].median
        assert column.ratio == pytest.approx(ratio) and column.memory > 0
        images = 1000 * column.batch_size / (LENGTH * column.ar["round"].median)
        assert column.images == pytest.approx(images)
        shown = bench.cells(column, report.steps)
        most = column.ar["round"].median / column.method["target"].median
        assert shown["the same, if drafting took no time"]["value"] == pytest.approx(most)
        assert shown["peak memory, GiB"]["value"] == column.memory / 2**30
    _, rows, heads, _, size = target.runner.cache._shape
    middle = target.runner.prompt.prefix + LENGTH // 2
    cache = 2 * len(target.runner.cache.entries) * rows * heads * middle * size * 4
    assert rows == 6 and report.columns[1].limit == pytest.approx((report.weights + cache) / 5e5)
    assert (report.steps, report.bandwidth) == (3, 5e8)
    model = target.network.model
    counted = (*model.layers.parameters(), *model.norm.parameters())
    expected = sum(p.numel() for p in (*counted, *target.network.lm_head.parameters()))
    assert report.weights == 4 * expected and benchmark.bandwidth(target.device, 1) > 1e8
    assert report.columns[1].batch_size == 3
    assert benchmark.Excerpt(target, 4).start == (LENGTH - 4) // 2  # the middle of the image


@pytest.mark.parametrize("prefill", [0.3, 0.0])
def test_rounds_of_continuous_tokens_are_timed_without_the_prefill(prefill):
    model = mar_target()
    method = Speculative(draft(model, mar_network()), PathCoupling(), 3, prefill)
    plan = benchmark.BenchmarkPlan([1, 2], repeats=2, kernels=False)
    report = benchmark.measure(model, method, plan)
    assert (report.steps, report.bandwidth, report.weights) == (3, None, None)
    for column in report.columns:
        assert {"draft", "target", "verify", "commit"} < set(column.method)
        # a draft that is the target is kept whole; the last round may have room for fewer
        accepted = column.method["accepted_length"].median
        assert accepted == 4 if prefill == 0 else 2 < accepted <= 4
        assert column.limit is None
        shown = bench.cells(column, report.steps)
        assert {"speed-up of whole images", "round: one of 3 draft steps"} < set(shown)
        even = shown["break-even accepted length"]["value"]
        assert even * column.ratio == pytest.approx(1)


class Slow(Method):
    """A method whose round k takes `seconds[k]` in each of two parts, on the clock `hand`; twice as
    long in the decode to warm up.
    """

    hand, seconds = 0.0, ()

    def decode(self, target, streams, prompts, *, watch, run=None):
        for spent in self.seconds if self.hand else [2 * spent for spent in self.seconds]:
            for part in ("draft", "target"):
                self.__dict__["hand"] = self.hand + spent
                if run is not None:
                    run.seconds[part] += spent
            for watcher in watch:
                watcher(None)
        return Output(None, None)


@pytest.mark.parametrize(("seconds", "later"), [([100.0, 1.0, 2.0, 3.0], 2.0), ([7.0], 0.0)])
def test_later_rounds_are_all_but_the_first(seconds, later, monkeypatch):
    """What the first takes longer belongs to the beginning; if it is alone, it has the parts."""
    target = tiny_target()
    slow = Slow(method(target).drafter, Exact())
    slow.__dict__["seconds"] = seconds
    monkeypatch.setattr(benchmark, "now", lambda device: slow.hand)
    pace = benchmark.time_rounds(target, {"slow": slow}, ["a"], 1, clocked=True)["slow"]
    part = later or seconds[0]
    expected = {
        "draft": part,
        "target": part,
        "verify": 0,
        "commit": 0,
        "round": 2 * later,
        "beginning": 2 * (seconds[0] - later),
        "whole": 2 * sum(seconds),
    }
    assert {name: one.median / 1000 for name, one in pace.items()} == expected


def test_impossible_benchmarks_raise_one_sentence():
    target, model = tiny_target(), mar_target()
    whole = Speculative(draft(model, mar_network()), PathCoupling(), 3, 0.99, steps=1)
    plan = benchmark.BenchmarkPlan([1], 1, bandwidth=1.0, kernels=False)
    for one, made, what in (
        (target, Method(NoDraft(), Exact()), "choose another method, such as method=eagle"),
        (model, Parallel(), "choose another method"),
        (model, whole, "prefill=0.99 draws all 12 tokens of an image"),
    ):
        with pytest.raises(TemperaError, match=what):
            benchmark.measure(one, made, plan)
    for option in ("batch_sizes=[1,0]", "batch_sizes=[]", "repeats=0", "bandwidth=0"):
        with pytest.raises(TemperaError, match=option.partition("=")[0]):
            from_options(composed("bench", [option]), benchmark.BenchmarkPlan)


@pytest.mark.slow
def test_random_weights_use_a_random_draft_and_print_so(tmp_path, capsys):
    tiny = write_llamagen_classes(tmp_path)
    options = [option for option in tiny if not option.startswith("model.weights")]
    quick = [
        "weights=random",
        "tracking=none",
        "repeats=1",
        "batch_sizes=[1]",
        f"directory={tmp_path}",
    ]
    cfg = composed("bench", [*options, *quick, f"directory={tmp_path}"])
    runpy.run_path(str(CONF.parent / "eval" / "bench.py"))["main"](cfg)
    said = capsys.readouterr().out
    assert "(random weights and draft)" in " ".join(said.split())
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["made_of"] == {"weights": "random", "draft": "random"}


def test_continuous_methods_without_rounds_are_refused_before_weights_are_read(tmp_path):
    options = ["model=shapes_mar", f"directory={tmp_path}", "weights=nowhere"]
    for name in ("ar", "draft"):
        with pytest.raises(TemperaError, match="choose method=cspd or cspd_exact"):
            bench.main(composed("bench", [*options, f"method={name}"]))


@pytest.mark.slow
def test_the_shipped_model_of_continuous_tokens(tmp_path, capsys):
    quick = [
        "denoising_steps=2",
        "tracking=none",
        "repeats=1",
        "batch_sizes=[1]",
        "gamma=2",
        "method=cspd",
    ]
    cfg = composed(
        "bench", ["model=shapes_mar", "gamma=2", "method=cspd", *quick, f"directory={tmp_path}"]
    )
    bench.main(cfg)
    assert json.loads((tmp_path / "bench.json").read_text())["steps"] == 2
    assert "one of 2 draft steps" in capsys.readouterr().out and (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("has_instructions", "dtype", "seconds", "told"),
    [
        (True, "float32", 0.5, True),
        (True, "float32", 1.5, False),
        (False, "float32", 0.5, False),
        (True, "float16", 0.5, False),
        (True, "bfloat16", 0.5, False),
    ],
)
def test_what_bfloat16_would_save_is_said_where_it_is_fast(
    has_instructions: bool,
    dtype: str,
    seconds: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a clock on which a turn takes 1 second in float32 and `seconds` in bfloat16."""
    monkeypatch.setattr(bfloat16, "computes_bfloat16", lambda device: has_instructions)
    times = cycle([0.0, 1.0, 0.0, seconds])
    monkeypatch.setattr(bfloat16, "now", lambda device: next(times))
    target = tiny_target()
    target.pack()
    placement = Placement(target.device, getattr(torch, dtype))
    bfloat16.tell_bfloat16(placement, target, method(target))
    line = (
        "dtype=bfloat16 would take 0.50 of float32's time for the matrix products of a pass over 8 "
        "rows on this processor\n"
    )
    assert capsys.readouterr().out == (line if told else "")
    bfloat16.tell_bfloat16(Placement(target.device, torch.float32, "int8"), target, method(target))
    bfloat16.tell_bfloat16(Placement(target.device, torch.float32), mar_target(), Exact())
    assert not capsys.readouterr().out


def test_a_spread_is_median_and_quartiles() -> None:
    spread = benchmark.Spread.of([1.0, 10.0, 2.0])
    assert (spread.low, spread.median, spread.high) == (1.5, 2.0, 6.0)


def _event(name, microseconds, device=DeviceType.CUDA, mark=False):
    span = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=mark, time_range=span)


def test_kernels_of_a_round_are_added_up_by_name():
    events = [
        *[_event("gemv", 300)] * 4,
        *[_event("softmax", 200)] * 2,
        _event("aten::mm", 9000, DeviceType.CPU),
        _event("ProfilerStep", 9000, mark=True),
    ]
    kernels = kernels_by_name(events, 2)
    assert [(one.name, one.count) for one in kernels] == [("gemv", 2), ("softmax", 1)]
    assert [one.milliseconds for one in kernels] == pytest.approx([0.6, 0.2])
    assert [one.share for one in kernels] == pytest.approx([0.75, 0.25])
    shown = texts(bench.kernel_table("kernels", kernels))
    assert shown.to_numpy().tolist() == [
        ["gemv", "2", "0.6", "75.0"],
        ["softmax", "1", "0.2", "25.0"],
    ]
    assert kernels_by_name(events[-2:], 1) == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["device=cpu"], "needs a GPU"),
        (["model=shapes_mar", "method=cspd"], "discrete tokens"),
    ],
)
def test_kernels_that_cannot_be_counted_are_one_sentence(options, said, tmp_path):
    options = [*options, "kernels=true", f"directory={tmp_path}"]
    with pytest.raises(TemperaError, match=said) as message:
        bench.main(composed("bench", options))
    assert "\n" not in str(message.value)
