"""Files on Hugging Face's hub: downloaded once into its cache and then read without a network.
Every failure is reported in one sentence. Before its library asks a hub that does not answer, which
it does for a minute and for each file, one short request tells.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import tqdm

from tempera.errors import TemperaError
from tempera.runtime.files import is_unwritable, reason, unwritable
from tempera.runtime.waiting import waiting

PATIENCE = 10.0
"""Seconds in which a server must answer anything at all."""
REMEMBERED = 60.0
"""Seconds for which an answer, or that there was none, holds."""
_ASKED: dict[str, tuple[float, str | None]] = {}
"""By address: when it was asked, and why it cannot be reached."""


def unreachable(address: str | None = None) -> str | None:
    """Why an address, by default the hub's, cannot be reached; None if it can. It is asked once."""
    if huggingface_hub.is_offline_mode():  # its user wants no requests of any kind
        return "HF_HUB_OFFLINE is set"
    address = address or constants.ENDPOINT
    asked, why = _ASKED.get(address, (-math.inf, None))
    if time.monotonic() - asked >= REMEMBERED:
        with waiting(f"{address} to answer"):
            why = _asked(address)
        _ASKED[address] = time.monotonic(), why
    return why


def _asked(address: str) -> str | None:
    """Why there is no answer, after at most `PATIENCE`: a name is looked up, and each of its
    addresses tried, without regard to a client's limits.
    """
    answers: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        try:
            huggingface_hub.get_session().head(address, timeout=PATIENCE)
            answers.put(None)  # any answer will do
        except Exception as problem:  # the hub's HTTP library has exceptions of its own
            answers.put(reason(problem))

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE)
    except Empty:
        return f"{address} has not answered in {PATIENCE:g} seconds"


class CannotReach(TemperaError):
    """Files are not cached and cannot be downloaded.

    Attributes:
        repository: of the hub.
        patterns: the files' names or patterns.
        why: why the hub cannot be reached.
    """

    def __init__(self, repository: "Repository", patterns: Sequence[str], why: str) -> None:
        super().__init__(
            f"{repository.id} is not in the hub's cache, and the hub cannot be reached ({why}): on "
            f"a machine with a network run `{repository.command(patterns)}`, and copy the cache "
            "directory (HF_HUB_CACHE) here."
        )
        self.repository = repository
        self.patterns = patterns
        self.why = why


