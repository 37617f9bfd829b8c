"""LAION-COCO from a hub and an image server on loopback, with every trouble that the web has: pairs
in a seeded order, whole after a kill, fetched once.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub
from image_server import ImageServer, jpeg
from loopback import Answer
from PIL import Image

from tempera.data import downloads, laion_coco
from tempera.data.downloads import Limits, download, is_open, usable
from tempera.data.entries import Entry
from tempera.data.laion_coco import LaionCoco
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.image_decoding import decode_picture

pytestmark = pytest.mark.slow
ALONE = Processes(cpu=True)
TROUBLE = {
    "good/a": None, "redirect/a": None, "missing/a": "HTTP 404", "hang/a": "Timeout",
    "slow/a": "Timeout", "html/a": "no image", "huge/a": "too large", "bomb/a": "no image",
    "noai/a": "training forbidden (X-Robots-Tag)", "cut/a": "RemoteProtocolError",
    "tiny/a": "too small",
}  # fmt: skip


OPEN = ("hang", "slow", "cut", "http:")
"""Trouble that may pass."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ImageServer() as started:
        assert isinstance(started, ImageServer)
        yield started


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "cache") as started:
        assert isinstance(started, Hub)
        started.here(monkeypatch)
        yield started


LIMITS: dict[str, Any] = {
    "concurrency": 8,
    "timeout": 5.0,
    "retries": 0,
    "max_bytes": 20_000_000,
    "min_side": 8,
    "size": 768,
    "robots": True,
}


def test_every_trouble_has_its_kind_and_the_rest_arrives(web: ImageServer) -> None:
    changed = {"timeout": 0.8, "max_bytes": 1_000_000, "size": 32}
    limits = Limits(**LIMITS | changed)
    others = {"http://127.0.0.1:1/x": "ConnectError", "x": "UnsupportedProtocol"}
    addresses = [*(f"{web.url}/{path}" for path in TROUBLE), *others]
    outcomes = download(addresses, limits)
    for found, told in zip(outcomes, [*TROUBLE.values(), *others.values()], strict=True):
        assert isinstance(found, bytes) if told is None else told in getattr(found, "kind", "")
    for found, told in zip(outcomes, [*TROUBLE, *others], strict=True):
        assert is_open(found) == (told.partition("/")[0] in OPEN), told
    image = Image.open(io.BytesIO(outcomes[0]))  # type: ignore[arg-type]
    assert image.format == "JPEG" and min(image.size) == 32
    kept = usable(jpeg(size=(48, 40)), Limits(**LIMITS))
    assert isinstance(kept, bytes) and Image.open(io.BytesIO(kept)).size == (48, 40)
    robots = Limits(**LIMITS | {"robots": False})
    assert isinstance(download([f"{web.url}/noai/a"], robots)[0], bytes)


def table(addresses: list[str]) -> bytes:
    file = io.BytesIO()
    count = range(len(addresses))
    content = {"URL": addresses, "TEXT": [f"alt {n}" for n in count],
               "top_caption": [f"a picture of {address}" for address in addresses]}  # fmt: skip
    pq.write_table(pa.table(content), file, row_group_size=7)
    return file.getvalue()


def fill(hub: Hub, web: ImageServer) -> None:
    """Three files of 20 rows; every fifth image is missing."""
    files = {}
    for file in range(3):
        kinds = ["missing" if number % 5 == 0 else "good" for number in range(20)]
        addresses = [f"{web.url}/{kind}/{file}-{n}" for n, kind in enumerate(kinds)]
        files[f"part-{file}.snappy.parquet"] = table(addresses)
    hub.add("laion/relaion-coco", files, kind="datasets")


def source(tmp_path: Path, **options: Any) -> LaionCoco:
    usual = {"repository": "laion/relaion-coco", "limit": 20, "shard_size": 10, "seed": 0}
    return LaionCoco(images=str(tmp_path / "images"), **LIMITS | usual | options)


