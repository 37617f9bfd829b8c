"""Scripts run on hostile input: a forked child of one warm process for each case, and what must
hold of its answer.
"""

import contextlib
import ctypes
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from paths import ROOT

SECONDS = 20
"""Processor time that an answer may take; the libraries are imported already."""
PATIENCE = 90
"""Seconds by the clock, on a busy machine or for what waits forever."""
MEMORY = 6 << 30
"""Bytes that a case may take beyond those of the process it is forked from."""

Setup = Callable[[Path], None]


def nothing(directory: Path) -> None:
    """A case without files."""


@dataclass(frozen=True)
class Case:
    """One call of a script.

    Attributes:
        script: path of the script in the checkout.
        arguments: its command line.
        names: the sentence must hold one of these, such as the option or the file at fault.
        setup: fills the empty directory that the script runs in.
        endless: the script may go on working, until it is interrupted.
        space: bytes that a file may have, as with `ulimit -f`; None for any number.
        title: the case in words; its command line unless given.
        unprivileged: run without root's rights, to which every file is readable.
    """

    script: str
    arguments: tuple[str, ...]
    names: tuple[str, ...] = ()
    setup: Setup = nothing
    endless: bool = False
    space: int | None = None
    unprivileged: bool = False
    title: str = ""

    def __str__(self) -> str:
        return f"{self.script} {self.title or ' '.join(map(shown, self.arguments))}"


@dataclass
class Outcome:
    """How a case ended. status: the exit status, negative for a signal; None if it did not end."""

    status: int | None
    out: str
    err: str
    seconds: float
    faults: list[str] = field(default_factory=list)


def shown(argument: str) -> str:
    """An argument as a line of printable text of moderate length."""
    text = ascii(argument)[1:-1]
    return text if len(text) <= 90 else f"{text[:60]}…({len(argument)} characters)"


def warm() -> None:
    """Import what the scripts import, so that no case pays for it. No tensor is made here: its
    threads would not survive a fork.
    """
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true"
    )
    import accelerate  # noqa: F401
    import wandb  # noqa: F401

    import tempera.commands.bench
    import tempera.commands.build_shapes
    import tempera.commands.calibrate
    import tempera.commands.evaluate
    import tempera.commands.prepare
    import tempera.commands.report
    import tempera.commands.train
    import tempera.commands.tune
    import tempera.runtime.huggingface  # noqa: F401  first
    from tempera.runtime.torchvision import import_open_clip

    import_open_clip()
    torch.set_num_threads(1)


def outcomes(
    cases: Iterable[Case], jobs: int = 1, keep: Setup = nothing
) -> Iterator[tuple[Case, Outcome]]:
    """Every case with its outcome, in the order in which they end, `jobs` at a time. `keep` gets
    each directory before it is removed.
    """
    waiting, running = iter(cases), list[_Running]()
    while True:
        while len(running) < jobs and (case := next(waiting, None)):
            running.append(_Running(case))
        if not running:
            return
        for one in [one for one in running if one.ended()]:
            running.remove(one)
            yield one.case, one.outcome(keep)
        time.sleep(0.01)


class _Running:
    """A case under way, in a directory of its own."""

    def __init__(self, case: Case) -> None:
        self.case, self.status, self.interrupted = case, 0, False
        self.place = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.directory = self.place / "here"
        self.directory.mkdir()
        case.setup(self.directory)
        self.before = set(self.directory.rglob("*"))
        self.began, self.over = time.monotonic(), False
        sys.stdout.flush()
        sys.stderr.flush()
        self.child = os.fork()
        if self.child == 0:
            _be(case, self.place)

    def ended(self) -> bool:
        """Whether the child ended; one that works for too long is interrupted, then killed."""
        found, status, used = os.wait4(self.child, os.WNOHANG)
        if found:
            self.status = os.waitstatus_to_exitcode(status)
            self.used = used.ru_utime + used.ru_stime
            return True
        waited, worked = time.monotonic() - self.began, _processor_seconds(self.child)
        late = worked > SECONDS or waited > PATIENCE
        if self.case.endless and (worked > 5 or waited > 30) and not self.interrupted:
            os.kill(self.child, signal.SIGINT)
            self.interrupted, self.began = True, time.monotonic()
        elif late:
            os.kill(self.child, signal.SIGKILL)
            _, _, used = os.wait4(self.child, 0)
            self.over, self.used = True, used.ru_utime + used.ru_stime
            return True
        return False

    def outcome(self, keep: Setup = nothing) -> Outcome:
        """What the child left."""
        keep(self.directory)
        read = [(self.place / name).read_text("utf-8", "replace") for name in ("out", "err")]
        outcome = Outcome(None if self.over else self.status, *read, self.used)
        outcome.faults = list(faults(self.case, outcome, self.interrupted))
        outcome.faults += list(half_written(self.directory, self.before, outcome))
        for path in self.place.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(self.place, ignore_errors=True)
        return outcome


