"""Processor time of a whole command in two checkouts, in turn (docs/notes/2026-11.md).

    git worktree add ../earlier COMMIT
    python docs/pairs.py [--turns 3] ../earlier SCRIPT [OPTION ...]

runs `python SCRIPT OPTION ...` in the earlier checkout and in this one, which take turns in being
the first, with one thread and W&B offline. SCRIPT is a path in both checkouts, such as eval/run.py;
what it writes goes to a temporary directory. The table has the seconds of processor time, in user
and system mode, of each turn's two processes, and of the pairs the median ratio with the least and
the largest.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from argparse import REMAINDER, ArgumentParser
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def seconds(checkout: Path, command: list[str]) -> float:
    """Processor time of a command in a checkout. Ends with its output if it fails."""
    environment = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        ran = subprocess.run(
            [sys.executable, checkout / command[0], *command[1:]],
            cwd=directory,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise SystemExit(f"{checkout}: {ran.stdout}{ran.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure what the command line asks for."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("command", nargs=REMAINDER)
    asked = parser.parse_args()
    earlier = asked.earlier.resolve()
    ratios = []
    print("| turn | earlier, s | now, s | ratio |\n|---|---|---|---|", flush=True)
    for turn in range(asked.turns):
        order = [earlier, HERE] if turn % 2 == 0 else [HERE, earlier]
        spent = {checkout: seconds(checkout, asked.command) for checkout in order}
        ratios.append(spent[HERE] / spent[earlier])
        print(
            f"| {turn + 1} | {spent[earlier]:.1f} | {spent[HERE]:.1f} | {ratios[-1]:.2f} |",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})")


if __name__ == "__main__":
    main()
