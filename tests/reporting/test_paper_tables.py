"""conf/experiment/: every job of every preset composes and builds, and a preset prints its paper's
figures beside ours.
"""

import runpy
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from paths import CONF, ROOT
from report_runs import finished
from tiny_evaluation import tiny_options

from tempera.config.build import build_drafter, build_method, build_rule, build_target
from tempera.config.instantiate import check, instantiate
from tempera.continuous.mar import MAR, MARConfig
from tempera.decoding.interfaces import Target
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.eagle_network import EagleModel
from tempera.errors import TemperaError
from tempera.reporting import figures, paper_tables
from tempera.reporting.collect import Run, read_run
from tempera.reporting.paper_results import APART, find, group, results, wanted
from tempera.reporting.tables import Section
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


def as_run(job: list[str]) -> Run:
    """A run of a job, as far as a paper's rows look at it."""
    cfg = composed(*job, hydra=True)
    chosen = cfg.hydra.runtime.choices
    options = {
        str(key): cfg[key]
        for key in cfg.keys() - {"hydra", "directory", "choices", "overrides"}
        if not OmegaConf.is_config(cfg[key])
    }
    options |= {name: chosen[name] for name in GROUPS if name in chosen}
    options.pop("weights")
    return finished(options.pop("method"), model=options.pop("model"), **options)


def kind_of(job: Iterable[str]) -> tuple[str, ...]:
    """A job's choices, and the names of its other options."""
    named = ((option, option.partition("=")[0]) for option in job)
    return tuple(sorted(option if name in GROUPS else name for option, name in named))


def one_of_each_kind(found: Sequence[list[str]]) -> list[list[str]]:
    """The first job of each kind: the others differ in numbers alone."""
    return list({kind_of(job): job for job in reversed(found)}.values())[::-1]


def check_rows(preset: str, found: list[list[str]]) -> None:
    """The first row of each kind has its job, and every quantity is known."""
    data = find(preset)
    made = [as_run(job) for job in one_of_each_kind(found)]
    lines = [line for lines in data.get("models", {}).values() for line in lines]
    assert all(paper_tables.quantity(name) for line in lines for name in set(line) - {"run"})
    rows = [wanted(data, line) for line in lines]
    for row in {
        kind_of(f"{name}={one}" for name, one in row.items()): row for row in reversed(rows)
    }.values():
        assert [run for run in made if paper_tables._more(run, row) is not None], row


@pytest.mark.parametrize(
    ("paper", "option"),
    [
        ("abc", "paper"),
        ([1], "paper"),
        ({"deeper": 1}, "paper"),
        ({"table": "coolsd_table3", "same": 1}, "paper"),
        ({}, "paper.table"),
        ({"table": ["a"]}, "paper.table"),
    ],
)
def test_a_preset_names_a_table(paper: Any, option: str) -> None:
    with pytest.raises(TemperaError) as problem:
        paper_tables.check_preset(paper)
    assert problem.value.option == option
    paper_tables.check_preset({"table": "coolsd_table3"})


def test_every_table_has_its_preset() -> None:
    issued = [f"{paper}_{name}" for paper, names in ISSUED.items() for name in names.split()]
    assert sorted(issued) == PRESETS


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
    layers = {"width": width, "depth": 1, "heads": 2, "buffer": 2, "head_width": 8, "head_depth": 1}
    return MAR(MARConfig(grid=(2, 2), channels=4, patch=2, classes=48, **layers))


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*CONTINUOUS, "frontier_continuous"])
def test_every_job_of_continuous_tokens(preset: str) -> None:
    """One of each kind composes; the first of each method decodes; the paper's rows have jobs."""
    found = jobs(preset)
    assert len({tuple(job) for job in found}) == len(found)
    if preset in CONTINUOUS:
        check_rows(preset, found)
    decoded = set()
    for job in one_of_each_kind(found):
        cfg = composed(*job, hydra=True).copy()
        assert cfg.model.name == "shapes_mar"
        assert OmegaConf.select(cfg, "paper.table") == (preset if preset in CONTINUOUS else None)
        kind = (cfg.hydra.runtime.choices.method, cfg.get("steps") is None, cfg.get("alignment"))
        if kind in decoded:
            continue
        decoded.add(kind)
        for part, width in (("network", 16), ("draft", 8)):
            cfg.model[part] = {"_target_": f"{__name__}.small_mar", "width": width}
        if fewer := cfg.get("steps") is not None:
            cfg.steps = 2  # of the small network's 4 tokens
        target = build_target(cfg)
        method = build_method(cfg, target)
        assert method.is_plain == (cfg.decoding._target_.endswith("Parallel") and not fewer)
        prompts = instantiate(cfg.data)[:1]
        output = method.decode(target, RandomStreams(0, ["a"]), [prompts[0].text])
        assert output.tokens.shape == (1, 4, 16)
        instantiate(cfg.speed)
        instantiate(cfg.metrics)


