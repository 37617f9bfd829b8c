"""conf/experiment/: every job of every preset composes and builds, and a preset prints its paper's
figures beside ours.
"""

import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from paths import CONF, ROOT
from tiny_evaluation import tiny_options

from tempera.config.build import build_drafter, build_method, build_rule, build_target
from tempera.config.instantiate import check, instantiate
from tempera.continuous.mar import MAR, MARConfig
from tempera.decoding.interfaces import Target
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.eagle_network import EagleModel
from tempera.errors import TemperaError
from tempera.reporting import figures, paper_tables
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.paper_results import APART, find, group, results, wanted
from tempera.reporting.report import write_report
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig

GROUPS = ("method", "model", "drafter", "tree", "rule", "schedule")
PRESETS = sorted(
    path.stem
    for path in (CONF / "experiment").glob("*.yaml")
    if not path.stem.startswith("frontier")
    and path.stem not in ("relaxations", "study", "paper", "paper_mar")
)
CONTINUOUS = [preset for preset in PRESETS if preset.startswith("cspd_")]
ISSUED = {
    "cspd": "table1 table2 table3 table4 "
    "figure8 figure9 figure11 figure13 figure14 figure15 figure16",
    "coolsd": "table1 table2 table3 figure3 figure4 figure5",
    "lantern": "table1 table2 table3 table4 table6 table7 table8 table9 "
    "figure2 figure5 figure6 figure7",
    "sjd": "table3 table4 table5 table6 table7 table11 appendix_h inits heatmap",
    "sjd_pac": "figure1 table1 table2 table3 table4 figure4",
}


@cache
def composed(*overrides: str, hydra: bool = False) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("eval", list(overrides), return_hydra_config=hydra)


def split(
    cases: list[str], overrides: list[str], size: int | None = None, table: str | None = None
) -> list[list[list[str]]]:
    """The jobs that the sweeper makes of cases and a command line, in batches."""
    # Hydra executes its plugins' modules once more when it looks for them: the class is the one
    # there is afterwards
    Plugins.instance()
    sweeper = get_class("hydra_plugins.tempera_cases.CaseSweeper")(cases, table)
    batches: list[list[list[str]]] = sweeper.split_arguments(
        OverridesParser.create().parse_overrides(overrides), size
    )
    return batches


def jobs(preset: str, *given: str) -> list[list[str]]:
    """What the sweep runs, as the sweeper makes it from the preset."""
    cfg = composed(
        f"experiment={preset}", *(option for option in given if "," not in option), hydra=True
    )
    node = cfg.hydra.sweeper
    assert node._target_ == "hydra_plugins.tempera_cases.CaseSweeper"
    model = [] if any(one.startswith("model=") for one in given) else [f"model={cfg.model.name}"]
    (batch,) = split(
        list(node.cases), [f"experiment={preset}", *model, *given], table=node.get("table")
    )
    return [[option for option in job if option not in model] for job in batch]


def as_row(job: list[str]) -> dict[str, Any]:
    """A row of a report, as far as a paper's rows look at it."""
    cfg = composed(*job, hydra=True)
    chosen = cfg.hydra.runtime.choices
    options = {
        str(key): cfg[key]
        for key in cfg.keys() - {"hydra", "directory", "choices", "overrides"}
        if not OmegaConf.is_config(cfg[key])
    }
    return {
        "settings": options | {group: chosen[group] for group in GROUPS if group in chosen},
        "model": cfg.model.name,
        "changes": {},
    }


@pytest.mark.parametrize(
    ("paper", "message"),
    [
        ("abc", "`paper=abc` is not possible; it names a table of a paper"),
        ([1], r"`paper=\[1\]` is not possible"),
        ({"deeper": 1}, "`paper={'deeper': 1}` is not possible"),
        ({"table": "coolsd_table3", "same": 1}, "is not possible"),
        ({}, "there is no paper.table=None; choose one of coolsd_table1, "),
        ({"table": ["a"]}, r"there is no paper.table=\['a'\]; choose one of"),
    ],
)
def test_a_preset_names_a_table(paper: Any, message: str) -> None:
    with pytest.raises(TemperaError, match=message):
        paper_tables.check_preset(paper)
    paper_tables.check_preset({"table": "coolsd_table3"})


