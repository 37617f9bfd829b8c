"""The resolvers that conf/ uses: `package`, `started`, `directory_of`, `at`, `unless_random`,
`trained_or`, `drafter_of`, `jobs` and `each`; `of_family` and `summaries` stand in
search.py.
"""

import hashlib
import os
import secrets
import sys
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from tempera.errors import TemperaError, shortened


def package(path: str) -> str:
    """`${package:PATH}`: a file or directory that ships inside the package."""
    return str(Path(__file__).resolve().parent.parent / path)


def started() -> str:
    """`${started:}`: when a run began, with four random letters and digits. In a batch job of Slurm
    it is the job's number and a hash of the command instead, so that a job that was requeued goes
    on in the same directory.
    """
    if os.environ.get("ENVIRONMENT") == "BATCH" and (job := os.environ.get("SLURM_JOB_ID")):
        arguments = [word for word in sys.argv if word != "hydra/job_logging=disabled"]
        return f"slurm-{job}_{hashlib.sha256(repr(arguments).encode()).hexdigest()[:8]}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def directory_of(weights: str) -> str:
    """`${directory_of:WEIGHTS}`: the directory of a file; a directory, a hub id or `random` as it
    is.
    """
    return str(Path(weights).parent) if Path(str(weights)).is_file() else weights


def unless_random(weights: str, other: str) -> str:
    """`${unless_random:WEIGHTS,OTHER}`: OTHER, or `random` if WEIGHTS is: parts of an untrained
    model need no files.
    """
    return "random" if weights == "random" else other


def trained_or(directory: str, other: str | None) -> str:
    """`${trained_or:DIRECTORY,OTHER}`: the draft that a training wrote to the directory, or while
    there is none, the model's own or a public one, if that is not null.
    """
    return directory if other is None or (Path(directory) / "config.json").is_file() else other


def drafter_of(builder: str) -> str:
    """`${drafter_of:BUILDER}`: the drafter that a function builds, `eagle` of
    `tempera.drafters.eagle_network.build_eagle`.
    """
    return builder.rpartition(".")[2].removeprefix("build_")


def at(weights: str, revision: str | None) -> str:
    """`${at:WEIGHTS,REVISION}`: the weights at a commit, branch or tag of their hub repository.

    Raises:
        TemperaError: the weights are not a repository, or name a revision themselves.
    """
    if revision is None:
        return weights
    if weights == "random" or Path(weights).expanduser().exists() or "@" in weights:
        raise TemperaError(
            f"`revision={shortened(str(revision))}` only applies to weights=owner/name without "
            f"@revision, but weights={weights}: leave revision out, or give weights=owner/name",
            option="revision",
        )
    return f"{weights}@{revision}"


def jobs(device: str) -> int:
    """`${jobs:DEVICE}`: how many jobs of a sweep run side by side: one per core on a CPU, one per
    GPU, and one on a GPU that is named.
    """
    if str(device) != "cpu":
        import torch

        gpus = torch.cuda.device_count()
        if gpus:
            return gpus if device in ("auto", "cuda") else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(values: list[object]) -> str:
    """`${each:LIST}`: the values of a list as a sweep takes them, `3.5,4.0`."""
    return ",".join(map(str, values))


for _resolver in (
    package,
    directory_of,
    unless_random,
    trained_or,
    drafter_of,
    at,
    jobs,
    each,
):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
OmegaConf.register_new_resolver("started", started, replace=True, use_cache=True)
