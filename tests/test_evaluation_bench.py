"""The benchmark measures real rounds; nothing here looks at how long they take."""

import json
import runpy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from tiny_networks import LENGTH, tiny_eagle, tiny_target

from tempera.acceptance import Exact
from tempera.decode import decode
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import bench
from tempera.evaluation.painter import Method
from tempera.streams import Streams
from tempera.trees import Tree

CONF = Path(__file__).resolve().parent.parent / "conf"


def method(target, depth=3):
    return Method(StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), Tree.chain(depth)), Exact())


def test_every_part_is_measured_and_the_speedup_follows_from_the_rounds():
    target = tiny_target()
    report = bench.measure(target, method(target), bench.Plan(batch_size=2, repeats=2, trees=("mc_sim_7b_63",), accepted_lengths=(1, 2)))
    assert list(report.target) == [1, 4, 26]
    assert set(report.parts) == {"draft", "target", "verify", "commit"}
    assert report.speedups == {length: pytest.approx(length * report.ar.median / report.method.median) for length in (1, 2)}
    assert report.drafted == 3 and report.bandwidth > 0 and report.memory > 0
    layers = target.network.model.layers
    expected = sum(p.numel() for p in [*layers.parameters(), *target.network.model.norm.parameters(), *target.network.lm_head.parameters()])
    assert report.weights == 4 * expected
    assert json.loads(json.dumps(report.as_dict()))["limit"] == pytest.approx(report.limit)
    assert {name for name, *_ in bench.table(report)} >= {"target, 1 token a row", "target, 4 tokens a row", "round: draft", "round of AR"}


def test_an_excerpt_starts_in_the_middle_and_ends_in_time():
    target = tiny_target()
    excerpt = bench.Excerpt(target, 4)
    output = decode(excerpt, NoDraft(), Exact(), Streams(0, ["a"]), ["a"])
    assert output.tokens.shape == (1, 4)
    assert target.lengths.tolist() == [(LENGTH - 4) // 2 + 4]


def test_what_cannot_be_timed_is_one_sentence():
    target = tiny_target()
    with pytest.raises(TemperaError, match="method=ar is what a method is timed against"):
        bench.measure(target, Method(NoDraft(), Exact()), bench.Plan())
    with pytest.raises(TemperaError, match="batch_size=0"):
        bench.Plan(batch_size=0)
    with pytest.raises(TemperaError, match="has no 99 to time"):
        bench.Excerpt(target, 99)


def test_quartiles_are_in_order():
    spread = bench.Spread.of([0.003, 0.001, 0.002])
    assert (spread.low, spread.median, spread.high) == pytest.approx((1.5, 2.0, 2.5))


def test_the_options_compose():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=["method=coolsd", "batch_size=4", "directory=x"])
    assert cfg.plan.batch_size == 4 and cfg.rule._target_.endswith("Relaxed")


def test_continuous_methods_are_sent_to_the_evaluation():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=["model=mar_base", "method=cspd", "directory=x"])
    main = runpy.run_path(str(CONF.parent / "eval" / "bench.py"))["main"]
    with pytest.raises(TemperaError, match=r"eval/run\.py times a method of continuous ones"):
        main(cfg)