def test_every_table_has_its_preset() -> None:
    assert (
        sorted(f"{paper}_{name}" for paper, names in ISSUED.items() for name in names.split())
        == PRESETS
    )


def network(directory: str = "") -> LlamaGen:
    """A tiny random LlamaGen with the shipped model's grid and codes: `model.network` of a target
    that all presets fit. It stands for one that is read from `directory`.
    """
    torch.manual_seed(0)
    return LlamaGen(LlamaGenConfig(1024, 16, 32, 1, 2, (12, 12), prefix_length=6, caption_dim=8))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the presets find a draft and keep the tables of neighbours that they share."""
    directory = tmp_path_factory.mktemp("presets")
    EagleModel.of(network(), "shapes").save_pretrained(directory / "draft")
    return directory


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target(
        composed(
            f"model.network._target_={__name__}.network",
            "model.text_encoder._target_=tiny_evaluation.text_encoder",
        )
    )


def small_mar(width: int) -> MAR:
    """A tiny MAR: `model.network` and, narrower, `model.draft` of a target that the presets of
    continuous tokens fit.
    """
    return MAR(
        MARConfig(
            grid=(2, 2),
            channels=4,
            patch=2,
            width=width,
            depth=1,
            heads=2,
            buffer=2,
            classes=48,
            head_width=8,
            head_depth=1,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*CONTINUOUS, "frontier_continuous"])
def test_every_job_of_continuous_tokens_composes_and_builds(preset: str) -> None:
    found = jobs(preset)
    assert len({tuple(job) for job in found}) == len(found)
    for job in found:
        cfg = composed(*job)
        assert (
            OmegaConf.select(cfg, "paper.table") == (preset if preset in CONTINUOUS else None)
            and cfg.model.name == "shapes_mar"
        )
        for part, width in (("network", 16), ("draft", 8)):
            cfg.model[part] = {"_target_": f"{__name__}.small_mar", "width": width}
        if fewer := cfg.get("steps") is not None:
            cfg.steps = 2  # of the small network's 4 tokens
        target = build_target(cfg)
        method = build_method(cfg, target)
        assert method.is_plain == (cfg.decoding._target_.endswith("Parallel") and not fewer)
        prompts = instantiate(cfg.data)[:1]
        assert method.decode(target, RandomStreams(0, ["a"]), [prompts[0].text]).tokens.shape == (
            1,
            4,
            16,
        )
        instantiate(cfg.speed)
        instantiate(cfg.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mar_large", "mar_huge"])
def test_presets_of_continuous_tokens_take_another_model(model: str) -> None:
    assert {
        composed(*job).model.name for job in jobs("cspd_table2", f"model={model}", "data=imagenet")
    } == {model}
    assert any(
        f"guidance={3.2 if model == 'mar_huge' else 3.0}" in job
        for job in jobs("cspd_table2", f"model={model}")
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in CONTINUOUS])
def test_every_job_composes_and_builds(
    preset: str, target: Target, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    found = jobs(preset)
    assert len({tuple(job) for job in found}) == len(found)
    for job in found:
        cfg = composed(*job, "model.draft=draft")
        assert cfg.paper.table == preset
        drafter = build_drafter(cfg, target)
        build_rule(cfg, drafter.depth)
        instantiate(cfg.speed)
        instantiate(cfg.metrics)
        check(cfg.pipeline, dict.fromkeys(["target", "method", "image_decoder", "device"]))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_of_the_paper_has_its_job(preset: str) -> None:
    data = find(preset)
    assert data["paper"] in results()["papers"]
    made = [as_row(job) for job in jobs(preset)]
    for line in (line for lines in data.get("models", {}).values() for line in lines):
        assert all(paper_tables.column(name) for name in set(line) - {"run"})
        fitting = [row for row in made if paper_tables._more(row, wanted(data, line)) is not None]
        assert fitting, line["run"]


TREES = {"coolsd_table1": 4, "coolsd_figure3": 15}
"""Tables whose methods are compared on one tree, and how many rows have one."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", TREES)
def test_all_methods_of_a_block_have_the_same_tree(preset: str) -> None:
    trees = [as_row(job)["settings"].get("tree") for job in jobs(preset)]
    assert trees.count("chain") == trees.count("mc_sim_7b_63") == TREES[preset]
    assert trees.count(None) == 1 and len(trees) == 1 + 2 * TREES[preset]


