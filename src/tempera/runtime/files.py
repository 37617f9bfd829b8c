"""Atomic writes: a file is written under a temporary name in its directory, then renamed."""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

from pydantic import ValidationError
from safetensors import SafetensorError

from tempera.errors import TemperaError, shortened
from tempera.runtime.waiting import waiting

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No space left on the disk, or for one user or one file."""
MISPLACED = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
"""A file where a directory should be, or the other way round."""


LEFT = re.compile(r"\..+\.\d+-\d+\.tempera-(tmp|new)")
"""Names of the temporary files of `replacing` and `create_json`, which no other program gives."""
HYDRAS = ("config.yaml", "hydra.yaml", "overrides.yaml")
"""What Hydra writes into a run's directory, in `.hydra`."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success flush that file to disk and rename it to
    `path`; on failure remove it.

    Raises:
        TemperaError: the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{_writer()}.tempera-tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # safetensors makes its files private to the owner
        temporary.replace(path)
    except (OSError, SafetensorError) as problem:  # safetensors raises its own
        raise unwritable(path, problem) from problem
    finally:
        with suppress(OSError):  # if it cannot be removed, it was not written
            temporary.unlink(missing_ok=True)


def _writer() -> str:
    """Sets the temporary files of processes and threads apart."""
    return f"{os.getpid()}-{threading.get_native_id()}"


def unwritable(path: Path, problem: Exception) -> TemperaError:
    """The error for a file that could not be written."""
    told = getattr(problem, "strerror", None) or str(problem)
    kind = getattr(problem, "errno", None)
    if kind is None and (number := re.search(r"\b(?:os error|errno) (\d+)", told)):
        kind = int(number[1])
    advice = "give a directory that can be written"
    if kind in FULL or (kind is None and _is_full(path.parent)):
        advice = "free some space, or give another directory"
    elif kind in MISPLACED:
        advice = "a file or a directory is in the way, so move it or give another directory"
    return TemperaError(f"cannot write {path}: {shortened(told)}; {advice}.")


def _is_full(directory: Path) -> bool:
    """Whether space is short in a directory, which torch does not say."""
    try:
        with TemporaryFile(dir=directory) as file:
            file.write(bytes(2**20))
            file.flush()
    except OSError as problem:
        return problem.errno in FULL
    return False


def is_unwritable(problem: BaseException) -> bool:
    """Whether an error says that this machine's disk is full or may not be written."""
    denied = {errno.EACCES, errno.EPERM, errno.EROFS}
    return isinstance(problem, OSError) and problem.errno in FULL | denied


def reason(problem: BaseException) -> str:
    """The first sentence of an error, or its type if it says nothing, as a time-out does; of values
    that are not what they should be, the first, by name.
    """
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        field = ".".join(map(str, first["loc"])) or "it"
        if first["type"] == "missing":
            return f"{field} is missing"
        return shortened(f"{field}={first['input']}: {first['msg']}", 160)
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0].partition(". ")[0][:160]


def regular_file(path: Path) -> Path:
    """The path of a file that can be read to its end, links followed.

    Raises:
        TemperaError: it is missing, or a directory, a pipe or a device.
    """
    if not os.path.exists(path):  # noqa: PTH110 (False for a name that is too long)
        raise TemperaError(f"there is no file {shortened(str(path), 200)}: give the path of one.")
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "a pipe or a device"
        raise TemperaError(f"{path} is {kind}: give the path of a file.")
    return path


def check_readable(path: Path) -> None:
    """Raise TemperaError unless a file can be opened; safetensors takes one that may not be read
    for a missing one.
    """
    try:
        regular_file(path).open("rb").close()
    except OSError as problem:
        raise TemperaError(f"cannot read {path}: {problem.strerror}; make it readable.") from None


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def create_json(path: Path, value: object) -> bool:
    """Write `value` as `write_json` does unless the file exists; False if it does. Of several
    processes that call this at once, one writes.
    """
    if path.exists():
        return False
    own = path.with_name(f".{path.name}.{_writer()}.tempera-new")
    write_json(own, value)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, where the last one writes
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)
    return True


