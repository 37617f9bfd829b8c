"""Files of GitHub repositories at a fixed commit: downloaded once, and checked against git's own
ids, so that a changed benchmark is noticed.
"""

import hashlib
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from tempera.errors import TemperaError
from tempera.runtime.files import cache_directory, is_unwritable, reason, unwritable
from tempera.runtime.hub import unreachable
from tempera.runtime.waiting import waiting

HOST = "https://codeload.github.com"
PATIENCE = 20.0
"""Seconds that the server may be silent."""


@dataclass(frozen=True)
class Pinned:
    """A file, or a folder of files, of a GitHub repository at a commit.

    Attributes:
        repository: `owner/name`.
        commit: its full hash.
        path: of the file or folder in the repository.
        git_id: of the file's blob or the folder's tree, as `git rev-parse COMMIT:PATH` prints it.
        option: the option that takes a copy of it instead.
    """

    repository: str
    commit: str
    path: str
    git_id: str
    option: str = "data.path"

    def local(self) -> Path:
        """The file or folder on this machine, downloaded first if necessary.

        Raises:
            TemperaError: it cannot be downloaded, or is not what `git_id` names.
        """
        cached = cache_directory() / "github" / self.git_id / PurePosixPath(self.path).name
        if not cached.exists():
            self._download(cached)
        if (found := git_id(cached)) != self.git_id:
            raise TemperaError(
                f"{cached} is not {self.path} of {self.repository} at {self.commit[:7]} (its git "
                f"id is {found[:12]}, not {self.git_id[:12]}): delete it, and run the command "
                "again."
            )
        return cached

    def _download(self, cached: Path) -> None:
        import httpx

        address = f"{HOST}/{self.repository}/tar.gz/{self.commit}"
        if (why := unreachable(HOST)) is not None:
            raise self._unavailable(why)
        try:
            with waiting(f"{address} to be downloaded"), _downloaded(address) as archive:
                cached.parent.mkdir(parents=True, exist_ok=True)
                with TemporaryDirectory(dir=cached.parent, prefix=".download-") as folder:
                    made = Path(folder, cached.name)
                    self._unpack(archive, made)
                    if not cached.exists():  # another process may have been faster
                        shutil.move(made, cached)
        except (httpx.HTTPError, tarfile.TarError, EOFError, OSError) as problem:
            if is_unwritable(problem):
                raise unwritable(cached, problem) from None
            raise self._unavailable(reason(problem)) from None

    def _unpack(self, archive: IO[bytes], made: Path) -> None:
        """Write the file, or the files of the folder, of a repository's archive."""
        with tarfile.open(fileobj=archive, mode="r:gz") as members:
            for member in members:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                folder = inside.parent == PurePosixPath(self.path)
                if not member.isfile() or not (folder or inside == PurePosixPath(self.path)):
                    continue
                destination = made / inside.name if folder else made
                destination.parent.mkdir(exist_ok=True)
                content = members.extractfile(member)
                assert content is not None  # a file has some
                with destination.open("wb") as file:
                    shutil.copyfileobj(content, file)
        if not made.exists():
            raise tarfile.TarError(f"the archive contains no {self.path}")

    def _unavailable(self, why: str) -> TemperaError:
        page = f"https://github.com/{self.repository}/tree/{self.commit}/{self.path}"
        return TemperaError(
            f"{self.path} of {self.repository} cannot be downloaded ({why}): get it from {page}, "
            f"and give {self.option}=PATH.",
            option=self.option,
        )


@contextmanager
def _downloaded(address: str) -> Iterator[IO[bytes]]:
    """The content of an address, in a temporary file."""
    import httpx

    with TemporaryFile() as file:
        with httpx.stream("GET", address, follow_redirects=True, timeout=PATIENCE) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                file.write(chunk)
        file.seek(0)
        yield file


def git_id(path: Path) -> str:
    """Git's id of a file, or of a folder of files that cannot be executed: SHA-1, hexadecimal."""
    if path.is_file():
        return _object("blob", path.read_bytes()).hexdigest()
    content = b""
    for file in sorted(path.iterdir(), key=lambda file: file.name.encode()):
        content += b"100644 " + file.name.encode() + b"\0"
        content += _object("blob", file.read_bytes()).digest()
    return _object("tree", content).hexdigest()


def _object(kind: str, content: bytes) -> "hashlib._Hash":
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False)