@pytest.mark.slow
def test_on_another_model_k_is_the_papers() -> None:
    assert any("k=62" in job for job in jobs("lantern_table2"))
    assert any("k=1000" in job for job in jobs("lantern_table2", "model=llamagen_xl_stage1"))


def test_the_command_line_overrides_a_preset_and_can_be_swept() -> None:
    assert jobs("sjd_table3", "seed=1,2") == [
        [f"method={method}", "experiment=sjd_table3", f"seed={seed}"]
        for method in ("ar", "sjd")
        for seed in (1, 2)
    ]
    assert jobs("coolsd_table2", "method=ar") == [
        ["experiment=coolsd_table2", "method=ar"],
        *[[f"delta={delta}", "experiment=coolsd_table2", "method=ar"] for delta in (1.1, 2)],
    ]


def test_several_models_each_have_their_own_runs() -> None:
    made = jobs("lantern_table9", "model=shapes,llamagen_xl_stage1")
    assert [[one for one in job if one.startswith(("k=", "model="))] for job in made] == [
        *[["k=62", "model=shapes"]] * 2,
        *[["k=1000", "model=llamagen_xl_stage1"]] * 2,
    ]


@pytest.mark.slow
def test_batches_for_a_launcher() -> None:
    batches = split(["seed=1,2", "seed=3"], [], 2)
    assert batches == [[["seed=1"], ["seed=2"]], [["seed=3"]]]


