"""The command line as a person types it, in this process, up to what the configuration decides:
sentences, help, directories of one's own, and where things are written.
"""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from cases import slow_but
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf
from paths import CONF, ROOT

from tempera.config.cli import Job, goes_on
from tempera.config.compose import given
from tempera.config.parts import Parts
from tempera.config.search import SHIPPED
from tempera.errors import TemperaError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in an empty directory: (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def call(line: str, *more: str) -> tuple[int, str, str]:
        script, *arguments = [*line.split(), *more]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            SHIPPED.use()
        return status, *capsys.readouterr()

    return call


def write_own(directory: Path) -> None:
    """A method of one's own, with a rule that adds the option `boost`."""
    files = {
        "method/mine": "# Accepts more, for $1 (Mine et al. 2026).\n# See below.\n"
        "defaults: [/drafter: eagle, /tree: chain, /rule: mine]\n",
        "rule/mine": "boost: 1.0  # of mine\nrule: {_target_: tempera.rules.standard.Relaxed}\n"
        "schedule: {_target_: tempera.rules.schedules.uniform, delta: '${boost}'}\n",
    }
    for name, text in files.items():
        file = directory / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{text}")


SENTENCES = {
    "eval/run.py metrics.names=[fid]": "it belongs to metrics=real",
    "eval/run.py model=llamagen": "llamagen_l_c2i? The choices are anole, emu3",
    "eval/run.py model=lumina revision=3 weights=random": "error: `revision=3` only applies to",
    "eval/run.py method=coolsd delta=0 metrics=none tracking=none": "give a number above 0 (papers",
    "eval/run.py prompt=a large red star": "cannot read 'large': write options as name=value",
    "train_draft/main.py --epochs 3": "cannot read --epochs: write options as name=value",
    "eval/bench.py batch_sizes=[true]": "true and false are not numbers",
    "eval/run.py --config-dir own method=mine boos=2": "did you mean `boost`?",
    "eval/run.py --config-dir own method=eagle boost=2": "it belongs to rule=mine",
    "eval/run.py -m seed=range(0,1000000)": "at most 2,000 jobs",
    "eval/run.py -m experiment=frontier_continuous method=eagle2": "no case of this preset",
    "eval/run.py -cd shadow": "has the same name as a configuration in",
    "eval/run.py -cp absent": "absent",
    "eval/tune.py method=coolsd": "`method` cannot be chosen: leave it out",
    "eval/run.py method=eagle draft=mine": "`draft` cannot be chosen with method=eagle: "
    "leave it out, or give `model.draft`",
    "eval/score.py runs=one,two": "gives several values: write runs=[one,two] for a list, add -m",
    "eval/run.py experiment=[debug,lumina2_readme]": "a run takes one experiment, but exp",
    "eval/run.py -m rule=[exact,relaxed] method=eagle": "-m rule=A,B for one run of each",
    "eval/run.py model=[shapes]": "give model=CHOICE",
    "eval/run.py weights=random tracking=none": "model=shapes comes with its weights",
}
"""Command lines, and what their sentence says."""


@pytest.mark.parametrize("line", SENTENCES)
def test_a_sentence_tells_what_to_do(line: str, run: Run, tmp_path: Path) -> None:
    write_own(tmp_path / "own")
    (tmp_path / "shadow" / "rule").mkdir(parents=True)
    (tmp_path / "shadow" / "rule" / "exact.yaml").touch()
    status, _, err = run(line)
    assert status == 1
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert SENTENCES[line] in err, err


def test_a_draft_that_is_not_there_is_told_beside_the_files_to_fetch(run: Run) -> None:
    status, _, err = run("eval/run.py model=lumina method=coolsd tracking=none")
    first, *commands = err.splitlines()
    assert status == 1 and "train_draft/main.py model=lumina" in first
    assert len(commands) == 3 and all(line.startswith("  hf download ") for line in commands)


def test_a_refused_run_leaves_no_directory(run: Run) -> None:
    assert run("eval/run.py method=coolsd delta=abc metrics=none tracking=none")[0] == 1
    assert list(Path("outputs").rglob("*.yaml")) == []
    kept = Path("kept")
    kept.mkdir()
    (kept / "run.json").touch()
    assert (
        run("eval/run.py method=coolsd delta=abc metrics=none tracking=none hydra.run.dir=kept")[0]
        == 1
    )
    assert (kept / "run.json").exists()


@pytest.mark.parametrize("own", ["notes.log", "run.log", ".hydra/mine.yaml", "old/config.yaml"])
def test_what_lay_in_a_directory_before_a_refused_run_stays(own: str, run: Run) -> None:
    mine = Path("here") / own
    mine.parent.mkdir(parents=True)
    mine.touch()
    run("eval/run.py method=coolsd delta=abc metrics=none tracking=none hydra.run.dir=here")
    assert mine.exists()


def test_a_log_file_that_cannot_be_opened_is_told(run: Run, tmp_path: Path) -> None:
    """As in a finished run on a disk that may only be read."""
    (tmp_path / "there/eval.log").mkdir(parents=True)
    status, _, err = run("eval/run.py method=ar hydra.run.dir=there")
    assert status == 1 and "there/eval.log': Is a directory; give another" in err


def test_help_shows_the_options_of_the_chosen_groups(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("eval/run.py --help method=coolsd")
    assert status == 0
    for option in ("delta: 2", "guidance: 1.1", "data:\n  limit: 64", "nu: 0.7"):
        assert f"\n{option}\n" in out, out
    assert "\nwindow: " not in out
    assert "\nar              Plain autoregression: no draft, one token per round.\n" in out
    write_own(tmp_path / "own")
    status, out, _ = run("eval/run.py -cd own method=mine --help")
    assert status == 0 and "\nboost: 1.0\n" in out and "mine, mixture" in out
    assert "\nmine            Accepts more, for $1 (Mine et al. 2026).\n" in out


@pytest.mark.parametrize("flag", slow_but(["--config-path", "-cp"], "-cp"))
def test_a_copy_of_conf_is_used_for_everything(flag: str, run: Run, tmp_path: Path) -> None:
    """Its methods are known to sentences, help and names."""
    own = tmp_path / "own"
    shutil.copytree(CONF, own)
    write_own(own)
    relaxed = own / "rule" / "relaxed.yaml"
    relaxed.write_text(relaxed.read_text().replace("delta: 2", "delta: 1.5"))
    status, _, err = run(f"eval/run.py {flag} own method=mine boos=2")
    assert status == 1 and "did you mean `boost`?" in err
    status, out, err = run(f"eval/run.py {flag} own method=coolsd --help")
    assert status == 0 and "\ndelta: 1.5\n" in out, err


@pytest.mark.parametrize(
    ("line", "usual"),
    [
        ("eval/run.py method=coolsd delta=3 schedule=linear", 2),
        ("eval/run.py -m method=eagle,coolsd depth=3 hydra.sweep.dir=s", 2 + 2 * 2),
    ],
)
def test_hydra_alone_composes(
    line: str, usual: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run twice: for its mode and for itself; a sweep so too, and each job once more before the
    first begins.
    """
    composed: list[list[str]] = []
    load = ConfigLoaderImpl.load_configuration

    def counted(self: Any, config_name: str, overrides: list[str], *rest: Any, **more: Any) -> Any:
        composed.append(overrides)
        return load(self, config_name, overrides, *rest, **more)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    status, _, err = run(
        f"{line} data.limit=1 speed.prompts=0 metrics=none tracking=none replays=0"
    )
    assert status == 0, err
    assert len(composed) == usual


def test_names_of_runs_see_directories_of_ones_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    shutil.copytree(CONF, own)
    write_own(own)
    relaxed = own / "rule" / "relaxed.yaml"
    relaxed.write_text(relaxed.read_text().replace("delta: 2", "delta: 1.5"))
    found: list[Any] = []

    def main(cfg: Any) -> None:
        found.append(Parts.of(cfg).changes(given(cfg)))

    monkeypatch.setattr("tempera.commands.evaluate.main", main)
    for line in ("method=coolsd", "method=mine boost=3", "method=mine rule=exact"):
        status, _, err = run(f"eval/run.py -cp own {line}")
        assert status == 0, err
    assert found == [{}, {"boost": 3}, {"rule": "exact"}]


@pytest.mark.parametrize(
    ("line", "places"),
    [
        ("eval/run.py experiment=frontier", ["/data/zz/frontier/"]),
        ("eval/report.py runs=a", ["/data/zz/report"]),
        ("eval/run.py", ["/data/zz/eval/"]),
        ("train_draft/main.py", ["/data/zz/train_draft/shapes"]),
        ("train_draft/prepare.py", ["/data/zz/codes/"]),
    ],
)
def test_outputs_moves_everything(line: str, places: list[str], run: Run) -> None:
    status, out, err = run(f"{line} outputs=/data/zz hydra.job.num=0 --cfg all --resolve")
    assert status == 0, err
    for place in places:
        assert place in out
    written = [part for part in out.split() if part.startswith("outputs/")]
    assert written == []


def test_a_job_that_fails_does_not_stop_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def main(cfg: Any) -> None:
        begun.append(cfg.choices.method)
        if cfg.choices.method == "sjd":
            raise TemperaError("this one cannot be")
        if cfg.choices.method == "scd":
            raise KeyError("lost")

    monkeypatch.setattr("tempera.commands.evaluate.main", main)
    status, _, err = run("eval/run.py -m method=ar,sjd,scd,jacobi hydra.sweep.dir=a tracking=none")
    assert begun == ["ar", "sjd", "scd", "jacobi"] and status == 1
    assert "Error executing job" not in err
    first, reason, second, bug, last = err.splitlines()
    assert first.startswith("failed: python ") and "method=sjd" in first
    assert first.endswith(f"hydra.run.dir={Path('a/1').resolve()}")
    assert reason.strip() == "this one cannot be" and "method=scd" in second and "KeyError" in bug
    assert last == "error: 2 of 4 jobs failed: see above"


def test_all_jobs_of_a_sweep_are_checked_before_the_first_begins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("tempera.commands.evaluate.main", lambda cfg: begun.append(cfg.delta))
    line = "eval/run.py -m method=coolsd tracking=none hydra.sweep.dir=a device=cuda delta="
    status, _, err = run(f"{line}1.1,0,abc")
    assert status == 1 and begun == [] and not Path("a").exists()
    first, zero, text = err.splitlines()
    assert first == "error: 2 of 3 jobs cannot run, so none was started:"
    assert "delta=0: delta=0 is not a relaxation budget" in zero
    assert "delta=abc: `delta=abc` is not valid" in text
    assert run(f"{line}1.1,2")[0] == 0 and begun == [1.1, 2]  # the GPU may be elsewhere


CHECKED = [
    ("eval/run.py -m method=ar data.limit=8 replays=2,-1", "`replays=-1` is not valid"),
    ("eval/run.py -m method=coolsd expected_length=2,99", "expected_length=99 is not valid"),
    (
        "train_draft/main.py -m training.lr=1e-3,abc device=cuda",
        "`training.lr=abc` is not valid",
    ),
    ("train_draft/main.py -m training.steps=1,-1", "`training.steps=-1` is not valid"),
    (
        "train_draft/main.py -m training.mixed_precision=auto,x device=cuda",
        "`training.mixed_precision=x` is",
    ),
    ("train_draft/prepare.py -m source.limit=1,-1", "`source.limit=-1` is not valid"),
    ("train_draft/prepare.py -m shard_size=1,a", "`shard_size=a` is not valid"),
    (
        "train_draft/main.py -m draft=eagle,parallel training.ttt_steps=1",
        "training.ttt_steps=1 has no effect",
    ),
    ("train_draft/prepare.py -m model=shapes,shapes_mar", "encodes images as discrete tokens"),
    ("eval/run.py -m metrics=real metrics.names=[fid],[fud]", "there is no metric fud"),
    (
        "eval/run.py -m torchmetrics=ssim torchmetrics.ssim.kind=picture,x",
        "`torchmetrics.ssim.kind=x` is not valid",
    ),
    ("eval/bench.py -m batch_sizes=[1],[0]", "`batch_sizes=[0]` is not valid"),
    ("eval/bench.py -m method=eagle,ar", "choose another method, such as method=eagle"),
    ("eval/tune.py -m budget=none,foo", "budget=foo is not a budget"),
    ("eval/tune.py -m trees=[mc_sim_7b_63],[a]", "there is no draft tree 'a'"),
    ("eval/tune.py -m images=1,0", "`images=0` is not valid"),
]
"""Command lines of two jobs, and what is wrong with one."""


@pytest.mark.parametrize(
    ("line", "reason"),
    slow_but(CHECKED, *{line.split()[0]: (line, reason) for line, reason in CHECKED}.values()),
)
def test_the_options_of_a_command_are_checked_before_its_first_job(
    line: str, reason: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    for command in ("evaluate", "train", "prepare", "bench", "tune"):
        monkeypatch.setattr(f"tempera.commands.{command}.main", begun.append)
    status, _, err = run(f"{line} tracking=none hydra.sweep.dir=a")
    assert (status, begun, Path("a").exists()) == (1, [], False)
    assert "1 of 2 jobs cannot run, so none was started" in err and reason in err


def test_a_job_that_lacks_an_option_of_the_others_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(
        "tempera.commands.evaluate.main", lambda cfg: begun.append([cfg.delta, cfg.get("nu")])
    )
    line = "eval/run.py -m tracking=none hydra.sweep.dir=a method=coolsd"
    status, _, err = run(f"{line} schedule=exponential,uniform nu=0.5")
    assert (status, begun) == (1, [])
    first, uniform, advice = err.splitlines()
    assert first == "error: 1 of 2 jobs cannot run, so none was started:"
    assert uniform.startswith("  schedule=uniform: there is no option `nu`")
    assert "hydra.sweeper.cases=" in advice
    cases = 'hydra.sweeper.cases=["schedule=exponential nu=0.5","schedule=uniform"]'
    assert run(line, cases)[0] == 0 and begun == [[2, 0.5], [2, None]]


@pytest.mark.parametrize("names", [("a", "a"), ("b", "a")])
def test_defaults_in_a_circle_are_told(names: tuple[str, str], run: Run) -> None:
    place = Path("own/method")
    place.mkdir(parents=True)
    for file, name in zip(("a", "b"), names, strict=True):
        (place / f"{file}.yaml").write_text(f"defaults: [{name}]\n")
    status, _, err = run("eval/run.py -cd own method=a")
    assert status == 1 and "refer to each other in a circle" in err and "bug" not in err


def test_the_main_process_alone_writes_the_runs_log(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempera.commands.evaluate.main", lambda _: None)
    monkeypatch.setattr("tempera.config.cli.started_as_main", lambda: False)
    assert run("eval/run.py tracking=none hydra.run.dir=shared")[0] == 0
    assert [path.name for path in Path("shared").iterdir()] == [".hydra"]


def test_a_job_can_be_sent_to_another_process() -> None:
    """As submitit and joblib do, which send what is not a module's by its value."""
    job = Job("eval", lambda cfg: cfg.delta, SHIPPED, None)
    sent = cloudpickle.loads(cloudpickle.dumps(job))
    assert (sent.config_name, sent.directories) == ("eval", SHIPPED)
    assert sent.main(OmegaConf.create({"delta": 2})) == 2


EVERY = (
    "hydra.sweeper.max_batch_size=1 hydra/sweeper=basic hydra.job.chdir=false launcher=local "
    "directory=elsewhere optimized_metric=accepted_length expected_length=null "
)
"""Options of Hydra and of conf/eval.yaml whose values only a run resolves, or that are null."""


@pytest.mark.parametrize(
    ("methods", "options"),
    [
        ("cspd,cspd_exact", EVERY + "hydra.sweep.subdir=abc_${hydra:job.num}"),
        ("cspd,cspd_exact", EVERY + "hydra.sweep.subdir=${hydra.job.override_dirname}"),
        ("choice(cspd,cspd_exact)", "gamma=3"),
        ("glob(cspd*)", "gamma=3"),
    ],
)
def test_a_sweep_over_methods_takes_every_option(
    methods: str, options: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(
        "tempera.commands.evaluate.main", lambda cfg: begun.append(cfg.choices.method)
    )
    line = f"eval/run.py -m model=shapes_mar method={methods} tracking=none hydra.sweep.dir=a"
    status, _, err = run(line, *options.split())
    assert (status, begun) == (0, ["cspd", "cspd_exact"]), err


@pytest.mark.parametrize(
    ("script", "command", "options", "named"),
    [
        ("train_draft/prepare.py", "prepare", "source=imagefolder,parquet source.path=x", "source"),
        ("eval/run.py", "evaluate", "method=eagle rule=relaxed,lantern delta=0.5", "delta"),
    ],
)
def test_a_sweep_over_any_group_takes_the_options_of_its_choices(
    script: str, command: str, options: str, named: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(
        f"tempera.commands.{command}.main", lambda cfg: begun.append(str(cfg[named]))
    )
    status, _, err = run(f"{script} -m {options} tracking=none hydra.sweep.dir=a")
    value = options.rpartition("=")[2]
    assert status == 0 and len(begun) == 2 and all(value in one for one in begun), err


def test_a_launchers_own_options_reach_it_in_a_sweep_over_methods(run: Run) -> None:
    line = (
        "eval/run.py -m method=ar,coolsd launcher=slurm hydra.launcher.partition=gpu data.limit=1"
    )
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if shutil.which("srun"):
        pytest.skip("this machine has Slurm")
    status, _, err = run(f"{line} tracking=none hydra.sweep.dir=a")
    assert status == 1 and "srun" in err and err.count("\n") == 1, err


@pytest.mark.slow
def test_a_launcher_runs_a_sweep_over_methods(tmp_path: Path) -> None:
    """Submitit's does in tests/integration/test_several_processes.py."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = "launcher=joblib hydra.launcher.n_jobs=2"
    line = f"-m method=ar,coolsd data.limit=1 metrics=none speed.prompts=0 tracking=none {launcher}"
    command = [sys.executable, str(ROOT / "eval/run.py"), *line.split(), "hydra.sweep.dir=a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("a/*/metrics.json"))) == 2


NO_JOBS = [
    ("experiment=frontier,coolsd_table1", "experiment=coolsd_table1: the jobs of a sweep"),
    ("experiment=coolsd_table1,coolsd_table2", "share one hydra.sweeper"),
    ("experiment=glob(coolsd_*) seed=0,1", "share one hydra.sweeper"),
    ("experiment=choice(debug,evidence) method=ar", "experiment=evidence: the jobs of a sweep"),
    ("launcher=local,slurm method=ar", "launcher=slurm: the jobs of a sweep share"),
    ("hydra.sweeper.cases=['experiment=coolsd_table1','method=ar']", "share one hydra.sweeper"),
]
"""Presets and launchers that say how a sweep runs, and what is told of them."""


@pytest.mark.parametrize(("options", "wrong"), slow_but(NO_JOBS, NO_JOBS[0], NO_JOBS[4]))
def test_a_preset_that_is_a_sweep_is_not_one_job_of_another(
    options: str, wrong: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr("tempera.commands.evaluate.main", begun.append)
    status, _, err = run(f"eval/run.py -m {options} tracking=none hydra.sweep.dir=a")
    assert (status, begun, Path("a").exists()) == (1, [], False)
    assert wrong in err, err


def test_presets_without_cases_are_swept_each_in_its_directory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr("tempera.commands.evaluate.main", lambda cfg: begun.append(cfg.data.limit))
    status, _, err = run("eval/run.py -m experiment=debug,frontier tracking=none method=ar")
    assert (status, begun) == (0, [1, 256]), err
    assert Path("outputs/frontier").is_dir()


def test_a_family_of_ones_own_is_one_file(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "own" / "family"
    own.mkdir(parents=True)
    text = (CONF / "family" / "other.yaml").read_text()
    (own / "mine.yaml").write_text(text.replace("data: file", "data: parti"))
    status, out, err = run("eval/run.py -cd own family=mine --cfg hydra")
    assert status == 0, err
    assert "data: parti" in out and "metrics: none" in out


def test_the_command_that_goes_on_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "eval" / "run.py")
    monkeypatch.setattr(sys, "argv", [script, "prompt=a b", "hydra.run.dir=old"])
    line = goes_on("hydra.run.dir", "new dir").partition("to resume: ")[2]
    assert line == f"python {script} 'prompt=a b' 'hydra.run.dir=\"new dir\"'"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tempera-eval"])
    assert "to resume: /usr/bin/tempera-eval hydra.run.dir=x" in goes_on("hydra.run.dir", "x")


def test_what_holds_on_a_machine_is_one_file(run: Run, tmp_path: Path) -> None:
    """Its options and choices are defaults of every command; the command line comes after them."""
    own = tmp_path / "own" / "local"
    own.mkdir(parents=True)
    (own / "default.yaml").write_text(
        "# @package _global_\ndefaults: [{override /tracking: none}]\noutputs: /data/zz\nseed: 5\n"
    )
    for line in ("eval/run.py", "train_draft/main.py", "eval/tune.py"):
        status, out, err = run(f"{line} -cd own --cfg job")
        assert status == 0, err
        assert "outputs: /data/zz" in out and "seed: 5" in out and "no_tracker" in out
    assert "seed: 6" in run("eval/run.py -cd own seed=6 --cfg job")[1]
    (own / "default.yaml").write_text("outputs: /data/zz\n")
    dry = "method=ar prompt=x dry_run=true tracking=none device=cpu"
    status, _, err = run(f"eval/run.py -cd own {dry}")
    assert status == 1 and "local/default.yaml sets nothing: begin it with the line" in err


def test_a_sweeper_sees_the_metric_that_is_optimised(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    call = Job.__call__

    def kept(self: Job, cfg: Any) -> object:
        seen.append(call(self, cfg))
        return seen[-1]

    monkeypatch.setattr(Job, "__call__", kept)
    monkeypatch.setattr("tempera.commands.evaluate.run", lambda *_: {"kl_per_token": 0.25})
    line = "eval/run.py tracking=none hydra.run.dir=a optimized_metric="
    assert run(f"{line}kl_per_token")[0] == 0 and seen == [0.25]
    status, _, err = run(f"{line}fid")
    assert status == 1 and "give one of kl_per_token" in err


def test_a_sweep_does_not_begin_without_the_files_of_its_metrics(run: Run) -> None:
    line = "-m method=ar,eagle metrics=real metrics.names=[clip] tracking=none hydra.sweep.dir=s"
    status, out, err = run(f"eval/run.py {line} data.limit=1 speed.prompts=0")
    assert status == 1
    assert err.startswith("error: ") and "failed: " not in err, err
    assert "hf download" in err and err.count("hf download") == 1
    assert not list(Path("s").rglob("run.json")) and "decoding" not in out
