"""The resolvers that conf/ uses: `package`, `started`, `beside`, `at`, `unless_random`,
`own_or`, `jobs`, `ceil`, `each` and `usage`.
"""

import hashlib
import math
import os
import re
import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tempera.errors import TemperaError, shortened
from tempera.runtime.installation import SCRIPTS, command, conf_directory


def package(path: str) -> str:
    """`${package:PATH}`: a file or directory that ships inside the package."""
    return str(Path(__file__).resolve().parent.parent / path)


def started() -> str:
    """`${started:}`: when a run began, with four random letters and digits. In a batch job of Slurm
    it is the job's number and a hash of the command instead, so that a job that was requeued goes
    on in the same directory.
    """
    if os.environ.get("ENVIRONMENT") == "BATCH" and (job := os.environ.get("SLURM_JOB_ID")):
        given = [one for one in sys.argv if one != "hydra/job_logging=disabled"]
        return f"slurm-{job}_{hashlib.sha256(repr(given).encode()).hexdigest()[:8]}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def beside(weights: str) -> str:
    """`${beside:WEIGHTS}`: the directory of a file; a directory, a hub id or `random` as it is."""
    return str(Path(weights).parent) if Path(str(weights)).is_file() else weights


def unless_random(weights: str, other: str) -> str:
    """`${unless_random:WEIGHTS,OTHER}`: OTHER, or `random` if WEIGHTS is: parts of an untrained
    model need no files.
    """
    return "random" if weights == "random" else other


def own_or(directory: str, public: str | None) -> str:
    """`${own_or:DIRECTORY,HUB}`: the draft in the directory, or if there is none, that of the hub,
    if that is not null.
    """
    return directory if public is None or (Path(directory) / "config.json").is_file() else public


def at(weights: str, revision: str | None) -> str:
    """`${at:WEIGHTS,REVISION}`: the weights at a commit, branch or tag of their hub repository.

    Raises:
        TemperaError: the weights are not a repository, or name a revision themselves.
    """
    if revision is None:
        return weights
    if weights == "random" or Path(weights).expanduser().exists() or "@" in weights:
        raise TemperaError(
            f"`revision={shortened(str(revision))}` needs a hub repository without a revision of "
            f"its own, but weights={weights}: leave revision out, or give weights=owner/name",
            option="revision",
        )
    return f"{weights}@{revision}"


def jobs(device: str) -> int:
    """`${jobs:DEVICE}`: how many jobs of a sweep run side by side: one per core on a CPU, one on a
    GPU.
    """
    if str(device) != "cpu":
        import torch

        if torch.cuda.is_available():
            return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ceil(value: object) -> object:
    """`${ceil:NUMBER}`: the number rounded up; anything else as it is."""
    if isinstance(value, int | float) and math.isfinite(value):
        return math.ceil(value)
    return value


def each(values: list[object]) -> str:
    """`${each:LIST}`: the values of a list as a sweep takes them, `3.5,4.0`."""
    return ",".join(map(str, values))


def usage(config_name: str) -> str:
    """`${usage:NAME}`, for `--help`: how to call the script, its options with their comments, and
    the groups that it chooses from.
    """
    head = _parts(config_name)[0].partition("\ndefaults:\n")[0]
    head = re.sub("^# ?", "", head, flags=re.MULTILINE)
    for name, script in SCRIPTS.items():
        head = head.replace(f"python {script}", command(name))
    parts = [part for name in _files(config_name) for part in _parts(name)[1:]]
    hidden = r"^hydra:|\$\{hydra:|  _target_:"
    own = [part.rstrip() for part in parts if not re.search(hidden, part, re.MULTILINE)]
    chosen = [
        f"  {group}={', '.join(names)}"
        for group, names in groups(config_name).items()
        if len(names) > 1
    ]
    choices = "\nGroups (group=choice; some choices add options of their own, see conf/):"
    text = "\n".join((f"{head}\n", "Options (name=value):", *own, *([choices] if chosen else ())))
    return "\n".join((text, *chosen)).replace("$", "$$")  # Hydra fills in a template


def _files(config_name: str) -> list[str]:
    """A script's configuration, after those that it includes."""
    conf = conf_directory()
    listed = [one for one in _defaults(conf / f"{config_name}.yaml") if isinstance(one, str)]
    included = [name for name in listed if (conf / f"{name}.yaml").is_file()]
    return [*included, config_name]


def _parts(config_name: str) -> list[str]:
    """The text of a script's configuration: its head, and each top-level key with the comments
    above it.
    """
    text = (conf_directory() / f"{config_name}.yaml").read_text(encoding="utf-8")
    head, _, rest = text.partition("\ndefaults:\n")
    return [head, *re.split(r"\n(?=\S)", rest)[1:]]


def _defaults(file: Path) -> list[Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    return list(content.get("defaults", ()))


def groups(config_name: str) -> dict[str, list[str]]:
    """The groups of a script and their choices: those of its defaults list and of what they
    choose in turn.
    """
    conf = conf_directory()
    found: dict[str, list[str]] = {}
    files = [conf / f"{name}.yaml" for name in _files(config_name)]
    while files:
        for entry in _defaults(files.pop()):
            group = next(iter(entry)).split()[-1].lstrip("/") if isinstance(entry, dict) else ""
            if group not in found and (conf / group).is_dir() and group:
                choices = sorted((conf / group).glob("[!_]*.yaml"))
                found[group] = [path.stem for path in choices]
                files += choices
    return dict(sorted(found.items()))


for _resolver in (package, beside, unless_random, own_or, at, jobs, ceil, each, usage):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
OmegaConf.register_new_resolver("started", started, replace=True, use_cache=True)
