"""What commands print where the output takes no UTF-8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from report_runs import RUNS, made_up_runs

SMALL = "data.limit=1 metrics=none speed.prompts=0 replays=0 tracking=none device=cpu"
COMMANDS = {
    "tempera-env": ("tempera's cache:", 0),
    f"tempera-eval method=coolsd {SMALL} hydra.run.dir=δ": ("verbose=true prints", 0),
    f"tempera-eval method=coolsd {SMALL} dry_run=true": ("memory: ", 0),
    f"tempera-eval -m method=ar,coolsd {SMALL} hydra.sweep.dir=a": ("\\u03b4=2", 0),
    "tempera-eval --help method=coolsd": ("\\u03b4", 0),
    "tempera-eval prompt=δ data.limit=δ": ("error: ", 1),
    "tempera-report runs=δ/runs": ("report.html", 0),
    "tempera-bench method=coolsd repeats=1 batch_sizes=[1] tracking=none": ("speed-up", 0),
    "tempera-tune dry_run=true tracking=none": ("to do: ", 0),
    "tempera-train model=shapes dry_run=true tracking=none": ("memory: ", 0),
    "tempera-prepare source=shapes source.limit=2 dry_run=true": ("to do: ", 0),
}
"""Commands, what stands near the end of their output, and their exit status."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "line"),
    [*(("ascii", line) for line in COMMANDS), ("latin-1", "tempera-report runs=δ/runs")],
)
def test_output_that_takes_no_utf_8_keeps_all_that_is_said(
    encoding: str, line: str, tmp_path: Path
) -> None:
    made_up_runs(tmp_path / "δ" / "runs", RUNS[:3], prompts=2)
    told, status = COMMANDS[line]
    name, *arguments = line.split()
    command = Path(sys.executable).with_name(name)
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, env=environment)
    out = (done.stdout + done.stderr).decode(encoding)
    assert done.returncode == status, out
    assert told.encode(encoding, "backslashreplace").decode(encoding) in out or told in out, out
    assert "UnicodeEncodeError" not in out


def test_letters_are_escaped_and_bytes_of_file_names_stay(tmp_path: Path) -> None:
    code = (
        "import os; from tempera.runtime.terminal import take_all_text; take_all_text()\n"
        "print('δ = 2 →', os.fsdecode(b'b\\xfccher'))"
    )
    for encoding, expected in {
        "ascii": b"\\u03b4 = 2 \\u2192 b\xfccher",
        "latin-1": b"\\u03b4 = 2 \\u2192 b\xfccher",
        "utf-8": "δ = 2 → ".encode() + b"b\xfccher",
        "ascii:replace": b"? = 2 ? b?cher",
    }.items():
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert run.stdout.strip() == expected, run.stderr


def test_scripts_of_a_checkout_print_too(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(ROOT / "eval/run.py"), "--help", "method=coolsd"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "\\u03b4" in done.stdout, done.stderr