def captions(source: LaionCoco, start: int = 0) -> list[str]:
    entries = list(source.read(start))
    for entry in entries:
        assert isinstance(entry, Entry) and isinstance(entry.image, bytes)
        red = sum(urlsplit(entry.where).path.encode()) % 256  # of the server's image at this place
        assert decode_picture(entry.image).getpixel((9, 9))[0] == pytest.approx(red, abs=9)
    return [entry.caption for entry in entries]  # type: ignore[union-attr]


def test_pairs_are_downloaded_until_there_are_enough_and_once(
    hub: Hub, web: ImageServer, tmp_path: Path, monkeypatch: Any
) -> None:
    fill(hub, web)
    pairs = source(tmp_path)
    assert pairs.count() is None
    pairs.fetch(ALONE)
    found = captions(pairs)
    assert pairs.count() == 20 == len(set(found))
    assert all(captions(pairs, start) == found[start:] for start in (7, 8, 15, 20, 21))
    commit = hub.repositories["datasets", "laion/relaion-coco"].names["main"]
    assert pairs.describe()["commit"] == commit
    before = len(web.requests), len(hub.requests)
    hub.here(monkeypatch, offline=True)
    again = source(tmp_path)
    again.fetch(ALONE)
    assert captions(again) == found
    assert (len(web.requests), len(hub.requests)) == before  # nothing twice
    assert len(web.paths()) == len(set(web.paths()))
    with pytest.raises(TemperaError, match="cannot be reached"):
        source(tmp_path / "other", repository="owner/other").fetch(ALONE)
    with pytest.raises(TemperaError, match="made with seed=0"):
        source(tmp_path, seed=1).fetch(ALONE)
    shard = tmp_path / "images" / "00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(TemperaError, match=r"00001\.parquet cannot be read"):
        again.fetch(ALONE)


def test_a_killed_download_goes_on_and_ends_the_same(
    hub: Hub, web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, web)
    whole = source(tmp_path / "whole", limit=40)
    whole.fetch(ALONE)
    done: list[int] = []

    def killed(*arguments: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return download(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(laion_coco, "download", killed)
        with pytest.raises(KeyboardInterrupt):
            source(tmp_path / "cut", limit=40).fetch(ALONE)
    web.requests.clear()
    old = hub.repositories["datasets", "laion/relaion-coco"].names["main"]
    hub.add("laion/relaion-coco", {"new.parquet": table([f"{web.url}/good/new"])}, kind="datasets")
    again = source(tmp_path / "cut", limit=40)
    again.fetch(ALONE)
    assert captions(again) == captions(whole)
    assert len(web.paths()) == 40  # the four shards that were missing
    named = source(tmp_path / "named", limit=40, revision=old)
    named.fetch(ALONE)
    assert captions(named) == captions(whole)
    for file in sorted((tmp_path / "whole" / "images").glob("*.parquet")):
        assert file.read_bytes() == (tmp_path / "cut" / "images" / file.name).read_bytes()


def test_rows_are_a_function_of_the_files_and_the_seed(web: ImageServer, tmp_path: Path) -> None:
    for name in ("b", "a"):
        addresses = [f"{web.url}/good/{name}{n}" for n in range(12)]
        (tmp_path / f"{name}.PARQUET").write_bytes(table(addresses))
    found = []
    for seed in (0, 1):
        pairs = source(
            tmp_path / str(seed), path=str(tmp_path), caption="TEXT", seed=seed, limit=None
        )
        pairs.fetch(ALONE)
        found.append([entry.where for entry in pairs.read(0) if isinstance(entry, Entry)])
        assert pairs.count() == 24 and all(text.startswith("alt") for text in captions(pairs))
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1]) != found[0]
    with pytest.raises(TemperaError, match=r"link.*source\.url="):
        source(tmp_path / "x", path=str(tmp_path), url="link").fetch(ALONE)


