"""conf/experiment/: every job of every preset composes and builds, and a preset prints its paper's
figures beside ours.
"""

import copy
import itertools
import runpy
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf, SweepDir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from paths import CONF, ROOT
from report_runs import finished
from tiny_evaluation import tiny_options

from tempera.config import compose as composing
from tempera.config.compose import composed as composed_run
from tempera.config.instantiate import instantiate, part
from tempera.config.parts import Parts
from tempera.decoding.interfaces import Target
from tempera.errors import TemperaError
from tempera.reporting import figures, paper_tables
from tempera.reporting.collect import read_run
from tempera.reporting.finished_run import Run
from tempera.reporting.paper_results import NOT_TABLES, cases, find, group, results, wanted
from tempera.reporting.tables import Section, texts

CHOSEN = ("method", "drafter", "tree", "rule", "schedule")
OF_MAR = ("model=shapes_mar",)
GROUPS = ("method", "model", "drafter", "tree", "rule", "schedule")
OURS = {
    *("frontier", "frontier_continuous", "relaxations", "study"),
    *("results", "results_mar", "results_speed", "evidence"),
}
BESIDE = {"evidence": "coolsd_table1"}
"""Presets of ours that print a paper's numbers."""
EXPERIMENTS = CONF / "experiment"
PRESETS = sorted(
    {path.stem for path in EXPERIMENTS.glob("*.yaml")} - OURS - {"paper", "paper_mar", "debug"}
)


@cache
def composed(*overrides: str, hydra: bool = False) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("eval", list(overrides), return_hydra_config=hydra)


@cache
def run_options(*job: str) -> DictConfig:
    """What a run of a job is composed of."""
    return composed_run("eval", job)


def split(
    cases: list[str],
    overrides: list[str],
    size: int | None = None,
    table: str | None = None,
    context: Any = None,
) -> list[list[list[str]]]:
    """The jobs that the sweeper makes of cases and a command line, in batches."""
    Plugins.instance()  # executes the module once more: the class is the one there is afterwards
    sweeper: Any = get_class("hydra_plugins.tempera_cases.CaseSweeper")(cases, table)
    sweeper.hydra_context = context
    if context is not None:
        hydra = HydraConf(sweep=SweepDir(dir="sweep"), sweeper={}, launcher={})
        hydra.job.config_name = "none"  # of no script, which would check its own options
        sweeper.config = OmegaConf.create({"model": {"name": "shapes"}, "hydra": hydra})
    found = sweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), size)
    return list(found)


def jobs(preset: str, *options: str) -> list[list[str]]:
    """What the sweep runs, as the sweeper makes it from the preset."""
    cfg = composed(
        f"experiment={preset}",
        *(option for option in options if "," not in option),
        hydra=True,
    )
    node = cfg.hydra.sweeper
    assert node._target_ == "hydra_plugins.tempera_cases.CaseSweeper"
    model = [] if any(one.startswith("model=") for one in options) else [f"model={cfg.model.name}"]
    (batch,) = split(
        list(node.cases), [f"experiment={preset}", *model, *options], table=node.get("table")
    )
    return [[option for option in job if option not in model] for job in batch]


def as_run(job: list[str]) -> Run:
    """A run of a job, as far as a paper's rows look at it."""
    cfg = run_options(*job)
    chosen = cfg.choices
    options = {
        str(key): cfg[key]
        for key in cfg.keys() - {"hydra", "directory", "choices", "overrides"}
        if not OmegaConf.is_config(cfg[key])
    }
    options |= {name: chosen[name] for name in GROUPS if name in chosen}
    options.pop("weights")
    return finished(
        options.pop("method"),
        model=options.pop("model"),
        data=chosen["data"],
        changes=Parts.of(cfg, elsewhere=True).changes(composing.given(cfg)),
        **options,
    )


def kind_of(job: Iterable[str]) -> tuple[str, ...]:
    """A job's choices, and the names of its other options."""
    named = ((option, option.partition("=")[0]) for option in job)
    kept = (*GROUPS, "data", "image_size")
    return tuple(sorted(option if name in kept else name for option, name in named))


