"""Compare runs of eval/run.py: results.csv, report.md, a Pareto plot and a comparison of pictures;
--publish makes a W&B report.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tempera.errors import main_guard
from tempera.reporting.report import collect, find_runs, write_report
from tempera.reporting.wandb_report import publish


@main_guard
def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Write the report and return its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="run directories, or directories that hold some, such as a sweep's",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/report"),
        help="where to write (default: %(default)s)",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="also make a W&B report; needs wandb-workspaces and a login",
    )
    parser.add_argument("--project", default="tempera", help="W&B project (default: %(default)s)")
    parser.add_argument("--entity", help="W&B entity (default: yours)")
    options = parser.parse_args(arguments)
    finished, unfinished = find_runs(options.directories)
    rows = collect(finished)
    files = write_report(rows, options.output, unfinished)
    for file in files:
        print(file)
    if options.publish:
        print(publish(rows, options.output, options.project, options.entity))
    return files


if __name__ == "__main__":
    main()