@pytest.mark.slow
def test_presets_of_continuous_tokens_take_another_model() -> None:
    found = jobs("cspd_table2", "model=mar_huge", "data=imagenet")
    assert composed(*found[0]).model.name == "mar_huge"
    assert any("guidance=3.2" in job for job in found)
    assert any("guidance=3.0" in job for job in jobs("cspd_table2", "model=mar_large"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in CONTINUOUS])
def test_every_job(
    preset: str, target: Target, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each kind composes, and the first of each method, drafter, tree and rule builds; the
    paper's rows have jobs.
    """
    monkeypatch.chdir(workplace)
    found = jobs(preset)
    assert len({tuple(job) for job in found}) == len(found)
    check_rows(preset, found)
    built = set()
    for job in one_of_each_kind(found):
        cfg = composed(*job, hydra=True).copy()
        assert cfg.paper.table == preset
        kind = tuple(cfg.hydra.runtime.choices.get(name) for name in GROUPS)
        if kind in built:
            continue
        built.add(kind)
        cfg.model.draft = "draft"
        drafter = build_drafter(cfg, target)
        build_rule(cfg, drafter.depth)
        instantiate(cfg.speed)
        instantiate(cfg.metrics)
        check(cfg.pipeline, dict.fromkeys(["target", "method", "image_decoder", "device"]))


TREES = {"coolsd_table1": 4, "coolsd_figure3": 15}
"""Tables whose methods are compared on one tree, and how many rows have one."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", TREES)
def test_all_methods_of_a_block_have_the_same_tree(preset: str) -> None:
    trees = [as_run(job).settings.get("tree") for job in jobs(preset)]
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
) -> None:
    """One command: every row of the table, then paper and ours side by side."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(figures, "acceptance_map", lambda path, *_: path.touch())
    tiny = [option.replace("drafter.path=", "model.draft=") for option in tiny_options(tmp_path)]
    options = ["limit=2", *(option for option in tiny if not option.startswith("limit="))]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", "experiment=coolsd_table3", *options])
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    said = capsys.readouterr().out
    for words in ("Cool-SD, Table 3, LlamaGen-XL", "Lumina-mGPT 7B", "Annealed Relaxation"):
        assert words in said
    (path,) = tmp_path.rglob("metrics.json")
    (line,) = (line.split() for line in said.splitlines() if " 0.38 " in line)
    assert line == ["eagle", "0.38", f"{read_run(path.parent).value('tv'):.2f}"]


SHIPPED = {
    "lantern_figure2": ("method=ar", ["top1", "top10", "entropy"]),
    "lantern_figure6": ("rank=-1", []),
    "lantern_figure7": ("delta=0.4", ["proximity_first", "proximity_others"]),
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
    timed = quantities and quantities[0] == "target_forward"
    given = ["limit=1", f"speed.prompts={int(bool(timed))}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["run.py", *job, *given, "speed.warmup=0", "tracking=none", "metrics=none"],
    )
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    (path,) = (tmp_path / "outputs").rglob("metrics.json")
    run = read_run(path.parent)
    assert run.paper == {"table": preset}
    for name in quantities:
        assert paper_tables.quantity(name).of([run])[0] > 0, name
    assert path.with_name("proximity_map.png").is_file() == (run.method == "lantern")


def one(method: str, length: float, table: str = "coolsd_table1", **given: Any) -> Run:
    """A run of a preset; `given` are fields and options."""
    fields = {"data": "shapes", "images": 4, "directory": f"runs/{method}-{length}", **given}
    apart = (*Run.model_fields, "tree")
    changes = {name: value for name, value in given.items() if name not in apart}
    metrics = {"accepted_length": {"value": length}}
    fields["paper"] = {"table": table}
    return finished(method, metrics=metrics, changes=changes, **{"temperature": 1, **fields})


def cells(sections: list[Section], title: str) -> dict[str, dict[str, str]]:
    """The cells of the group with this title, by row."""
    (found,) = [section for section in sections if section.title.endswith(title)]
    return {line.pop("run"): line for line in found.table.to_dict("records")}


def test_a_row_is_filled_by_runs_of_its_group_alone() -> None:
    """Other sampling, prompts, sizes and models do not move a cell, and are named."""
    runs = [
        one("eagle", 3.0, tree="chain"),
        one("eagle", 3.2, tree="chain", seed=1),
        one("ar", 1.0),
        one("eagle", 9.0, tree="chain", temperature=0.5),
        one("eagle", 8.0, tree="chain", images=2),
        one("eagle", 2.5, tree="chain", model="lumina", data="coco"),
        one("eagle", 7.0, tree="chain", model="lumina", data="parti"),
    ]
    sections = paper_tables.beside(runs)
    llamagen, lumina = (cells(sections, title) for title in ("LlamaGen-XL", "Lumina-mGPT 7B"))
    assert llamagen["eagle tree=chain"]["accepted length: shapes (shipped)"] == "3.10"
    assert lumina["eagle tree=chain"]["accepted length: lumina"] == "2.50"
    assert "accepted length: lumina" not in llamagen["ar"]
    left = [note for note in sections[-1].notes if note.startswith("Left out")]
    words = ("temperature=0.5", "has 2 images", "data=parti")
    assert all(any(text in note for note in left) for text in words)


def test_runs_that_differ_in_something_else_are_not_averaged() -> None:
    sections = paper_tables.beside([one("ar", 1.0), one("ar", 5.0, machine="cuda")])
    ours = cells(sections, "LlamaGen-XL")["ar"]["accepted length: shapes (shipped)"]
    assert ours == "1.00"
    notes = [note for note in sections[-1].notes if "differs" in note]
    assert any("machine (cpu and cuda)" in note for note in notes)


def test_a_replaced_value_stands_in_its_row() -> None:
    run = one("lantern", 2.0, "lantern_table8", drafter="eagle2", delta=0.4, k=62)
    (section,) = paper_tables.beside([run])
    assert section.table["run"][1] == "delta=0.4 k=1000 (here 62)"


def test_every_group_has_its_model() -> None:
    for name in results().keys() - {*APART}:
        titles = find(name).get("models", {})
        assert all(group(title).keys() >= {"model", "data"} for title in titles)


def test_a_table_without_numbers_lists_the_runs() -> None:
    run = one("coolsd", 2.5, "coolsd_figure5", delta=2.0, model="large")
    (section,) = paper_tables.beside([run, run.model_copy(update={"paper": None})])
    assert section.table.iloc[:, :3].to_numpy().tolist() == [["coolsd δ=2", "–", "2.50"]]
    assert any("exponential is better than linear" in note for note in section.notes)


QUANTITIES = {
    "single": 0.25, "tv_2": 0.4, "tv_8": None, "accept": 0.75, "perplexity": 7.389,
    "clip_percent": 31.0, "target_forward": 0.02, "hpsv2": 24.1, "image_reward": -0.1,
    "precision": 0.48, "recall": 0.5, "whole_round": 0.035, "commit": 0.001,
    "proximity_first": 6.0, "proximity_others": 2.5, "alpha": 0.6, "alpha_5": 0.9,
    "speedup_8": 1.5, "inception_score": 221.4,
}  # fmt: skip


def test_our_value_of_a_quantity() -> None:
    metrics = {"logprob_per_token": -2.0, "clip_score": 0.31, "inception_score": 221.4,
               "image_reward": -0.1, "hpsv2": 24.1, "precision": 0.7, "precision_vgg": 0.48,
               "recall": 0.5, "acceptance_rate": 0.6, "speedup_8": 1.5}  # fmt: skip
    times = {"draft": 5, "target": 20, "verify": 9, "commit": 1}
    run = finished(
        "coolsd",
        metrics={key: {"value": value} for key, value in metrics.items()},
        acceptance_by_depth=[0.75, 0.5],
        acceptance_by_tenth=[0.5, 0.5, 0.5, 0.5, 0.9, 1, 1, 1, 1, None],
        tv_by_depth=[0.5, 0.4],
        time={"parts": {part: {"ms_per_round": time} for part, time in times.items()}},
        grid=[2, 3],
        proximity_by_place=[4.0, 1.0, 4.0, 8.0, None, None],
    )
    empty = finished("coolsd")
    for name, value in QUANTITIES.items():
        found = paper_tables.quantity(name).of([run, empty])
        expected = [np.nan if value is None else value, np.nan]
        assert found.tolist() == pytest.approx(expected, abs=1e-3, nan_ok=True), name
