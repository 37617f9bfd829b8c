"""Atomic writes: a file is written under a temporary name in its directory, then renamed."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tempera.errors import TemperaError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success flush that file to disk and rename it to
    `path`; on failure remove it.

    Raises:
        TemperaError: the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(_usual_mode())
        temporary.replace(path)
    except OSError as problem:
        raise TemperaError(
            f"cannot write {path}: {problem.strerror or problem}; give a directory that can be "
            "written."
        ) from problem
    finally:
        with suppress(OSError):  # if it cannot be removed, it was not written
            temporary.unlink(missing_ok=True)


def _usual_mode() -> int:
    """The default permissions of new files; safetensors makes its files private to the owner."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(
            json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def write_text(path: Path, text: str) -> None:
    """Write text, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        TemperaError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise TemperaError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    except ValueError as problem:
        raise TemperaError(
            f"{path} is not valid JSON ({problem}): restore it, or delete it and build it again."
        ) from problem
    if not isinstance(value, dict):
        raise TemperaError(
            f"{path} holds no JSON object: restore it, or delete it and build it again."
        )
    return value


def writable_directory(path: Path) -> Path:
    """Create `path` if necessary and check that files can be written in it.

    Raises:
        TemperaError: the directory cannot be created or written.
    """
    probe = path / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise TemperaError(
            f"cannot write in {path}: {problem.strerror or problem}; give another output directory."
        ) from problem
    return path


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_directory() -> Path:
    """Where things are kept that can be made again: `TEMPERA_CACHE`, or `~/.cache/tempera`."""
    return Path(os.environ.get("TEMPERA_CACHE") or "~/.cache/tempera").expanduser()