def write_text(path: Path, text: str) -> None:
    """Write text, atomically; bytes of a file name that are no text as JSON escapes them."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without byte-order marks and with `LF` line ends.

    Raises:
        TemperaError: the file cannot be read, or is in another encoding.
    """
    check_readable(path)
    with waiting(f"{path} to be read"):
        content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as problem:
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        line = content.count(b"\n", 0, problem.start) + 1
        raise TemperaError(
            f"{path}:{line} is not UTF-8 text{' but UTF-16' * utf16}: save the file as UTF-8."
        ) from None
    text = text.replace("\ufeff", "")  # joined files have marks inside, too
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        TemperaError: the file is missing or is not a JSON object.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise TemperaError(
            f"{path} is not valid JSON ({shortened(str(problem))}): restore it, or delete it and "
            "build it again."
        ) from problem
    if not isinstance(value, dict):
        raise TemperaError(
            f"{path} contains no JSON object: restore it, or delete it and build it again."
        )
    return value


def check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a directory with other facts than it was begun with. `format` among them
    is a number of what is written there, such as its columns.

    Raises:
        TemperaError: names the first fact that differs.
    """
    if before.get("format") != now.get("format"):
        raise TemperaError(
            f"{directory} was started by another version of tempera: give another directory, "
            "delete this one, or continue with that version."
        )
    old, new = (_flat(json.loads(json.dumps(facts))) for facts in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            then, wanted = (shortened(str(facts.get(name)), 60) for facts in (old, new))
            raise TemperaError(
                f"{directory} was made with {name}={then}, but this run has {name}={wanted}: give "
                "another directory, delete this one, or use the original options."
            )


def fingerprint(facts: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that identify facts, before and after they were written as JSON. What
    belongs to them carries it.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return flat


def writable_directory(path: Path) -> Path:
    """Create `path` if necessary and check that files can be written in it. What writers that were
    killed left there, or one level below, is removed once it is an hour old.

    Raises:
        TemperaError: the directory cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as file:
            now = os.fstat(file.fileno()).st_mtime  # by the clock that dates the files
        for left in (*path.glob(".*"), *path.glob("*/.*")):
            with suppress(OSError):  # another process removed it first
                if LEFT.fullmatch(left.name) and left.stat().st_mtime < now - 3600:
                    left.unlink()
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the path
        raise TemperaError(
            f"cannot write in {shortened(str(path), 200)}: {reason(problem)}; give another output "
            "directory."
        ) from problem
    return path


def remove_hydras(directory: Path) -> None:
    """Remove what Hydra wrote into a run's directory, and the directory if nothing else is in
    it.
    """
    own = directory / ".hydra"
    with suppress(OSError):
        for name in HYDRAS:
            (own / name).unlink(missing_ok=True)
        own.rmdir()
        directory.rmdir()


def directories_with(directory: Path, name: str) -> list[Path]:
    """The directories at or below a place that have a file of this name, each once. Links are
    followed after all else.
    """
    seen: set[Path] = set()
    found = []
    roots = [directory]
    for root in roots:  # to which links are added
        for folder, inner, files in os.walk(root):
            here = Path(folder)
            if here.resolve() in seen:
                inner.clear()
                continue
            seen.add(here.resolve())
            roots += [here / link for link in sorted(inner) if (here / link).is_symlink()]
            if name in files:
                found.append(here)
    return sorted(found)


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with waiting(f"{path} to be read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_at(path: Path) -> int:
    """Bytes that are free on the disk of a directory, which may have yet to be made."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def cache_directory() -> Path:
    """The cache directory: `TEMPERA_CACHE`, or `~/.cache/tempera`."""
    return Path(os.environ.get("TEMPERA_CACHE") or "~/.cache/tempera").expanduser()


def remembered(kind: str, name: str, decide: Callable[[], dict[str, int]]) -> dict[str, int]:
    """A decision of this kind and name that the cache keeps, so that every process has the same;
    `decide` makes it where there is none yet.
    """
    path = cache_directory() / kind / f"{name.replace('/', ' ')}.json"
    if not path.exists():
        decided = decide()
        try:
            create_json(path, decided)
        except TemperaError:  # of a cache that cannot be written: the decision is this process's
            return decided
    return cast(dict[str, int], read_json(path))