def test_without_any_image_it_stops(web: ImageServer, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(table([f"{web.url}/missing/{n}" for n in range(5)]))
    with pytest.raises(TemperaError, match=r"could be downloaded \(5 images.*\(HTTP 404\)\)"):
        source(tmp_path, path=str(tmp_path)).fetch(ALONE)


def listed(place: Path, *addresses: str) -> dict[str, Any]:
    """Options of a list of these addresses, in shards of ten."""
    (place / "list").mkdir(exist_ok=True)
    (place / "list" / "a.parquet").write_bytes(table(list(addresses)))
    return {"path": str(place / "list"), "limit": None, "shard_size": 10}


def paths(pairs: LaionCoco) -> list[str]:
    return [entry.where for entry in pairs.read(0) if isinstance(entry, Entry)]


DOWN = {
    "it closes connections": Answer(200, {"Content-Type": "image/jpeg"}, b"some", cut=0),
    "a gateway answers for it": Answer(503),
}


@pytest.mark.parametrize("how", DOWN)
def test_an_outage_stops_and_loses_nothing(how: str, web: ImageServer, tmp_path: Path) -> None:
    """A server answers no more after 25 images, and comes back."""
    options = listed(tmp_path, *(f"{web.url}/good/{number}" for number in range(40)))
    usual = web.answer
    web.answer = lambda asked: usual(asked) if len(web.requests) <= 25 else DOWN[how]
    with pytest.raises(TemperaError, match="do not answer.*run the command again"):
        source(tmp_path, **options).fetch(ALONE)
    assert len(paths(source(tmp_path, **options))) == 20
    web.answer = usual
    web.requests.clear()
    source(tmp_path, **options).fetch(ALONE)
    assert len(set(paths(source(tmp_path, **options)))) == 40
    assert len(web.paths()) == 20  # of the shards that were not there
    source(tmp_path, **options).fetch(ALONE)
    assert len(web.paths()) == 20


def test_the_first_answer_may_be_none(
    web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.01)
    options = listed(tmp_path, *(f"{web.url}/good/{number}" for number in range(10)))
    usual = web.answer
    web.answer = lambda asked: usual(asked) if web.paths().count(asked.path) > 2 else Answer(429)
    source(tmp_path, retries=2, **options).fetch(ALONE)
    assert len(paths(source(tmp_path, **options))) == 10


def test_what_did_not_answer_is_asked_again_and_comes_last(
    web: ImageServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two servers is down, while the other has most images, and lacks some for good."""
    with ImageServer() as other:
        kinds = ["missing" if number % 5 == 0 else "good" for number in range(30)]
        addresses = [f"{web.url}/{kind}/{number}" for number, kind in enumerate(kinds)]
        options = listed(tmp_path, *addresses, *(f"{other.url}/good/{n}" for n in range(6)))
        usual = other.answer
        other.answer = lambda asked: DOWN["a gateway answers for it"]
        first = source(tmp_path, **options)
        first.fetch(ALONE)
        found = paths(first)
        assert len(found) == 24
        assert first.left_out == {
            "images not downloaded (HTTP 404)": 6, "images not downloaded (HTTP 503)": 6
        }  # fmt: skip
        assert "6 images are missing because" in capsys.readouterr().out
        source(tmp_path, **options | {"limit": 24}).fetch(ALONE)  # which are there
        web.requests.clear()
        source(tmp_path, **options).fetch(ALONE)  # it is still down
        other.answer = usual
        again = source(tmp_path, **options)
        again.fetch(ALONE)
        assert paths(again)[:24] == found and len(set(paths(again))) == 30
        assert again.left_out == {"images not downloaded (HTTP 404)": 6}
        other.requests.clear()
        again.fetch(ALONE)
        assert not other.requests and not set(web.paths()) - {urlsplit(at).path for at in found}


def test_an_edited_list_is_noticed(web: ImageServer, tmp_path: Path) -> None:
    source(tmp_path, **listed(tmp_path, f"{web.url}/good/1")).fetch(ALONE)
    with pytest.raises(TemperaError, match="made with fingerprint="):
        source(tmp_path, **listed(tmp_path, f"{web.url}/good/2")).fetch(ALONE)