def one_of_each_kind(found: Sequence[list[str]]) -> list[list[str]]:
    """The first job of each kind: the others differ in numbers alone."""
    return list({kind_of(job): job for job in reversed(found)}.values())[::-1]


def check_rows(preset: str, found: list[list[str]], model: str | None = None) -> None:
    """The first row of each kind, of a model's groups, has its job, and every quantity is known."""
    data = find(preset)
    runs = [as_run(job) for job in one_of_each_kind(found)]
    filled = {place for run in runs for place in paper_tables._matching_rows(run, data)[0]}
    first: dict[tuple[str, ...], tuple[str, int]] = {}
    for title, lines in (data.get("models") or {}).items():
        assert group(title).keys() >= {"model", "data"}
        if model is not None and group(title)["model"] != model:
            continue
        for row, line in enumerate(lines):
            assert all(paper_tables.quantity(name) for name in line.keys() - {"run"})
            kind = kind_of(f"{name}={one}" for name, one in wanted(data, line).items())
            first.setdefault((title, *kind) if model else kind, (title, row))
    assert {*first.values()} <= filled


def test_a_preset_names_a_table() -> None:
    with pytest.raises(TemperaError, match="coolsd_table3") as problem:
        find("coolsd_table")
    assert problem.value.option == "paper.table"
    assert [len(cases("coolsd_table1", model)) for model in ("lumina", "shapes")] == [35, 9]


def test_every_table_has_its_preset() -> None:
    assert sorted(results().keys() - {*NOT_TABLES}) == PRESETS


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """The shipped models, in a directory for the tables of neighbours that presets share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("presets"))
        return {
            name: Parts.of(composed(f"model={name}", "method=ar")).target()
            for name in paper_tables.SHIPPED
        }


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*PRESETS, *sorted(OURS - {"frontier"})])
def test_every_job(
    preset: str,
    targets: dict[str, Target],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of each kind composes, and the first of each method, drafter, tree and rule builds, if it
    needs no calibration; the paper's rows have jobs.
    """
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    found = jobs(preset)
    assert len({tuple(job) for job in found}) == len(found)
    if preset in PRESETS:
        check_rows(preset, found)
    built = set()
    for job in one_of_each_kind(found):
        cfg = run_options(*job)
        table = preset if preset in PRESETS else BESIDE.get(preset)
        assert OmegaConf.select(cfg, "paper.table") == table
        kind = tuple(cfg.choices.get(name) for name in GROUPS)
        model = targets.get(cfg.model.name)
        if model and kind not in built and not {"calibrated", "optimal"} & {*kind}:
            Parts.of(cfg).method(model, Parts.of(cfg).rule())
            part(cfg.pipeline)
            instantiate(cfg.speed)
            instantiate(cfg.metrics)
        built.add(kind)


MODELS = {
    preset: sorted({group(title)["model"] for title in find(preset).get("models") or {}})
    for preset in PRESETS
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "model"), [(preset, model) for preset in PRESETS for model in MODELS[preset]]
)
def test_a_papers_model_runs_what_the_papers_rows_say(preset: str, model: str) -> None:
    """The composed settings of the sweep's jobs fill the rows."""
    check_rows(preset, jobs(preset, f"model={model}"), model)


@pytest.mark.slow
def test_the_values_of_all_cases_fit_the_signatures() -> None:
    """Of every preset on every model: each value is given to the parts of its method once."""
    given: dict[tuple[str, ...], dict[tuple[str, str], tuple[str, str]]] = {}
    for preset in PRESETS:
        for model in ["shapes_mar" if preset.startswith("cspd") else "shapes", *MODELS[preset]]:
            for case in cases(preset, model):
                options = [option.split("=", 1) for option in shlex.split(case)]
                kind = tuple(f"{name}={one}" for name, one in options if name in CHOSEN)
                others = [(name, one) for name, one in options if name not in (*CHOSEN, "data")]
                for name, one in others:
                    given.setdefault(kind, {}).setdefault((name, one), (preset, model))
    for kind, values in given.items():
        for (name, one), (preset, model) in values.items():
            in_preset = (f"experiment={preset}", *kind)
            mar = OF_MAR if "cspd" in preset else ()
            chosen = ((*kind, *mar), in_preset, (*in_preset, f"model={model}"))
            cfg = next(cfg for cfg in itertools.starmap(composed, chosen) if name in cfg)
            value = OmegaConf.create(f"value: {one}")["value"]
            changed = copy.deepcopy(cfg)
            OmegaConf.update(changed, name, value)
            Parts.of(changed)
    assert sum(map(len, given.values())) > 200


