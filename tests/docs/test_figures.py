"""Scripts that draw pictures of the docs; that each optimum is one is tested with the rules."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from PIL import Image
from report_runs import RUNS, finished, made_up_runs

import tempera
from tempera.decoding.interfaces import Draft
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import round_seconds
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import PricedRounds
from tempera.rules.schedules import Prices


def test_the_table_and_the_figure_of_the_optima(tmp_path: Path) -> None:
    figure = runpy.run_path(str(ROOT / "docs" / "optimal_figure.py"))
    names = list(figure["STYLES"])
    found = {
        name: torch.tensor([[2.0, 0.1, 0.2], [4.0, 0.3, 0.1 * place]])
        for place, name in enumerate(names, start=1)
    }
    lines = figure["as_table"](found, place=1).splitlines()
    assert lines[2] == f"| {names[0]} | 4.00 | 0.0750 | 0.0250 |" and len(lines) == 2 + len(names)
    figure["draw"](found, tmp_path / "optimal.png")
    assert (tmp_path / "optimal.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def animation() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "replay_animation.py"))


def test_the_replay_plays_in_time_or_in_rounds(animation: dict[str, Any], tmp_path: Path) -> None:
    directory = made_up_runs(tmp_path / "runs", (RUNS[0], RUNS[3]))
    runs, _ = collect(find_runs([directory])[0])
    seconds = round_seconds(runs)
    assert None not in seconds and seconds[0] < seconds[1]
    plain, drafted = (animation["_decode"](run, "world-000000", 1.0) for run in runs)
    times = {"rounds": [1.0, 1.0], "time": seconds}
    shares = {}
    for unit, paces in times.items():
        ends = [
            replace(one, pace=pace).end for one, pace in zip((plain, drafted), paces, strict=True)
        ]
        shares[unit] = ends[0] / ends[1]
    tokens_per_round = 64 / len(drafted.ends)
    assert shares["rounds"] == tokens_per_round
    assert shares["time"] == pytest.approx(tokens_per_round * runs[1].value("efficiency"))
    for rounds, frames in ((True, 64), (False, animation["FRAMES"])):
        file = animation["write"](tmp_path / f"{rounds}.webp", runs, 0, rounds)
        with Image.open(file) as moving:
            assert getattr(moving, "n_frames", 1) == 1 + frames


def test_the_replay_shows_a_typical_prompt_that_is_whole_in_every_run(
    animation: dict[str, Any],
) -> None:
    lengths = [2.0, 3.0, 3.1, 4.0]
    plain = finished("ar", {"broken": [0, 0, 0, 0], "accepted_length": [1.0] * 4})
    faster = finished("eagle", {"broken": [0, 1, 0, 0], "accepted_length": lengths})
    assert animation["_typical"]([plain, faster]) == "p2"
    assert animation["_typical"]([finished("eagle", {"accepted_length": lengths})]) == "p1"
    with pytest.raises(TemperaError, match="no prompt's picture is whole"):
        animation["_typical"]([finished("ar", {"broken": [1, 1], "accepted_length": [1, 1]})])


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.from_paths([[0], [1], [0, 0], [0, 1]])])
def test_what_a_rule_costs_is_summed_over_drafts_without_impossible_tokens(tree: Tree) -> None:
    """As measured rounds sum it; tokens that neither p nor q can draw change nothing."""
    page = runpy.run_path(str(ROOT / "docs" / "price_or_budget.py"))
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.rand(40, n, 9, generator=rng) for n in (1 + tree.nodes, tree.nodes))
    forbidden = torch.rand(40, 1, 9, generator=rng) < 0.5
    p, q = (one.masked_fill(forbidden, 0.0) + 0.01 * (~forbidden) for one in (p, q))
    p, q = (one.double() / one.sum(-1, keepdim=True) for one in (p, q))
    tokens = q.flatten(0, 1).multinomial(1, generator=rng).view(40, tree.nodes)
    drafts = page["Drafts"](tree, tokens, q, p)
    few = page["without_impossible"](drafts)
    assert few.p.shape[-1] < 9
    rule = Priced(0.75)
    measured = PricedRounds.measured(Draft(tokens, q, tree), p)
    length, nats = measured.expected(Prices((0.75,)))
    for one in (drafts, few):
        found, _, kl = one.expected(rule)
        assert found == pytest.approx(length, rel=1e-5)
        assert kl == pytest.approx(nats / length, rel=1e-5)


def test_images_per_minute_are_measured_by_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["ar", "jacobi", "--rows", "1", "2", "--captions", "3"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *options])
    runpy.run_path(str(ROOT / "docs" / "throughput.py"), run_name="__main__")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    methods = [(method, rows) for method in ("ar", "jacobi") for rows in ("1", "2")]
    assert [row[:2] for row in rows] == [[f"| `{method}`", rows] for method, rows in methods]
    assert [row[3:] for row in rows[:2]] == [["432", "100% |"], ["288", "75% |"]]


def test_a_peers_loop_takes_turns_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that draws noise, beside the shipped model: all lanes are in the table."""
    models = tmp_path / "autoregressive" / "models"
    models.mkdir(parents=True)
    network = "from torch import nn\n\n\ndef GPT_B(**_):\n    made = nn.Module()\n"
    network += "    made.output = nn.Linear(8, 8)\n    return made\n"
    (models / "gpt.py").write_text(network, encoding="utf-8")
    noise = "def generate(network, cond, tokens, **_):\n"
    noise += "    [network.output(cond.expand(1, 8).float()) for _ in range(tokens)]\n"
    (models / "generate.py").write_text(noise, encoding="utf-8")
    load = tempera.load
    monkeypatch.setattr(tempera, "load", lambda *_, batch_size, **__: load(batch_size=batch_size))
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = [str(tmp_path), "--rows", "1", "2", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *options])
    runpy.run_path(str(ROOT / "docs" / "peers.py"), run_name="__main__")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    names = ["| LlamaGen's generate", "| tempera, 1 row", "| tempera, 2 rows"]
    assert [row[0] for row in rows] == names
    assert rows[0][3] == "1.00 |" and all(float(row[1]) > 0 for row in rows)


def test_two_checkouts_take_turns_at_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier checkout whose script computes nothing, beside one of ours that imports torch."""
    script = tmp_path / "eval" / "bench.py"
    script.parent.mkdir()
    script.touch()
    options = ["--turns", "2", str(tmp_path), "eval/bench.py", "--help"]
    monkeypatch.setattr(sys, "argv", ["pairs.py", *options])
    runpy.run_path(str(ROOT / "docs" / "pairs.py"), run_name="__main__")
    *_, first, second, median = capsys.readouterr().out.splitlines()
    assert first.startswith("| 1 | ") and second.startswith("| 2 | ")
    assert float(median.split()[1]) > 1
    script.write_text("raise SystemExit('no')", encoding="utf-8")
    with pytest.raises(SystemExit, match="no"):
        runpy.run_path(str(ROOT / "docs" / "pairs.py"), run_name="__main__")
