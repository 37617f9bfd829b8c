"""Files of the hub, against one on loopback: downloaded once, read offline, and refused in one
sentence.
"""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from unittest.mock import Mock

import huggingface_hub
import pytest
from filelock import FileLock
from hub import Hub
from huggingface_hub import file_download

from tempera.config.messages import sentence
from tempera.errors import TemperaError
from tempera.runtime import hub as runtime_hub
from tempera.runtime import waiting
from tempera.runtime.hub import CannotReach, Repository, together

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "cache") as server:
        server.here(monkeypatch)
        yield server


FILES = {"config.json": '{"a": 1}', "data/val-0.parquet": b"x" * 5000, "data/train-0.parquet": b"t"}
REPOSITORY = Repository("owner/name", "dataset")


def test_a_snapshot_holds_the_files_asked_for_and_is_fetched_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("owner/name", FILES, kind="datasets")
    place = REPOSITORY.snapshot(["data/val-*"])
    assert place.name == commit == REPOSITORY.commit()
    assert (place / "data/val-0.parquet").read_bytes() == b"x" * 5000
    assert not (place / "config.json").exists()
    assert REPOSITORY.files("data/*") == ["data/train-0.parquet", "data/val-0.parquet"]
    assert REPOSITORY.snapshot(["data/val-*"]) == place
    assert hub.downloads() == ["data/val-0.parquet"]
    hub.here(monkeypatch, offline=True)
    before = len(hub.requests)
    assert REPOSITORY.snapshot(["data/val-*"]) == place
    assert REPOSITORY.file("data/val-0.parquet") == place / "data/val-0.parquet"
    assert REPOSITORY.commit() == commit
    assert Repository("owner/name", "dataset", commit).commit() == commit
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ("name", "revision", "gate", "words"),
    [
        ("owner/name", None, "closed", "is gated, and you are not logged in"),
        ("owner/none", None, None, "owner/none on the hub does not exist or is private"),
        ("owner/name", "v9", None, "has no revision v9"),
        ("owner/name", None, None, "has no file no.json"),
    ],
)
def test_refused_in_one_sentence(
    name: str, revision: str | None, gate: str | None, words: str, hub: Hub
) -> None:
    hub.add("owner/name", FILES, kind="datasets", gate=gate)
    with pytest.raises(TemperaError, match=words):
        Repository(name, "dataset", revision).file("no.json")


def test_a_token_without_access_is_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", FILES, kind="datasets", gate="good")
    monkeypatch.setenv("HF_TOKEN", "other")
    with pytest.raises(TemperaError, match="this account has no access yet: accept"):
        REPOSITORY.file("config.json")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert REPOSITORY.file("config.json").read_text() == '{"a": 1}'


def test_without_a_network_and_a_cache_the_command_is_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.here(monkeypatch, offline=True)
    command = r'`hf download owner/name --repo-type dataset --include "data/\*"`'
    with pytest.raises(TemperaError, match=f"owner/name is not in the hub's cache.*{command}"):
        REPOSITORY.snapshot(["data/*"])


def test_a_hub_that_does_not_answer_is_asked_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/name", FILES, kind="datasets")
    cached = REPOSITORY.file("config.json")
    monkeypatch.setattr(runtime_hub, "PATIENCE", 0.2)
    monkeypatch.setattr(runtime_hub, "_ASKED", {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", place)
        assert REPOSITORY.file("config.json") == cached
        assert REPOSITORY.to_download(["config.json"]) == 0
        other = Repository("owner/other")
        for ask in (other.snapshot, other.check, other.to_download):
            with pytest.raises(CannotReach, match=f"{place} has not answered in 0.2 seconds"):
                ask(["x"])
        with pytest.raises(CannotReach, match="has not answered"):
            other.files("*")
        silent.settimeout(0)
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_what_cannot_be_downloaded_is_one_sentence_and_a_command_for_each_repository() -> None:
    first, second = Repository("a/b"), Repository("c/d", revision="main")
    problems = [
        CannotReach(first, ["x"], "it is down"),
        CannotReach(second, ["y"], "it is down"),
        CannotReach(first, ["x", "z"], "it is down"),
        TemperaError("there is no directory e."),
    ]
    said, *commands = str(sentence(together(problems), "eval", [])).splitlines()
    assert said.startswith("there is no directory e; 2 repositories are not in the hub's cache")
    assert [line.strip() for line in commands] == [
        'hf download a/b --include "x" --include "z"',
        'hf download c/d --revision main --include "y"',
    ]
    one = str(together([problems[0], *problems[2:]]))
    assert "\n" not in one and one.count("a/b is not in the hub's cache") == 1
    assert '`hf download a/b --include "x" --include "z"`' in one


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (TimeoutError(), r"the hub cannot be reached \(TimeoutError\)"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write .*free some space"),
    ],
)
def test_a_full_disk_and_an_error_without_text(
    problem: Exception, words: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=problem))
    with pytest.raises(TemperaError, match=words):
        REPOSITORY.file("config.json")


def test_the_hub_library_keeps_its_own_lock_which_is_waited_for_aloud(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library belongs to the whole process: a host program downloads with it, too."""
    monkeypatch.setattr(waiting, "SILENCE", 0.05)
    hub.add("owner/name", FILES, kind="datasets")
    place = REPOSITORY.file("config.json")
    assert file_download.WeakFileLock is huggingface_hub.utils.WeakFileLock
    blob = place.resolve()
    place.unlink()
    lock = FileLock(
        hub.cache / ".locks" / blob.parents[1].name / f"{blob.name}.lock", thread_local=False
    )
    lock.acquire()
    Timer(0.5, lock.release).start()
    assert REPOSITORY.file("config.json").read_text() == FILES["config.json"]
    assert not lock.is_locked
    assert "waiting for owner/name on the hub, or a process that downloads it" in (
        capsys.readouterr().err
    )