STATED = [
    ("sjd_table5", "anole", {"method": "sjd"}, {"data": ["parti"], "window": [16]}),
    ("sjd_table3", "llamagen_xl_stage1", {"method": "sjd"}, {"data": ["coco", "parti"]}),
    ("sjd_pac_table1", "emu3", {}, {"top_k": [2000], "data": ["coco", "parti"]}),
    ("lumina2_readme", "lumina2", {}, {"guidance": [4.0], "top_k": [4096], "image_size": [768]}),
    ("lumina2_readme", "lumina2", {"method": "sjd"}, {"window": [16]}),
    ("sjd_pac_table1", "lumina", {"method": "lanternpp"}, {"tree": ["mc_sim_7b_63"]}),
    ("sjd_pac_table1", "lumina", {"method": "gsd"}, {"window": [16]}),
    (
        *("sjd_pac_table1", "lumina", {"method": "sjd_pac_full"}),
        {"window": [63], "levels": [2], "branches": [3, 4], "shape": ["full"]},
    ),
    ("coolsd_table1", "lumina", {}, {"seed": [42, 43, 44, 45, 46], "data": ["coco"]}),
    ("coolsd_table3", "lumina", {}, {"data": ["coco_train"], "tree": ["chain"], "depth": [5]}),
    ("lantern_table2", "llamagen_xl_stage1", {}, {"data": ["coco2014"], "top_k": [1000]}),
    ("lantern_table2", "llamagen_xl_stage1", {"method": "eagle2"}, {"nodes": [59]}),
    ("lantern_table4", "llamagen_xl_stage1", {}, {"data": ["coco"]}),
    ("cspd_table1", "mar_huge", {"method": "cspd"}, {"drafter": ["mar_base", "mar_large"]}),
    ("cspd_table2", "mar_huge", {}, {"data": ["imagenet"]}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "model", "which", "stated"), STATED)
def test_a_presets_composed_settings_are_those_that_the_authors_state(
    preset: str, model: str, which: dict[str, Any], stated: dict[str, list[Any]]
) -> None:
    """One job of each kind is composed. In the others a stated number is an option of their own,
    which the first shows to arrive.
    """
    wanted_options = {f"{name}={one}" for name, one in which.items()}
    found = [job for job in jobs(preset, f"model={model}") if wanted_options <= {*job}]
    met = {name: set[Any]() for name in stated}
    for job in one_of_each_kind(found):
        cfg, same = run_options(*job), [one for one in found if kind_of(one) == kind_of(job)]
        for name in stated:
            value = cfg.choices.get(name) or OmegaConf.select(cfg, name)
            met[name].add(value)
            if given(job, name) is not None:
                assert given(job, name) == value
                met[name] |= {given(one, name) for one in same}
    assert met == {name: set(values) for name, values in stated.items()}


def given(job: Iterable[str], name: str) -> Any:
    """The value of an option that a job gives; None without one."""
    options = dict(option.split("=", 1) for option in job)
    return OmegaConf.create(f"value: {options[name]}")["value"] if name in options else None


def test_an_option_that_a_row_has_may_be_given_again() -> None:
    """It does not leave the row out; another value of it does not fill the row."""
    for window, places in ((16, 1), (32, 0)):
        (job,) = (
            job
            for job in jobs("sjd_table5", "model=anole", f"window={window}", "method=sjd")
            if "initialisation=random" in job
        )
        found, _ = paper_tables._matching_rows(as_run(job), find("sjd_table5"))
        assert len(found) == places


