"""A run's results on disk, keyed by prompt id. They are written as they arrive, and each file is
either whole or absent.

A run directory holds
    run.json            the run's identity (model, method, sampling, seed), which cannot change;
                        every other part carries its fingerprint, and is refused without it
    records/            generated tokens and their trace, a part file per batch
    replays/            decodes of the first prompts, round by round (`tempera.decoding.replay`)
    images/<id>.png     the pictures
    timings/<machine>/  one timed pair per prompt, or per batch
    scores/<scorer>/    each picture's features and scores, by the identity of what scores them
    prompts.parquet     ids and texts of what the last start was asked for, in order
and, derived from these at the end (`tempera.evaluation.summary`), results.parquet and metrics.json;
and from these two (`tempera.reporting.run_report`) grid.png, acceptance.png and report.html.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import (
    check_same,
    create_json,
    fingerprint,
    read_json,
    remove_hydras,
    writable_directory,
    write_json,
)
from tempera.runtime.row_store import Store, write_table

PROMPTS = "prompts.parquet"
RECORDS = "records"
FORMAT = 3
"""Raise it where a run that an earlier version began cannot go on: with other columns of records,
or other random draws.
"""


def made_by(identity: Mapping[str, Any]) -> str:
    """What the parts of a run carry, given its identity as `claim` takes it."""
    return fingerprint({"format": FORMAT, **identity})


def check_format(directory: Path, recorded: Mapping[str, Any]) -> None:
    """Raise TemperaError unless this version wrote a run directory whose identity is `recorded`."""
    if recorded.get("format") != FORMAT:
        raise TemperaError(
            f"{directory} was made by another version of tempera: use that version, or make its "
            "images again in another directory."
        )


def write_prompts(directory: Path, prompts: Sequence[Prompt], made_by: str) -> None:
    """Keep the prompts of a run, in their order."""
    rows = [{"id": prompt.id, "text": prompt.text} for prompt in prompts]
    write_table(directory / PROMPTS, rows, made_by)


def shared_directory(processes: Processes, own: Path) -> Path:
    """The main process's directory. Hydra has created one per process, with its configuration; the
    others are removed unless they hold more.
    """
    directory = Path(processes.from_main(str(own)))
    if own != directory:
        remove_hydras(own)
    return directory


def claim(
    directory: Path,
    identity: Mapping[str, Any],
    about: Mapping[str, Any],
    prompts: Sequence[Prompt],
    write: bool = True,
) -> None:
    """Claim a directory for a run, or check that the directory belongs to the run. If several runs
    claim a new directory at once, one gets it. A run that is refused leaves everything as it was.

    Args:
        directory: created if it does not exist.
        identity: the settings that results depend on; a directory of other settings is refused.
        about: other facts for run.json, rewritten at every start.
        prompts: of the run; a directory with another text under one of their ids is refused.
        write: False in processes other than the main one, which only check.

    Raises:
        TemperaError: the directory cannot be written, or belongs to a run with other settings or
            texts.
    """
    path = directory / "run.json"
    content = {"identity": {"format": FORMAT, **identity}, **about}
    new = write and create_json(writable_directory(directory) / "run.json", content)
    if not new and path.exists():
        recorded = read_json(path).get("identity")
        check_same(directory, recorded if isinstance(recorded, dict) else {}, content["identity"])
        _check_texts(directory, prompts, made_by(identity))
        if write:
            write_json(path, content)


def _check_texts(directory: Path, prompts: Sequence[Prompt], made_by: str) -> None:
    """Raise TemperaError for a prompt whose id has another text in the records."""
    recorded = Store(directory / RECORDS, made_by).texts()
    for prompt in prompts:
        text = recorded.get(prompt.id, prompt.text)
        if text != prompt.text:
            raise TemperaError(
                f"{directory} holds '{text}' under the id {prompt.id}, which is now "
                f"'{prompt.text}': choose another directory with hydra.run.dir=DIR, or with "
                "output=DIR for a folder of pictures."
            )
