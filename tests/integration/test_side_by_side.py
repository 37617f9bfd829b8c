"""Sweeps of experiments run side by side, one thread each, unless the command line says
otherwise.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from paths import CONF, ROOT

from tempera.config.instantiate import jobs


@pytest.mark.parametrize(
    ("options", "launcher"),
    [
        ([], "basic"),
        (["experiment=frontier"], "side_by_side"),
        (["experiment=coolsd_table3"], "side_by_side"),
        (["experiment=frontier", "launcher=local"], "basic"),
        (["launcher=joblib"], "side_by_side"),
    ],
)
def test_which_launcher(options: list[str], launcher: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("eval", [*options, "device=cpu"], return_hydra_config=True)
    assert cfg.hydra.runtime.choices["hydra/launcher"] == launcher
    if launcher == "side_by_side":
        assert cfg.hydra.launcher.n_jobs == jobs("cpu") >= 1


@pytest.mark.slow
def test_a_sweep_side_by_side(tmp_path: Path) -> None:
    """Two processes, whatever the cores; a wrong option in one is told in one sentence."""
    command = [sys.executable, str(ROOT / "eval" / "run.py"), "-m", "experiment=frontier"]
    short = ["limit=1", "speed.prompts=0", "metrics=none", "tracking=none", "diagnostics=false"]
    side = ["hydra.launcher.n_jobs=2"]
    environment = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    done = subprocess.run(
        [*command, "method=ar,eagle", *short, *side],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2/2 runs · 2 images" in done.stdout
    assert "generating" not in done.stdout
    found = list((tmp_path / "outputs" / "frontier").glob("*/metrics.json"))
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in found]
    assert {content["settings"]["method"] for content in contents} == {"ar", "eagle"}
    wrong = subprocess.run(
        [*command, "method=uniform_rsd", "delta=-1,2", *short, *side],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 1
    assert "error: delta=-1 is not a relaxation budget" in wrong.stderr