@pytest.mark.slow
def test_jobs_of_a_table() -> None:
    """The values of the model; batches for a launcher."""
    for preset, given, option in (
        ("lantern_table2", [], "k=62"),
        ("lantern_table2", ["model=llamagen_xl_stage1"], "k=1000"),
        ("cspd_table2", ["model=mar_huge", "data=imagenet"], "guidance=3.2"),
    ):
        assert any(option in job for job in jobs(preset, *given))
    assert split(["seed=1,2", "seed=3"], [], 2) == [[["seed=1"], ["seed=2"]], [["seed=3"]]]


def test_a_method_chooses_cases_and_among_those_of_one() -> None:
    cases = ["method=ar", "method=lantern,lanternpp seed=1", "method=lantern"]
    assert split(cases, ["method=lantern"]) == [[["method=lantern", "seed=1"], ["method=lantern"]]]
    assert split(cases, ["method=lanternpp,ar"]) == [
        [["method=ar"], ["method=lanternpp", "seed=1"]]
    ]


def test_the_command_line_overrides_a_preset_and_can_be_swept() -> None:
    assert jobs("sjd_table3", "seed=1,2") == [
        [*row, "experiment=sjd_table3", f"seed={seed}"]
        for row in (["method=ar"], ["method=sjd", "window=16"])
        for seed in (1, 2)
    ]
    made = jobs("lantern_table9", "model=shapes,llamagen_xl_stage1")
    values = ["k=62"] * 2 + ["k=1000"] * 2
    assert [next(one for one in job if one.startswith("k=")) for job in made] == values


@pytest.mark.slow
def test_a_preset_prints_the_papers_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command: every row of the table, then paper and ours side by side."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(figures, "acceptance", lambda path, *_: path.touch())
    tiny = [option.replace("drafter.path=", "model.draft=") for option in tiny_options(tmp_path)]
    options = ["data.limit=2", *(option for option in tiny if not option.startswith("data.limit="))]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", "experiment=coolsd_table3", *options])
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    said = capsys.readouterr().out
    for words in ("Cool-SD, Table 3, LlamaGen-XL", "Lumina-mGPT 7B", "Annealed Relaxation"):
        assert words in said
    (path,) = tmp_path.rglob("metrics.json")
    lines = [line.split() for line in said.splitlines()]
    assert ["eagle", "0.38", f"{read_run(path.parent).value('tv'):.2f}"] in lines


@pytest.mark.slow
def test_a_run_has_the_quantities_of_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = next(job for job in jobs("lantern_table9") if "delta=0.4" in job)
    fewer = [option.replace("k=62", "k=8") for option in job]  # of the tiny model's 32 codes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *fewer, *tiny_options(tmp_path)])
    runpy.run_path(str(ROOT / "eval" / "run.py"), run_name="__main__")
    (path,) = (tmp_path / "outputs").rglob("metrics.json")
    run = read_run(path.parent)
    assert run.paper == {"table": "lantern_table9"}
    for name in ("proximity_set_size", "top1", "entropy", "target_forward", "verify_and_draft"):
        assert paper_tables.quantity(name).of([run])[0] > 0, name


def one(method: str, length: float, table: str = "coolsd_table1", **given: Any) -> Run:
    """A run of a preset; `given` are fields and options."""
    fields = {"data": "shapes", "images": 4, "directory": f"runs/{method}-{length}", **given}
    changed = {name: value for name, value in given.items() if name not in Run.model_fields}
    metrics = {"accepted_length": {"value": length}}
    fields["paper"] = {"table": table}
    return finished(method, metrics=metrics, changes=changed, **{"temperature": 1, **fields})


def cells(sections: list[Section], title: str) -> dict[str, dict[str, str]]:
    """The cells of the group with this title, by row."""
    (found,) = [section for section in sections if section.title.endswith(title)]
    return {line.pop("run"): line for line in texts(found).to_dict("records")}


