"""What a tracked run records of its configuration."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from paths import ROOT
from sent_runs import SentRun
from tiny_evaluation import tiny_options

from tempera.config.tracking import Tracking
from tempera.runtime import tracking

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.mark.parametrize(
    ("script", "options"),
    [("eval", ["method=coolsd", "delta=2"]), ("train_draft", ["training.ttt_steps=3"])],
)
def test_the_whole_resolved_configuration_is_recorded(
    script: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(script, ["tracking=none", *options])
    taken: dict[str, Any] = {}

    def record(*, directory: Path, **settings: Any) -> tracking.Tracker:
        taken.update(settings)
        return tracking.Tracker()

    monkeypatch.setattr(tracking, "no_tracker", record)
    experiment = "study" if script == "eval" else None
    choices = {"model": "shapes", "experiment": experiment, "hydra/launcher": "basic"}
    choices |= {"method": None} if script == "eval" else {}
    typed = [*options, "model=shapes", *["data.limit=3", "verbose=true"] * bool(experiment)]
    Tracking.of(cfg, script, choices, typed).start(tmp_path, {"machine": "this one"})
    assert (taken["job_type"], taken["group"]) == (script, experiment or "shapes")
    chosen = ["model=shapes", *["experiment=study"] * bool(experiment)]
    others = [one for one in typed if one.partition("=")[0] not in choices]
    assert taken["tags"] == [*chosen, *others]
    assert taken["name"] is None
    config = taken["config"]
    recorded = OmegaConf.create(config)
    assert config["machine"] == "this one"
    assert config["model"]["name"] == "shapes"
    assert "${" not in str(config)
    assert not {"directory", "choices", "overrides", "tracking"} & config.keys()
    for option in options:
        name, _, value = option.partition("=")
        assert name == "method" or str(OmegaConf.select(recorded, name)) == value


@pytest.mark.slow
def test_the_runs_of_a_sweep_have_their_own_names_and_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And values, not references to them; a second sweep there is told from the first."""
    sent: list[SentRun] = []

    def start(**about: Any) -> SentRun:
        sent.append(SentRun(about))
        return sent[-1]

    monkeypatch.setattr("wandb.init", start)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red ring\n")
    tiny = [one for one in tiny_options(tmp_path) if not one.startswith(("tracking", "speed.p"))]
    given = [*tiny, "speed.prompts=0", "data=file", "data.path=mine.txt", "hydra.sweep.dir=s"]
    for delta in (["delta=1.1,2"], ["delta=3", "hydra.sweep.subdir=3"]):
        monkeypatch.setattr(sys, "argv", ["run.py", "-m", "method=coolsd", *delta, *given])
        runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
    names = [run.about["name"] for run in sent]
    assert all(name.startswith("coolsd drafter.path=") for name in names)
    assert [name.split()[-1] for name in names] == ["δ=1.1", "δ=2", "δ=3"]
    tags = [{*run.about["tags"]} for run in sent]
    assert tags[0] - tags[1] == {"delta=1.1"} and tags[1] - tags[0] == {"delta=2"}
    assert {"method=coolsd", "sweep=s"} <= tags[0] & tags[1]
    configs = [run.about["config"] for run in sent]
    configs += [json.loads(path.read_text()) for path in tmp_path.glob("s/*/run.json")]
    assert len(configs) == 6
    for config in configs:
        assert config["data"]["prompts"]["path"] == "mine.txt" and "${" not in str(config)
    told = capsys.readouterr().out
    assert told.count("from earlier sweeps in this directory") == 1
    assert f"from earlier sweeps in this directory: {names[0]}, {names[1]}\n" in told


@pytest.mark.slow
def test_a_job_after_a_failed_job_has_a_tracked_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With W&B itself, offline: its `init` returns a run that is still open."""
    monkeypatch.chdir(tmp_path)
    tiny = [one for one in tiny_options(tmp_path) if not one.startswith(("tracking", "speed.p"))]
    given = ["speed.prompts=0", "tracking.mode=offline", "hydra.sweep.dir=s", "depth=2"]

    def sweep(limit: int) -> int:
        line = ["run.py", "-m", "method=coolsd", "delta=1.1,2", *tiny, *given]
        monkeypatch.setattr(sys, "argv", [*line, f"data.limit={limit}"])
        try:
            runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert sweep(2) == 0
    (part,) = (tmp_path / "s/0/records").glob("*.parquet")
    pq.write_table(pq.read_table(part).drop_columns(["tokens"]), part)
    assert sweep(3) == 1
    told = capsys.readouterr().out
    for job, starts in ((0, 2), (1, 2)):
        runs = [*(tmp_path / f"s/{job}/wandb").glob("offline-run-*")]
        assert len(runs) == starts
        assert all(f"/s/{job}/wandb/{run.name}\n" in told for run in runs)
