"""Run a command of README or docs/ in this process, shortened for a test."""

import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class
from paths import ROOT

from tempera.reporting import figures

QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
SHORT = {  # what makes a command short enough for a test; the set-up commands run whole in .ci/run
    "eval/run.py": [
        *("data.limit=1", "speed.prompts=0", "metrics=none", "tracking=none", "launcher=local"),
        *("matching.prompts=1", "matching.tolerance=9"),
        *QUIET,
    ],
    "eval/score.py": [],
    "eval/export.py": [],
    "eval/report.py": [],
    "eval/bench.py": ["repeats=1", "batch_sizes=[1]", "tracking=none", *QUIET],
    "eval/gpu_check.py": ["models=[lumina]", "of_layouts=[ar]", *QUIET],
    "eval/tune.py": [
        *("data.limit=1", "images=1", "timed=1", "repeats=1", "runs=1", "depths=[2]", "trees=[]"),
        *("prices=[1.0]", "deltas=[2.0]", "metrics=none", "tracking=none"),
        *QUIET,
    ],
    "train_draft/main.py": [
        *(
            "training.steps=1",
            "training.batch_size=2",
            "training.warmup_steps=0",
            "training.holdout=2",
            "training.decodes=1",
        ),
        *("training.validate_every=1", "training.checkpoint_every=1", "tracking=none"),
        *QUIET,
    ],
    "train_draft/prepare.py": ["tracking=none", *QUIET],
}


def shortened(script: str, arguments: list[str]) -> list[str]:
    """The options of a quick run: of a sweep the first value only, and the command's own
    metrics.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    short = [
        option for option in SHORT[script] if option != "metrics=none" or "metrics" not in given
    ]
    if "expected_length" not in given and "-m" not in arguments:
        short = [option for option in short if not option.startswith("matching.")]
    if "budget" not in given:
        short = [option for option in short if not option.startswith(("prices=", "deltas="))]
    if any("shapes_mar" in one or "continuous" in one for one in arguments):
        short = [*short, "denoising_steps=2"]
    taken = {option.partition("=")[0] for option in short}
    kept = []
    for argument in arguments:
        name, separator, values = argument.partition("=")
        if not separator or name not in taken:
            swept = "-m" in arguments and " " not in values and "[" not in values
            kept.append(argument.partition(",")[0] if swept else argument)
    return [*kept, *short]


def run(command: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Only the first job of a table is checked and runs (test_paper_tables.py composes the others),
    figures of a run are not drawn, and nothing is compiled.
    """
    sweeper: Any = get_class("hydra_plugins.tempera_cases.CaseSweeper")  # an import may be older
    checked = sweeper._checked
    monkeypatch.setattr(sweeper, "_checked", lambda self, jobs: checked(self, jobs[:1]))
    monkeypatch.setattr(figures, "grid", lambda *_: None)
    monkeypatch.setattr(figures, "acceptance", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    _, script, *arguments = shlex.split(command)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", [script, *more, *shortened(script, arguments)])
    runpy.run_path(str(ROOT / script), run_name="__main__")