def test_a_row_is_filled_by_runs_of_its_group_alone() -> None:
    """Other sampling, prompts, sizes and models do not move a cell, and are named."""
    runs = [
        one("eagle", 3.0),
        one("eagle", 3.2, seed=1),
        one("ar", 1.0),
        one("eagle", 9.0, temperature=0.5),
        one("eagle", 8.0, images=2),
        one("eagle", 2.5, model="lumina", data="coco"),
        one("eagle", 7.0, model="lumina", data="parti"),
    ]
    sections = paper_tables.paper_sections(runs)
    llamagen, lumina = (cells(sections, title) for title in ("LlamaGen-XL", "Lumina-mGPT 7B"))
    assert llamagen["eagle"]["accepted length: shapes (shipped)"] == "3.10"
    assert lumina["eagle"]["accepted length: lumina"] == "2.50"
    assert "accepted length: lumina" not in llamagen["ar"]
    known = paper_tables.paper_values(runs[0])
    assert known["paper/LlamaGen-XL/fid"] == 20.97 and "paper/Lumina-mGPT 7B/fid" in known
    left = [note for note in sections[-1].notes if note.startswith("Left out")]
    words = ("temperature=0.5", "has 2 images", "data=parti")
    assert all(any(text in note for note in left) for text in words)
    (alone, *_) = paper_tables.paper_sections([one("ar", 9.0, depth=3)])
    assert not any("shapes" in column for column in texts(alone))


def test_runs_that_differ_in_something_else_are_not_averaged() -> None:
    sections = paper_tables.paper_sections([one("ar", 1.0), one("ar", 5.0, machine="cuda")])
    ours = cells(sections, "LlamaGen-XL")["ar"]["accepted length: shapes (shipped)"]
    assert ours == "1.00"
    notes = [note for note in sections[-1].notes if "differs" in note]
    assert any("machine (cpu and cuda)" in note for note in notes)


def test_a_replaced_value_stands_in_its_row() -> None:
    run = one("lantern", 2.0, "lantern_table8", drafter="eagle2", delta=0.4, k=62)
    (section,) = paper_tables.paper_sections([run])
    assert section.numbers.index[1] == "delta=0.4 k=1000 (here 62)"


def test_runs_of_other_options_are_listed_below() -> None:
    run = one("coolsd", 2.5, "coolsd_table3", delta=2.0, model="large", data="coco_train")
    *_, section = paper_tables.paper_sections([run, run.model_copy(update={"paper": None})])
    assert texts(section).iloc[-1, 0] == "coolsd δ=2"


QUANTITIES = {
    "single": 0.25, "few": None, "many_gain": None, "perplexity": 7.389,
    "clip_percent": 31.0, "target_forward": 0.02, "precision": 0.48, "recall": 0.5,
    "whole_round": 0.035,
    "speedup_8": 1.5, "walltime": 1.28, "proximity_set": 0.009, "length_deviation": 0.2,
}  # fmt: skip


def test_our_value_of_a_quantity() -> None:
    metrics = {"logprob_per_token": -2.0, "clip_score": 0.31, "precision": 0.7, "recall": 0.5,
               "precision_vgg": 0.48, "acceptance_rate": 0.6, "speedup_8": 1.5}  # fmt: skip
    times = {"draft": 5, "target": 20, "verify": 9, "commit": 1}
    run = finished(
        "coolsd",
        gamma=1,
        metrics={key: {"value": value} for key, value in metrics.items()},
        acceptance_by_depth=[0.75, 0.5],
        rounds_by_tokens=[0.25, 0.25, 0.5],
        time={"parts": {part: {"ms_per_round": time} for part, time in times.items()}},
        deviations={"accepted_length": 0.2},
    )
    for name, value in QUANTITIES.items():
        found = paper_tables.quantity(name).of([run, finished("coolsd")])
        expected = [np.nan if value is None else value, np.nan]
        assert found.tolist() == pytest.approx(expected, abs=1e-3, nan_ok=True), name
    run.metrics["acceptance_rate"]["value"] = 1.0
    assert paper_tables.quantity("walltime").of([run])[0] == pytest.approx(2 / 1.25)  # its limit
