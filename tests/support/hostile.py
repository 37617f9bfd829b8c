"""Give the scripts hostile input: every option with every hostile value, every file that they read
with every damage.

    python tests/support/hostile.py [--all | --sample N] [--seed S] [--jobs N] [WORD ...]

A case passes if it ends in one sentence that names the option or the file, with status 1 and
nothing half-written, or if it runs. WORDs choose the cases that hold all of them. Ends with status
1 if a case is at fault.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "src")]

import hostile_files  # noqa: E402
import hostile_options  # noqa: E402
from hostile_process import Case, outcomes, shown, summary, warm  # noqa: E402


def every_case() -> list[Case]:
    """All cases, always in the same order."""
    return [*hostile_options.cases(), *hostile_files.cases()]


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """A fixed choice among the cases."""
    return random.Random(seed).sample(list(cases), min(count, len(cases)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of a case's line")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--sample", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--tracebacks", action="store_true", help="show tracebacks whole")
    parser.add_argument("--verbose", action="store_true", help="show every answer")
    given = parser.parse_args()
    warm()
    cases = [case for case in every_case() if all(word in str(case) for word in given.words)]
    if not given.all:
        cases = sample(cases, given.sample, given.seed)
    if given.list:
        print(*cases, f"{len(cases)} cases", sep="\n")
        return
    ended, causes = [], Counter[str]()
    for case, outcome in outcomes(cases, given.jobs):
        ended.append((case, outcome))
        last = outcome.err.strip().splitlines()[-1:] or [""]
        if given.verbose or outcome.faults:
            print(f"{'FAULT' if outcome.faults else outcome.status} {outcome.seconds:.1f}s {case}")
            print(f"      {'; '.join(outcome.faults)} | {shown(last[0])[:300]}", flush=True)
        if outcome.faults:
            causes[f"{outcome.faults[0]}: {shown(last[0])[:100]}"] += 1
            if given.tracebacks and "a traceback" in outcome.faults:
                print(outcome.err)
    print(summary(ended))
    for cause, count in causes.most_common():
        print(f"{count:5} {cause}")
    sys.exit(bool(causes))


if __name__ == "__main__":
    main()
