"""Experiment tracking: Weights & Biases, online when logged in and offline otherwise, TensorBoard,
a CSV file, or nothing. Only the main process tracks. A tracker that fails is told of in one
sentence, and the run continues without it.

A tracker of one's own is a function that takes what `wandb_tracker` takes and returns a `Tracker`;
a file of `conf/tracking/` names it.
"""

import csv
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import started_as_main
from tempera.runtime.files import read_text, write_text
from tempera.runtime.installation import commit
from tempera.runtime.side_services import side_service
from tempera.runtime.waiting import waiting

_RUN_ID = "wandb_run_id"
OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Former names of W&B's modes, which it still takes."""
FINISH_TIMEOUT = 600.0
"""Seconds that W&B may take to send the rest of a run."""
Given = ParamSpec("Given")


class Tracker:
    """Records a run's numbers and images; its own methods do nothing. At the end of a `with` block
    it is finished, whatever happened there.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.finish()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log scalars during a run. A resumed run may log the same step again."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's final numbers."""

    def image(self, name: str, path: Path, caption: str = "") -> None:
        """Log one picture from a file."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table. A `Path` in a row is shown as an image; a scalar may have the same name."""

    def html(self, name: str, path: Path) -> None:
        """Log a page from a file."""

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Store files or directories as a versioned artifact. Characters of the name that W&B
        refuses become dashes.
        """

    def finish(self) -> None:
        """Flush all data and close the run."""


class Service(Tracker):
    """A tracker that may fail; `called` is what it is called then."""

    called: str
    failed = False


Own = TypeVar("Own", bound=Service)


def _unless_it_failed(
    method: Callable[Concatenate[Own, Given], None],
) -> Callable[Concatenate[Own, Given], None]:
    """A method that never raises, and does nothing after a failure."""

    def tried(self: Own, /, *given: Given.args, **named: Given.kwargs) -> None:
        if self.failed:
            return
        self.failed = True
        with side_service(f"{self.called} failed ({{why}}): the run continues without it."):
            method(self, *given, **named)
            self.failed = False

    return update_wrapper(tried, method)


def _alone(
    method: Callable[Concatenate[Own, str, Given], None],
) -> Callable[Concatenate[Own, str, Given], None]:
    """A method that sends one thing, and never raises: what fails is named, and others are sent."""

    def tried(self: Own, name: str, /, *given: Given.args, **named: Given.kwargs) -> None:
        if not self.failed:
            with side_service(
                f"{name} could not be sent to {self.called} ({{why}}): the run continues."
            ):
                method(self, name, *given, **named)

    return update_wrapper(tried, method)


class CsvTracker(Service):
    """`tracked.csv` in the run directory: step, name and value of each number, as they come.
    Pictures, pages and files lie in the directory already.
    """

    called = "tracked.csv"

    def __init__(self, path: Path) -> None:
        self.path = path

    @_unless_it_failed
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers."""
        is_new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            if is_new:
                table.writerow(["step", "name", "value"])
            table.writerows([step, name, value] for name, value in values.items())

    def summary(self, values: Mapping[str, Any]) -> None:
        """Add the final numbers, without a step."""
        self.log({f"final/{name}": value for name, value in values.items()})


class TensorBoardTracker(Service):
    """Event files of TensorBoard: `tensorboard --logdir outputs` shows all runs below.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
    """

    called = "TensorBoard"

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    @_unless_it_failed
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log the numbers among the values."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Log the final numbers."""
        self.log({f"final/{name}": value for name, value in values.items()})

    @_alone
    def image(self, name: str, path: Path, caption: str = "") -> None:
        """Log one picture."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self.writer.add_image(name, pixels, dataformats="HWC")

    @_unless_it_failed
    def finish(self) -> None:
        """Write what is left."""
        self.writer.close()


class WandbTracker(Service):
    """A live W&B run. The step is logged as a metric and used as the x-axis of all others, because
    W&B's internal step cannot go back when a run is resumed.
    """

    called = "W&B"

    def __init__(self, run: Any) -> None:
        self.run = run
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    @_unless_it_failed
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log scalars."""
        self.run.log({**values, **({} if step is None else {"step": step})})

    @_unless_it_failed
    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's final numbers."""
        self.run.summary.update(dict(values))

    @_alone
    def image(self, name: str, path: Path, caption: str = "") -> None:
        """Log one picture."""
        import wandb

        self.run.log({name: wandb.Image(str(path), caption=caption or None)})

    @_alone
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table; paths are shown as images."""
        import wandb

        data = [[_image(cell) if isinstance(cell, Path) else cell for cell in row] for row in rows]
        self.run.log({f"tables/{name}": wandb.Table(columns=list(columns), data=data)})

    @_alone
    def html(self, name: str, path: Path) -> None:
        """Log a page, as it is."""
        import wandb

        self.run.log({name: wandb.Html(path, inject=False)})

    @_alone
    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Store files or directories."""
        import wandb

        allowed = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:128]
        artifact = wandb.Artifact(name=allowed, type=kind)
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    @_unless_it_failed
    def finish(self) -> None:
        """Close the run."""
        with waiting("W&B to send the last data"):
            self.run.finish()


def _image(path: Path) -> Any:
    """A picture as W&B takes it; None if it is not there."""
    import wandb

    return wandb.Image(str(path)) if path.is_file() else None