@pytest.mark.slow
def test_a_preset_prints_the_papers_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """One command: every row of the table, then paper and ours side by side; the report has them
    too.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(figures, "acceptance_map", lambda path, *_: path.touch())
    tiny = [option.replace("drafter.path=", "model.draft=") for option in tiny_options(tmp_path)]
    options = [option for option in tiny if not option.startswith("limit=")]
    monkeypatch.setattr(
        sys, "argv", ["run.py", "-m", "experiment=coolsd_table1", "limit=2", *options]
    )
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "Cool-SD, Table 1, LlamaGen-XL" in said
    assert "Cool-SD, Table 1, Lumina-mGPT 7B" in said
    assert "Annealed Relaxation of Speculative Decoding" in said
    assert "metrics=real computes inception score" in said
    finished, unfinished = find_runs([tmp_path / "outputs" / "coolsd_table1"])
    assert (len(finished), unfinished) == (9, [])
    rows, damaged = collect(finished)
    assert damaged == []
    ours = {
        row["settings"].get("delta"): row["metrics"]["accepted_length"]["value"]
        for row in rows
        if row["method"] == "coolsd" and row["settings"]["tree"] == "chain"
    }
    lines = [line.strip() for line in said.splitlines()]
    (line,) = [line for line in lines if line.startswith("coolsd delta=2 tree=chain ")]
    assert line.split()[3:5] == ["3.34", f"{ours[2]:.2f}"]
    assert line.split()[-2:] == ["-0.1353", "–"]
    write_report(rows, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"| coolsd delta=2 tree=chain | 3.34 | {ours[2]:.2f} |" in text


SHIPPED = {
    "sjd_appendix_h": ("refinement=False", ["step"]),
    "lantern_figure2": ("method=ar", ["top1", "top10", "entropy"]),
    "lantern_figure6": ("rank=-1", []),
    "lantern_figure7": ("delta=0.4", ["proximity_first", "proximity_others"]),
    "lantern_table1": ("method=eagle2", ["accept"]),
    "lantern_table6": ("delta=0.5", ["accepted_length"]),
    "lantern_table7": ("captions=2", ["speedup"]),
    "lantern_table9": ("measure=jsd", ["distance", "whole_round"]),
    "sjd_table5": ("method=jacobi", ["step"]),
    "sjd_table7": ("top_k=1", ["step"]),
    "sjd_pac_table4": ("method=sjd_pac", ["target_forward", "verify_and_draft", "commit"]),
    "cspd_figure9": ("method=draft", []),
}
"""Presets by an option of one of their runs, and quantities that it must have."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", SHIPPED)
def test_a_run_on_the_shipped_model(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, quantities = SHIPPED[preset]
    job = next(job for job in jobs(preset) if option in job)
    timed = quantities and quantities[0] in ("speedup", "distance", "target_forward")
    given = [] if preset == "lantern_table7" else ["limit=1", f"speed.prompts={int(bool(timed))}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["run.py", *job, *given, "speed.warmup=0", "tracking=none", "metrics=none"],
    )
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    (run,), _ = find_runs([tmp_path / "outputs"])
    (row,), damaged = collect([run])
    assert damaged == [] and row["paper"]["table"] == preset
    for name in quantities:
        value = paper_tables.column(name).ours(row)
        assert value is not None and value > 0, name
    (run / "grid.png").unlink()
    assert (run / "proximity_map.png").is_file() == (row["method"] == "lantern")


def finished(
    method: str, length: float, table: str = "coolsd_table1", **changed: Any
) -> dict[str, Any]:
    """A run's row, as far as papers' tables look at it; `changed` may give model, data, images and
    seed.
    """
    facts = {"model": "shapes", "data": "shapes", "images": 4, "seed": 0}
    facts |= {name: changed.pop(name) for name in list(changed) if name in facts}
    return {
        "settings": {"method": method, "seed": facts["seed"], "temperature": 1, **changed},
        "method": method,
        "changes": {name: one for name, one in changed.items() if (name, one) != ("tree", "chain")},
        "family": method,
        "delta": changed.get("delta"),
        "directory": f"runs/{method}-{length}",
        "machine": "cpu",
        "metrics": {"accepted_length": {"value": length}},
        "acceptance_by_depth": [0.5],
        "tv_by_depth": [],
        "time": {},
        "paper": {"table": table},
        **facts,
    }


def cell(tables: list[paper_tables.PaperComparison], title: str, row: str, model: str) -> str:
    """A model's accepted length in a row of the group with this title."""
    (one,) = [found for found in tables if found.title.endswith(title)]
    ((_, cells),) = [line for line in one.lines if line[0] == row]
    return cells[0][1 + one.models.index(model)]


def test_a_row_is_filled_by_runs_of_its_group_alone() -> None:
    """Other sampling, prompts, sizes and models do not move a cell, and are named."""
    runs = [
        finished("eagle", 3.0, tree="chain"),
        finished("eagle", 3.2, tree="chain", seed=1),
        finished("ar", 1.0),
        finished("eagle", 9.0, tree="chain", temperature=0.5),
        finished("eagle", 8.0, tree="chain", images=2),
        finished("eagle", 2.5, tree="chain", model="lumina", data="coco"),
        finished("eagle", 7.0, tree="chain", model="lumina", data="parti"),
    ]
    tables = paper_tables.beside(runs)
    assert cell(tables, "LlamaGen-XL", "eagle tree=chain", "shapes") == "3.10"
    assert cell(tables, "Lumina-mGPT 7B", "eagle tree=chain", "lumina") == "2.50"
    assert [table.models for table in tables] == [["shapes"], ["shapes", "lumina"], ["shapes"]]
    left = [note for note in tables[-1].notes if note.startswith("Left out")]
    assert [
        sum(text in note for note in left)
        for text in ("temperature=0.5", "has 2 images", "data=parti")
    ] == [1, 1, 1]
    text = "\n".join(paper_tables.markdown(tables))
    assert "accepted length: shapes (shipped) | accepted length: lumina |" in text


def test_runs_that_differ_in_something_else_are_not_averaged() -> None:
    runs = [finished("ar", 1.0), finished("ar", 5.0) | {"machine": "cuda"}]
    tables = paper_tables.beside(runs)
    assert cell(tables, "LlamaGen-XL", "ar", "shapes") == "1.00"
    assert any("differs" in note and "machine (cpu and cuda)" in note for note in tables[-1].notes)


def test_a_replaced_value_stands_in_its_row() -> None:
    run = finished("lantern", 2.0, "lantern_table8", drafter="eagle2", delta=0.4, k=62)
    (table,) = paper_tables.beside([run])
    assert table.lines[1][0] == "delta=0.4 k=1000 (here 62)"


def test_every_group_has_its_model() -> None:
    for name in results().keys() - {*APART}:
        assert all(
            group(title).keys() >= {"model", "data"} for title in find(name).get("models", {})
        )


def test_a_table_without_numbers_lists_the_runs() -> None:
    run = finished("coolsd", 2.5, "coolsd_figure5", delta=2.0, model="large")
    (table,) = paper_tables.beside([run, {**run, "paper": None}])
    assert table.lines == [("coolsd δ=2", [["–", "2.50"], ["–", "–"]])]
    assert any("exponential is better than linear" in note for note in table.notes)
    assert paper_tables.beside([{**run, "paper": None}]) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("single", 0.25),
        ("tv_2", 0.4),
        ("tv_8", None),
        ("accept", 0.75),
        ("perplexity", 7.389),
        ("clip_percent", 31.0),
        ("target_forward", 0.02),
        ("hpsv2", 24.1),
        ("image_reward", -0.1),
        ("precision", 0.48),
        ("recall", 0.5),
        ("whole_round", 0.035),
        ("commit", 0.001),
        ("proximity_first", 6.0),
        ("proximity_others", 2.5),
        ("alpha", 0.6),
        ("alpha_5", 0.9),
        ("speedup_8", 1.5),
        ("inception_score", 221.4),
    ],
)
def test_our_value_of_a_quantity(column: str, value: float | None) -> None:
    run = {
        "metrics": {
            "logprob_per_token": {"value": -2.0},
            "clip_score": {"value": 0.31},
            "inception_score": {"value": 221.4},
            "image_reward": {"value": -0.1},
            "hpsv2": {"value": 24.1},
            "precision": {"value": 0.7},
            "precision_vgg": {"value": 0.48},
            "recall": {"value": 0.5},
            "acceptance_rate": {"value": 0.6},
            "speedup_8": {"value": 1.5},
        },
        "acceptance_by_depth": [0.75, 0.5],
        "acceptance_by_tenth": [0.5, 0.5, 0.5, 0.5, 0.9, 1, 1, 1, 1, None],
        "tv_by_depth": [0.5, 0.4],
        "time": {
            "parts": {
                part: {"ms_per_round": time}
                for part, time in (("draft", 5), ("target", 20), ("verify", 9), ("commit", 1))
            }
        },
        "grid": [2, 3],
        "proximity_by_place": [4.0, 1.0, 4.0, 8.0, None, None],
    }
    assert paper_tables.column(column).ours(run) == (
        None if value is None else pytest.approx(value, abs=1e-3)
    )
    empty: dict[str, Any] = {
        "metrics": {},
        "acceptance_by_depth": [],
        "acceptance_by_tenth": [],
        "tv_by_depth": [],
        "proximity_by_place": [],
        "grid": [2, 3],
        "time": {},
    }
    assert paper_tables.column(column).ours(empty) is None
