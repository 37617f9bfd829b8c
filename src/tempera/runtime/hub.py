"""Files on Hugging Face's hub: downloaded once into its cache and then read without a network.
Every failure is reported in one sentence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from tempera.errors import TemperaError
from tempera.runtime.files import is_unwritable, reason, unwritable


@dataclass(eq=False)
class CannotReach(TemperaError):
    """A repository's files are not cached and cannot be downloaded. reason: the hub library's."""

    repository: "Repository"
    patterns: Sequence[str]
    reason: str

    def __str__(self) -> str:
        command = self.repository.command(self.patterns)
        return (
            f"{self.repository.id} is not in the hub's cache, and the hub cannot be reached "
            f"({self.reason}): on a machine with a network run `{command}`, and copy the cache "
            "directory (HF_HUB_CACHE) here."
        )


@dataclass(eq=False)
class Gated(TemperaError):
    """A repository is open only to accounts that accepted its conditions. logged_in: whether this
    account is logged in, but has no access.
    """

    repository: "Repository"
    logged_in: bool

    def __str__(self) -> str:
        who = "this account has no access yet" if self.logged_in else "you are not logged in"
        return (
            f"the hub repository {self.repository.id} is gated, and {who}: accept its conditions "
            f"at {self.repository.page}, log in with `hf auth login`, and run this again."
        )


@dataclass(frozen=True)
class Repository:
    """A repository of the hub.

    Attributes:
        id: `owner/name`.
        kind: `model` or `dataset`.
        revision: a commit, branch or tag; the main branch by default.
    """

    id: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None

    @property
    def page(self) -> str:
        """Its page in a browser."""
        return f"https://huggingface.co/{'datasets/' if self.kind == 'dataset' else ''}{self.id}"

    def command(self, patterns: Sequence[str], directory: str | None = None) -> str:
        """The shell command that downloads these files, into the cache or a directory."""
        options = ["--repo-type dataset"] if self.kind == "dataset" else []
        options += [f"--revision {self.revision}"] if self.revision else []
        options += [f'--include "{pattern}"' for pattern in patterns]
        options += [f"--local-dir {directory}"] if directory else []
        return " ".join([f"hf download {self.id}", *options])

    def commit(self, patterns: Sequence[str] = ()) -> str:
        """The commit that `revision` refers to now; without a network, the last one known.

        Args:
            patterns: the files that are wanted, for the error message.

        Raises:
            TemperaError: the repository or the revision cannot be found.
        """
        from huggingface_hub import HfApi, constants, errors, file_download

        with self._in_one_sentence(patterns):
            try:
                if constants.HF_HUB_OFFLINE:
                    raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1")
                return str(HfApi().repo_info(self.id, **self._options).sha)
            except errors.HfHubHTTPError:
                raise
            except Exception:  # the hub's HTTP library has exceptions of its own
                folder = file_download.repo_folder_name(repo_id=self.id, repo_type=self.kind)
                name = self.revision or constants.DEFAULT_REVISION
                place = Path(constants.HF_HUB_CACHE, folder)
                if (known := place / "refs" / name).is_file():
                    return known.read_text(encoding="utf-8").strip()
                if (place / "snapshots" / name).is_dir():
                    return name
                raise

    def files(self, pattern: str) -> list[str]:
        """Names of the files that match a pattern, in order; needs a network.

        Raises:
            TemperaError: the repository cannot be read.
        """
        from huggingface_hub import HfApi

        with self._in_one_sentence([pattern]):
            names = HfApi().list_repo_files(self.id, **self._options)
        return sorted(name for name in names if fnmatch(name, pattern))

    def file(self, name: str) -> Path:
        """One file, downloaded unless the cache has it.

        Raises:
            TemperaError: it is unavailable.
        """
        from huggingface_hub import hf_hub_download

        with self._in_one_sentence([name]):
            return Path(hf_hub_download(self.id, name, **self._options))

    def cached(self, name: str) -> Path | None:
        """One file in the cache; None if it is not there. Sends no requests."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, name, **self._options)
        return Path(found) if isinstance(found, str) else None

    def size(self, name: str) -> int:
        """Bytes of a file that is cached or that the hub offers. Downloads nothing.

        Raises:
            TemperaError: it is unavailable.
        """
        from huggingface_hub import hf_hub_download

        with self._in_one_sentence([name]):
            return hf_hub_download(self.id, name, **self._options, dry_run=True).file_size or 0

    def snapshot(self, patterns: Sequence[str]) -> Path:
        """A directory with all files that match the patterns, downloaded unless the cache has them.
        Its name is the commit.

        Raises:
            TemperaError: they are unavailable.
        """
        from huggingface_hub import snapshot_download

        with self._in_one_sentence(patterns):
            wanted = list(patterns)
            return Path(snapshot_download(self.id, **self._options, allow_patterns=wanted))

    def to_download(self, patterns: Sequence[str]) -> int:
        """Bytes of these files that the cache lacks; downloads nothing.

        Raises:
            TemperaError: they cannot be had.
        """
        from huggingface_hub import snapshot_download

        with self._in_one_sentence(patterns):
            files = snapshot_download(
                self.id, **self._options, allow_patterns=list(patterns), dry_run=True
            )
        return sum(file.file_size or 0 for file in files if file.will_download)

    @property
    def _options(self) -> dict[str, Any]:
        return {"repo_type": self.kind, "revision": self.revision}

    @contextmanager
    def _in_one_sentence(self, patterns: Sequence[str]) -> Iterator[None]:
        from huggingface_hub import constants, errors, get_token

        try:
            yield
        except errors.GatedRepoError:
            raise Gated(self, bool(get_token())) from None
        except errors.RevisionNotFoundError:
            raise TemperaError(
                f"the hub repository {self.id} has no revision {self.revision}: give a commit, "
                f"branch or tag that {self.page} lists, or leave it out."
            ) from None
        except errors.RepositoryNotFoundError:
            raise TemperaError(
                f"there is no {self.kind} {self.id} on the hub, or it is private: check the name, "
                "or log in with `hf auth login`."
            ) from None
        except errors.RemoteEntryNotFoundError:
            raise TemperaError(
                f"the hub repository {self.id} has no file {patterns[0]}: see {self.page}."
            ) from None
        except Exception as problem:  # the hub's HTTP library has exceptions of its own
            if is_unwritable(problem):
                raise unwritable(Path(constants.HF_HUB_CACHE), problem) from None
            raise CannotReach(self, patterns, reason(problem)) from None