def _be(case: Case, place: Path) -> None:
    """The child: run the script as Python would, and end."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_CREAT | os.O_WRONLY, 0o666), number)
        os.close(0)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        _limit(case)
        os.chdir(place / "here")
        sys.argv = [str(ROOT / case.script), *case.arguments]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _limit(case: Case) -> None:
    """Take what the case may not have."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if case.space is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.space, case.space))
    if case.unprivileged and os.getuid() == 0:
        _obey_permissions()


def _obey_permissions() -> None:
    """Give up root's rights to read and write every file: CAP_DAC_OVERRIDE (1) and
    CAP_DAC_READ_SEARCH (2) of capset(2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of 32 each
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for kind in range(3):
        sets[kind] &= ~0b110
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def _processor_seconds(child: int) -> float:
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def faults(case: Case, outcome: Outcome, interrupted: bool = False) -> Iterator[str]:
    """What is wrong with an answer."""
    if outcome.status is None:
        yield f"no answer after {outcome.seconds:.0f} s"
        return
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        yield "a traceback"
        return
    if outcome.status == 0:
        return
    wanted, lead = (130, "interrupted") if interrupted and outcome.status != 1 else (1, "error: ")
    if outcome.status != wanted:
        yield f"status {outcome.status}"
    told = [line for line in outcome.err.splitlines() if line.startswith(lead)]
    if len(told) != 1 or not outcome.err.rstrip().endswith(told[0]):
        yield f"{len(told)} sentences"
    elif case.names and lead == "error: " and not any(name in told[0] for name in case.names):
        yield "the sentence names none of " + ", ".join(map(shown, case.names))


WHOLE = {".hydra", "run.json", "training.json", "multirun.yaml", "wandb", "wandb_run_id"}
"""What may lie in a directory where a run failed: what identifies the run."""


def half_written(directory: Path, before: set[Path], outcome: Outcome) -> Iterator[str]:
    """Temporary files and, after a failure, results."""
    for path in sorted(directory.rglob("*")):
        parts = set(path.relative_to(directory).parts)
        if path in before or not path.is_file() or parts & {".hydra", "wandb"}:
            continue
        if path.name.endswith((".tmp", ".part")):
            yield f"{path.relative_to(directory)} was left"
        elif outcome.status == 1 and path.suffix == ".json":
            with contextlib.suppress(OSError):
                json.loads(path.read_text("utf-8"))
        named = parts & WHOLE or path.suffix == ".log"
        if outcome.status == 1 and not named and not path.is_symlink():
            yield f"{path.relative_to(directory)} was written"


def summary(ended: Sequence[tuple[Case, Outcome]]) -> str:
    """One line: how many cases ended how."""
    count = len(ended)
    refused = sum(outcome.status == 1 and not outcome.faults for _, outcome in ended)
    passed = sum(outcome.status == 0 and not outcome.faults for _, outcome in ended)
    wrong = sum(bool(outcome.faults) for _, outcome in ended)
    tracebacks = sum("a traceback" in outcome.faults for _, outcome in ended)
    seconds = sum(outcome.seconds for _, outcome in ended)
    return (
        f"{count} cases: {refused} refused in a sentence, {passed} ran, {wrong} at fault "
        f"({tracebacks} tracebacks); {seconds:.0f} s of processor time"
    )
