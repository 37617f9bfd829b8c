"""Errors of Python, Hydra and the file system, as a person reads them."""

import errno
import re
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException
from submitit.core.utils import UncompletedJobError

from tempera.config.messages import sentence
from tempera.config.resolvers import at, trained_or
from tempera.errors import TemperaError

LAUNCHERS = ["basic"]
DIED = "Job 7 has not produced any output (state: FAILED)\nError stream produced:\n---"
TOLD = [
    (MemoryError(), "^out of memory: give a smaller batch_size"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "^out of memory"),
    (RuntimeError("No executable batch size found, reached zero."), "^out of memory"),
    (
        OSError(errno.ENOSPC, "Full"),
        "^cannot write the run's directory .*: Full; free some space",
    ),
    (OSError(errno.EDQUOT, "Full", "a.txt"), "^cannot write a.txt: Full; free some space"),
    (OSError(errno.EROFS, "No", "a.txt"), "^cannot read or write 'a.txt': No; give .*run.dir=DIR"),
    (TemperaError("give a number above 0", option="delta"), r"above 0 \(delta=\)$"),
    (TemperaError("delta=0 is not valid", option="delta"), "^delta=0 is not valid$"),
    (UncompletedJobError(DIED), r"^Job 7 has .* \(state: FAILED\)"),
    *(
        (MissingConfigException("", f"hydra/launcher/{name}", LAUNCHERS), r"pip .*\[launchers\]")
        for name in ("joblib", "submitit_slurm")
    ),
]


@pytest.mark.parametrize(("problem", "words"), TOLD)
def test_what_a_machine_or_a_person_causes_is_told(problem: Exception, words: str) -> None:
    said = sentence(problem, "eval", [])
    assert said is not None and re.search(words, said) and "\n" not in said


@pytest.mark.parametrize("problem", [RuntimeError("shape"), KeyError("grid"), OSError("odd")])
def test_a_bug_is_not_told_as_a_mistake(problem: Exception) -> None:
    assert sentence(problem, "eval", []) is None


def test_a_draft_of_ones_own_comes_before_the_hubs(tmp_path: Path) -> None:
    own = str(tmp_path)
    assert trained_or(own, None) == own
    assert trained_or(own, "owner/draft") == "owner/draft"
    (tmp_path / "config.json").touch()
    assert trained_or(own, "owner/draft") == own


def test_a_revision_is_of_a_repository_alone(tmp_path: Path) -> None:
    assert (at("owner/name", "v1"), at("owner/name", None)) == ("owner/name@v1", "owner/name")
    for weights in ("random", str(tmp_path), "owner/name@v2"):
        with pytest.raises(TemperaError, match="leave revision out"):
            at(weights, "v1")
