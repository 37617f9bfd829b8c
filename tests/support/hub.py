"""A Hugging Face hub on loopback: metadata and files of model and data set repositories, by
revision, with ETags, ranges and gates.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback import Answer, Request, Server

from tempera.data.benchmarks import COCO


@dataclass
class Repository:
    """One repository. gate: None, "closed" (no access), or a token that opens it."""

    id: str
    kind: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    gate: str | None = None

    def commit(self, revision: str) -> str | None:
        found = self.names.get(revision, revision)
        return found if found in self.commits else None


class Hub(Server):
    """The hub, with its cache."""

    def __init__(self, cache: Path) -> None:
        super().__init__(self._answer)
        self.cache, self.repositories = cache, dict[tuple[str, str], Repository]()

    def add(
        self,
        repository: str,
        files: Mapping[str, bytes | str | Path],
        kind: str = "models",
        revision: str = "main",
        gate: str | None = None,
    ) -> str:
        """A commit of the files under the revision's name; returns its hash."""
        content = {name: _bytes(value) for name, value in files.items()}
        digest = hashlib.sha1(repository.encode())
        for name, value in sorted(content.items()):
            digest.update(name.encode() + hashlib.sha1(value).digest())
        found = self.repositories.setdefault(
            (kind, repository), Repository(repository, kind, gate=gate)
        )
        found.commits[digest.hexdigest()] = content
        found.names[revision] = digest.hexdigest()
        return digest.hexdigest()

    def add_directory(self, repository: str, directory: Path, **options: str) -> str:
        """A commit of all files of a directory."""
        files = {
            path.relative_to(directory).as_posix(): path
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        return self.add(repository, files, **options)

    def add_captions(self) -> None:
        """80 of MS-COCO's captions, at the revision that is read."""
        numbers = list(range(80))
        texts = {"ids": [[n] for n in numbers], "captions": [[f"thing {n}"] for n in numbers]}
        table = parquet(image_id=numbers, **texts)
        files = {f"data/{split}-0.parquet": table for split in ("train", "validation")}
        commit = self.add(COCO.id, files, kind="datasets")
        repository = self.repositories["datasets", COCO.id]
        repository.commits[str(COCO.revision)] = repository.commits[commit]

    def add_pictures(self, web: Server) -> None:
        """120 of LAION-COCO's addresses, on a server of images that lacks an eighth of them."""
        kinds = ["missing" if number % 8 == 0 else "good" for number in range(120)]
        addresses = [f"{web.url}/{kind}/{number}" for number, kind in enumerate(kinds)]
        texts = [f"picture {number}" for number in range(120)]
        table = parquet(URL=addresses, TEXT=texts, top_caption=texts)
        self.add("laion/relaion-coco", {"data/part-0.parquet": table}, kind="datasets")

    @property
    def environment(self) -> dict[str, str]:
        """For a process of its own: this hub, with a cache of its own, online."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN_PATH": str(self.cache / "no-token"),
        }

    def here(self, monkeypatch: pytest.MonkeyPatch, offline: bool = False) -> None:
        """Use this hub in this process, which has read its environment already."""
        from huggingface_hub import constants

        values = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": offline,
            "HF_TOKEN_PATH": str(self.cache / "no-token"),
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)

    def downloads(self) -> list[str]:
        """Files that were fetched, each as often as it was."""
        return [unquote(path.partition("/resolve/")[2]).partition("/")[2] for path in self.paths()
                if "/resolve/" in path]  # fmt: skip

    def _answer(self, request: Request) -> Answer:
        path = unquote(urlsplit(request.path).path)
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path
        ):
            kind, name, what, revision, _ = match.groups()
            return self._about(request, kind, name, what or "revision", revision or "main")
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind = "datasets" if match[1] else "models"
            return self._file(request, kind, match[2], match[3], match[4])
        return _error(404, "EntryNotFound")

    def _open(
        self, request: Request, kind: str, name: str, revision: str
    ) -> tuple[Repository, str] | Answer:
        repository = self.repositories.get((kind, name))
        if repository is None:  # the real one hides private repositories so
            return _error(401, "RepoNotFound")
        commit = repository.commit(revision)
        return (repository, commit) if commit else _error(404, "RevisionNotFound")

    def _about(self, request: Request, kind: str, name: str, what: str, revision: str) -> Answer:
        opened = self._open(request, kind, name, revision)
        if isinstance(opened, Answer):
            return opened
        repository, commit = opened
        files = sorted(repository.commits[commit].items())
        if what == "tree":
            rows = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(body),
                    "oid": hashlib.sha1(body).hexdigest(),
                    "lfs": {"oid": _etag(body), "size": len(body), "pointerSize": 130},
                }
                for path, body in files
            ]
            return _json(rows)
        gated = "manual" if repository.gate else False
        siblings = [{"rfilename": path, "size": len(body)} for path, body in files]
        return _json(
            {"id": name, "sha": commit, "private": False, "gated": gated, "tags": [],
             "downloads": 0, "likes": 0, "siblings": siblings}
        )  # fmt: skip

    def _file(self, request: Request, kind: str, name: str, revision: str, path: str) -> Answer:
        opened = self._open(request, kind, name, revision)
        if isinstance(opened, Answer):
            return opened
        repository, commit = opened
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if repository.gate and given != repository.gate:
            return _error(403 if given else 401, "GatedRepo")
        body = repository.commits[commit].get(path)
        if body is None:
            return _error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        headers = {
            "X-Repo-Commit": commit, "ETag": f'"{_etag(body)}"', "X-Linked-Size": str(len(body)),
            "Accept-Ranges": "bytes",
        }  # fmt: skip
        status, first = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            first, last = int(match[1]), int(match[2] or len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        return Answer(status, headers, body)


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def _bytes(value: bytes | str | Path) -> bytes:
    if isinstance(value, Path):
        return value.read_bytes()
    return value.encode() if isinstance(value, str) else value


def _etag(body: bytes) -> str:
    """SHA-256, as of files in large-file storage: the cache names its files by it."""
    return hashlib.sha256(body).hexdigest()


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    said = {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}
    return Answer(status, said, json.dumps({"error": code}).encode())