class _Bars(tqdm):
    """Bars of downloaded bytes. That of the number of files shows for cached ones too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if "Fetching" in str(options.get("desc")):
            options["disable"] = True
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


def together(problems: Sequence[TemperaError]) -> TemperaError:
    """One error for several, with the details of all; what cannot be downloaded from one repository
    is one command.
    """
    if len(problems) == 1:
        return problems[0]
    patterns: dict[Repository, list[str]] = {}
    others: list[TemperaError] = []
    for problem in problems:
        if isinstance(problem, CannotReach):
            patterns.setdefault(problem.repository, []).extend(problem.patterns)
            why = problem.why
        else:
            others.append(problem)
    lacking = {repository: list(dict.fromkeys(names)) for repository, names in patterns.items()}
    if len(lacking) < 2:
        others += [CannotReach(repository, names, why) for repository, names in lacking.items()]
    details = [line for problem in others for line in problem.details]
    sentences = dict.fromkeys(_without_details(problem).rstrip(".") for problem in others)
    if len(lacking) < 2:
        return TemperaError("; ".join(sentences) + ".", details=details)
    several = (
        f"{len(lacking)} repositories are not in the hub's cache, and the hub cannot be reached "
        f"({why}): on a machine with a network run these commands, and copy the cache directory "
        "(HF_HUB_CACHE) here"
    )
    commands = [repository.command(names) for repository, names in lacking.items()]
    return TemperaError("; ".join([*sentences, several]) + ":", details=[*commands, *details])


def _without_details(problem: TemperaError) -> str:
    return str(problem).removesuffix("\n  ".join(["", *problem.details]))


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

    @classmethod
    def named(cls, name: str) -> "Repository | None":
        """The model repository `owner/name` or `owner/name@revision`; None for anything else."""
        found = re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(?:@(.+))?", name)
        return cls(found[1], revision=found[2]) if found else None

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

    def commit(self) -> str:
        """The commit that `revision` refers to now; without a network, the last one known.

        Raises:
            TemperaError: here and below, the repository cannot be read or lacks what is asked for.
        """
        return self.snapshot(["README.md"]).name

    def files(self, pattern: str) -> list[str]:
        """Names of the files that match a pattern, in order; needs a network."""
        self._need_network([pattern])
        with self._in_one_sentence([pattern]):
            names = huggingface_hub.HfApi().list_repo_files(self.id, **self._options)
        return sorted(name for name in names if fnmatch(name, pattern))

    def file(self, name: str) -> Path:
        """One file, downloaded unless the cache has it."""
        options = self._options | _local()
        with self._in_one_sentence([name]):
            return Path(huggingface_hub.hf_hub_download(self.id, name, **options))

    def size(self, name: str) -> int:
        """Bytes of a file that is cached or that the hub offers; downloads nothing."""
        if (cached := self.cached(name)) is not None:
            return cached.stat().st_size
        self._need_network([name])
        with self._in_one_sentence([name]):
            found = huggingface_hub.hf_hub_download(self.id, name, **self._options, dry_run=True)
        return found.file_size or 0

    def cached(self, name: str) -> Path | None:
        """One file in the cache; None if it is not there. Sends no requests."""
        found = huggingface_hub.try_to_load_from_cache(self.id, name, **self._options)
        return Path(found) if isinstance(found, str) else None

    def snapshot(self, patterns: Sequence[str]) -> Path:
        """A directory with all files that match the patterns, downloaded unless the cache has them.
        Its name is the commit.
        """
        return Path(self._snapshot(patterns))

    def check(self, patterns: Sequence[str]) -> None:
        """Raise TemperaError unless the cache has these files, or the hub would give them."""
        try:
            self._snapshot(patterns, local_files_only=True)
        except CannotReach:
            if unreachable():
                raise
            self.to_download(patterns)

    def to_download(self, patterns: Sequence[str]) -> int:
        """Bytes of these files that the cache lacks; downloads nothing."""
        if unreachable():
            self._snapshot(patterns)
            return 0
        files = self._snapshot(patterns, dry_run=True)
        return sum(file.file_size or 0 for file in files if file.will_download)

    def _snapshot(self, patterns: Sequence[str], **options: Any) -> Any:
        options = self._options | _local() | options
        with self._in_one_sentence(patterns):
            return huggingface_hub.snapshot_download(
                self.id, allow_patterns=list(patterns), tqdm_class=_Bars, **options
            )

    def _need_network(self, patterns: Sequence[str]) -> None:
        """Raise CannotReach without one."""
        if (why := unreachable()) is not None:
            raise CannotReach(self, patterns, why)

    def check_upload(self) -> None:
        """Raise TemperaError unless somebody is logged in who can upload."""
        try:
            huggingface_hub.whoami()
        except Exception as problem:  # the hub's HTTP library has exceptions of its own
            raise TemperaError(
                f"cannot upload to {self.id} ({reason(problem)}): log in with `hf auth login` and "
                "a token with write access, or leave push_to_hub out."
            ) from None

    def upload(self, directory: Path) -> None:
        """Make the repository unless it exists, and commit the files of a directory to it.

        Raises:
            TemperaError: the hub cannot be reached or refuses.
        """
        try:
            huggingface_hub.create_repo(self.id, exist_ok=True)
            huggingface_hub.upload_folder(repo_id=self.id, folder_path=directory)
        except Exception as problem:
            raise TemperaError(
                f"{directory} could not be uploaded ({reason(problem)}): run `hf upload {self.id} "
                f"{directory}`, or run the same command again, which then only uploads."
            ) from None

    @property
    def _options(self) -> dict[str, Any]:
        return {"repo_type": self.kind, "revision": self.revision}

    @contextmanager
    def _in_one_sentence(self, patterns: Sequence[str]) -> Iterator[None]:
        try:
            with waiting(f"{self.id} on the hub, or a process that downloads it"):
                yield
        except TemperaError:
            raise
        except Exception as problem:  # the hub's HTTP library has exceptions of its own
            if is_unwritable(problem):
                raise unwritable(Path(constants.HF_HUB_CACHE), problem) from None
            token = huggingface_hub.get_token()
            who = "this account has no access yet" if token else "you are not logged in"
            for kind, sentence in {
                errors.GatedRepoError: (
                    f"is gated, and {who}: accept its conditions at {self.page}, log in with `hf "
                    "auth login`, and run the command again"
                ),
                errors.RevisionNotFoundError: f"has no revision {self.revision}: see {self.page}",
                errors.RepositoryNotFoundError: "does not exist or is private: check the name, or "
                "log in with `hf auth login`",
                errors.RemoteEntryNotFoundError: f"has no file {patterns[0]}: see {self.page}",
            }.items():
                # a dry run wraps what the hub answered
                if any(isinstance(one, kind) for one in (problem, problem.__cause__)):
                    raise TemperaError(
                        f"the {self.kind} {self.id} on the hub {sentence}."
                    ) from None
            raise CannotReach(self, patterns, unreachable() or reason(problem)) from None


def _local() -> dict[str, bool]:
    """What keeps the hub's library to its cache, while the hub cannot be reached."""
    return {"local_files_only": unreachable() is not None}