def no_tracker(**given: Any) -> Tracker:
    """`tracking=none`: accepts the arguments of `wandb_tracker` and records nothing."""
    return Tracker()


def csv_tracker(*, directory: Path, **given: Any) -> Tracker:
    """`tracking=csv`: numbers in `tracked.csv` of the run directory; see `wandb_tracker`."""
    return CsvTracker(directory / "tracked.csv") if started_as_main() else Tracker()


def tensorboard_tracker(
    *, directory: Path, config: Mapping[str, Any] | None = None, **given: Any
) -> Tracker:
    """`tracking=tensorboard`: event files in the run directory; see `wandb_tracker`.

    Returns:
        A `Tracker` that records nothing if TensorBoard is not installed.
    """
    if not started_as_main():
        return Tracker()
    with side_service("TensorBoard does not start ({why}): the run continues without it."):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TemperaError("it is not installed: pip install tensorboard") from None
        writer: Any = SummaryWriter(str(directory / "tensorboard"))
        writer.add_text("options", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")
        return TensorBoardTracker(writer)
    return Tracker()


def wandb_tracker(
    *,
    directory: Path,
    project: str,
    entity: str | None = None,
    mode: Literal["auto", "online", "offline"],
    job_type: str = "",
    group: str | None = None,
    tags: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Tracker:
    """`tracking=wandb`: start, or resume, the W&B run of a run directory. Processes other than the
    main one get a `Tracker`.

    Args:
        directory: the run directory. It contains the W&B files and the run's id, so a resumed run
            continues the same W&B run.
        mode: `auto`, `online` or `offline`. `auto` follows WANDB_MODE and WANDB_DISABLED if set,
            and otherwise is online when logged in. An offline run prints how to sync it.
        group, job_type, tags: shown on the W&B run; WANDB_RUN_GROUP and WANDB_JOB_TYPE replace the
            first two, and WANDB_TAGS are added.
        name: of the W&B run, of which 128 characters are kept; by default that of the directory.
            WANDB_NAME replaces it.
        config: the run's options; the git commit is added to them.

    Returns:
        A `Tracker` that records nothing if W&B fails, or refuses the run.
    """
    if not started_as_main():
        return Tracker()
    arguments: dict[str, Any] = {
        "dir": str(directory),
        "project": project,
        "entity": entity,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,
        "job_type": os.environ.get("WANDB_JOB_TYPE") or job_type or None,
        "tags": [tag[:64] for tag in (*tags, *_variable_tags())],
        "config": {**(config or {}), "git_commit": commit()},
        "resume": "allow",
        "name": (os.environ.get("WANDB_NAME") or name or directory.name)[:128],
    }
    with side_service("W&B does not start ({why}): the run continues without it."):
        return WandbTracker(_start(arguments | {"id": _run_id(directory)}, *_mode(mode)))
    return Tracker()


@contextmanager
def in_background(start: Callable[[], Tracker]) -> Iterator[Future[Tracker]]:
    """Start a tracker in a thread, while the `with` block begins: W&B takes seconds. At the end of
    the block it is finished, whatever happened there.
    """
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)
        try:
            yield starting
        finally:
            starting.result().finish()


def _mode(mode: str) -> tuple[str, str]:
    """How W&B runs, and why."""
    import wandb

    if mode != "auto":
        return mode, f"tracking.mode is {mode}"
    if wanted := os.environ.get("WANDB_MODE"):
        return OLD_MODES.get(wanted, wanted), f"WANDB_MODE is {wanted}"
    disabled = os.environ.get("WANDB_DISABLED", "")
    if disabled.lower() in ("true", "1", "yes", "on"):
        # as transformers reads it; wandb itself no longer does
        return "disabled", f"WANDB_DISABLED is {disabled}"
    if wandb.login(prompt=False, verify=False):
        return "online", "logged in"
    return "offline", "not logged in"


def _variable_tags() -> list[str]:
    """The tags of WANDB_TAGS."""
    return [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]


def _run_id(directory: Path) -> str:
    """The W&B run id kept in the run directory."""
    path = directory / _RUN_ID
    if path.exists():
        return read_text(path).strip()
    run_id = secrets.token_hex(4)
    write_text(path, run_id + "\n")
    return run_id


def _start(arguments: dict[str, Any], mode: Any, why: str) -> Any:
    """Start the run, offline if the server is unreachable, so that no evaluation is lost. A run
    that is open already, such as a notebook's own, is another one and stays as it is.

    Args:
        why: it runs in this mode, as an offline run tells.
    """
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        finish_timeout=FINISH_TIMEOUT,
        finish_timeout_raises=True,
    )
    if mode == "offline":
        arguments = {key: value for key, value in arguments.items() if key != "resume"}
    try:
        with waiting("W&B to answer"):
            run = wandb.init(mode=mode, reinit="create_new", settings=settings, **arguments)
    except (wandb.Error, ValueError) as problem:
        if mode == "offline" or isinstance(problem, ValueError):
            raise TemperaError(
                f"it refuses the run: {shortened(str(problem))}; correct its mode (or "
                "WANDB_MODE), project and entity"
            ) from None
        unreachable = f"unreachable ({' '.join(str(problem).split())[:80]})"
        return _start(arguments, "offline", unreachable)
    if mode == "offline":
        print(
            f"W&B: {why}, so the run is logged offline; send it with: wandb sync "
            f"{Path(run.dir).parent}"
        )
    return run
