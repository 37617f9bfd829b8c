"""Files of the hub, against one on loopback: downloaded once, read offline, and refused in one
sentence.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hub import Hub

from tempera.errors import TemperaError
from tempera.runtime.hub import Repository

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


def closed(hub: Hub) -> None:
    hub.add("owner/name", FILES, kind="datasets", gate="closed")


REFUSED: dict[str, tuple[Callable[[Hub], object], str]] = {
    "gated": (closed, "of the hub is gated, and you are not logged in: accept its conditions at "
              "https://huggingface.co/datasets/owner/name, log in with `hf auth login`"),
    "missing": (lambda hub: None, "the dataset owner/name of the hub does not exist or is private"),
    "revision": (lambda hub: hub.add("owner/name", FILES, kind="datasets"),
                 "owner/name of the hub has no revision v9: see https://"),
    "file": (lambda hub: hub.add("owner/name", FILES, kind="datasets"), "has no file no.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name: str, hub: Hub) -> None:
    prepare, words = REFUSED[name]
    prepare(hub)
    repository = Repository("owner/name", "dataset", "v9" if name == "revision" else None)
    with pytest.raises(TemperaError) as problem:
        repository.file("no.json")
    assert words in str(problem.value) and "\n" not in str(problem.value)


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
    wanted = (
        r"owner/name is not in the hub's cache, and the hub cannot be reached \(.*\): on a machine "
        r'with a network run `hf download owner/name --repo-type dataset --include "data/\*"`, and '
        r"copy the cache directory \(HF_HUB_CACHE\) here"
    )
    with pytest.raises(TemperaError, match=wanted):
        REPOSITORY.snapshot(["data/*"])
    with pytest.raises(TemperaError, match="is not in the hub's cache"):
        REPOSITORY.commit()


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (TimeoutError(), r"the hub cannot be reached \(TimeoutError\)"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write .*free some space"),
    ],
)
def test_a_full_disk_and_an_error_without_text(
    problem: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=problem))
    with pytest.raises(TemperaError, match=words):
        REPOSITORY.file("config.json")
