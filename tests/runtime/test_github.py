"""Pinned files of GitHub: from a loopback server that gives a repository's archive."""

import io
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from loopback import Answer, Request, Server

from tempera.errors import TemperaError
from tempera.runtime import github
from tempera.runtime.github import Pinned, git_id

FILES = {"data/b.txt": b"two\n", "data/a-1.txt": b"", "data/a.txt": b"one\n", "README.md": b"# x\n"}


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in {**FILES, "data/deep/c.txt": b"three"}.items():
            member = tarfile.TarInfo(f"repo-abc/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def folder(place: Path) -> Path:
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def test_ids_are_those_of_git(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    place = folder(tmp_path)
    run = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(place)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*run, *arguments], check=True)
    for path in ("data", "README.md"):
        command = [*run, "rev-parse", f"HEAD:{path}"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert git_id(place / path) == told.strip()


def test_downloaded_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = archive()
    data = git_id(folder(tmp_path / "here") / "data")
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "cache"))
    pinned = Pinned("a/b", "c0ffee", "data", data)

    def answer(request: Request) -> Answer:
        return Answer(200, {}, body) if request.path.startswith("/a/b/tar.gz/") else Answer(404)

    with Server(answer) as server:
        monkeypatch.setattr(github, "HOST", server.url)
        with pytest.raises(TemperaError, match="HF_HUB_OFFLINE"):  # no request of any kind
            pinned.local()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        huggingface_hub.utils.close_session()  # it was made for no requests
        first = pinned.local()
        assert sorted(file.name for file in first.iterdir()) == ["a-1.txt", "a.txt", "b.txt"]
        readme = Pinned("a/b", "c0ffee", "README.md", git_id(tmp_path / "here/README.md"))
        assert readme.local().read_text() == "# x\n"
        with pytest.raises(TemperaError, match="contains no nothing.md"):
            replace(readme, path="nothing.md").local()
        with pytest.raises(TemperaError, match=r"404.*give data.path=PATH"):
            replace(readme, repository="a/c", git_id="0" * 40).local()
        changed = replace(pinned, git_id="1" * 40)
        with pytest.raises(TemperaError, match=rf"{data[:12]}, not 111111111111"):
            changed.local()
    assert pinned.local() == first  # without the server
    (first / "a.txt").write_text("edited")
    with pytest.raises(TemperaError, match="delete it"):
        pinned.local()
