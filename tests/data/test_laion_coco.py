"""LAION-COCO from a hub and an image server on loopback: pairs in a seeded order, whole after a
kill, fetched once.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub
from image_server import ImageServer

from tempera.data import laion_coco
from tempera.data.laion_coco import AddressTable, LaionCoco
from tempera.data.sources import Entry
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes

pytestmark = pytest.mark.slow
ALONE = Processes(cpu=True)


def table(addresses: list[str], rows_per_group: int = 7, **columns: list[str]) -> bytes:
    file = io.BytesIO()
    captions = [f"a picture of {address}" for address in addresses]
    content = {"URL": addresses, "TEXT": [f"alt {n}" for n in range(len(addresses))],
               "top_caption": captions, **columns}  # fmt: skip
    pq.write_table(pa.table(content), file, row_group_size=rows_per_group)
    return file.getvalue()


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


def fill(hub: Hub, web: ImageServer, gate: str | None = None) -> None:
    """Three files of 20 rows; every fifth image is missing."""
    files = {}
    for file in range(3):
        kinds = ["missing" if number % 5 == 0 else "good" for number in range(20)]
        addresses = [f"{web.url}/{kind}/{file}-{n}" for n, kind in enumerate(kinds)]
        files[f"part-{file}.snappy.parquet"] = table(addresses)
    hub.add("laion/relaion-coco", files, kind="datasets", gate=gate)


def source(tmp_path: Path, **options: Any) -> LaionCoco:
    chosen = {"limit": 20, "shard_size": 10, "min_side": 8, "timeout": 5.0, **options}
    return LaionCoco(images=str(tmp_path / "images"), **chosen)


def captions(source: LaionCoco, start: int = 0) -> list[str]:
    entries = list(source.read(start))
    assert all(isinstance(entry, Entry) and entry.image for entry in entries)
    return [entry.caption for entry in entries]  # type: ignore[union-attr]


def test_pairs_are_downloaded_until_there_are_enough(
    hub: Hub, web: ImageServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(hub, web)
    pairs = source(tmp_path)
    assert pairs.count() is None
    pairs.fetch(ALONE)
    assert pairs.count() == 20 == len(set(captions(pairs)))
    assert captions(pairs, 15) == captions(pairs)[15:]
    assert "URLs skipped: HTTP 404" in capsys.readouterr().out
    described = pairs.describe()
    assert described["commit"] == hub.repositories["datasets", "laion/relaion-coco"].names["main"]
    before = len(web.requests), len(hub.requests)
    source(tmp_path).fetch(ALONE)
    assert (len(web.requests), len(hub.requests)) == before  # nothing twice
    assert len(web.paths()) == len(set(web.paths()))


def test_the_images_to_store_are_as_large_as_those_that_are_here(
    hub: Hub, web: ImageServer, tmp_path: Path
) -> None:
    fill(hub, web)
    images = tmp_path / "images"
    assert source(tmp_path, limit=None).to_store() == {}
    assert source(tmp_path, size=100).to_store() == {images: 20 * 100 * 100 * 0.36 * 4 / 3}
    assert not images.exists() and not hub.requests
    pairs = source(tmp_path)
    pairs.fetch(ALONE)
    assert pairs.to_store() == {}
    tars, here = list(images.glob("*.tar")), pairs._pairs(pairs._shards())
    each = sum(tar.stat().st_size for tar in tars) / here
    assert source(tmp_path, limit=here + 10).to_store() == {images: round(10 * each)}


def test_another_seed_gives_other_pairs(hub: Hub, web: ImageServer, tmp_path: Path) -> None:
    fill(hub, web)
    found = []
    for seed in (0, 1):
        pairs = source(tmp_path / str(seed), seed=seed)
        pairs.fetch(ALONE)
        found.append(captions(pairs))
    assert found[0] != found[1]
    with pytest.raises(TemperaError, match=r"holds images of another seed \(0, now 1\)"):
        source(tmp_path / "0", seed=1).fetch(ALONE)


def test_a_killed_download_goes_on_and_ends_the_same(
    hub: Hub, web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, web)
    whole = source(tmp_path / "whole", limit=40)
    whole.fetch(ALONE)
    done = []

    def killed(*arguments: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        write(*arguments)

    write = laion_coco._write_tar
    with monkeypatch.context() as patch:
        patch.setattr(laion_coco, "_write_tar", killed)
        with pytest.raises(KeyboardInterrupt):
            source(tmp_path / "cut", limit=40).fetch(ALONE)
    web.requests.clear()
    again = source(tmp_path / "cut", limit=40)
    again.fetch(ALONE)
    assert captions(again) == captions(whole)
    assert len(web.paths()) == 30  # three of the five shards
    for file in sorted((tmp_path / "whole" / "images").glob("*.tar")):
        assert file.read_bytes() == (tmp_path / "cut" / "images" / file.name).read_bytes()


def test_it_is_read_without_a_network_once_it_is_there(
    hub: Hub, web: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, web)
    source(tmp_path).fetch(ALONE)
    hub.here(monkeypatch, offline=True)
    again = source(tmp_path)
    again.fetch(ALONE)
    assert again.count() == 20
    with pytest.raises(TemperaError, match="cannot be reached .* and .* holds no images yet"):
        source(tmp_path / "other", repository="owner/other").fetch(ALONE)


def test_what_it_reads_is_a_function_of_the_files_and_the_seed(tmp_path: Path) -> None:
    files = {}
    for name in ("b", "a"):
        (tmp_path / f"{name}.parquet").write_bytes(table([f"{name}{n}" for n in range(20)]))
        files[name] = str(tmp_path / f"{name}.parquet")
    one, other = (
        AddressTable(list(files.values()), Path),
        AddressTable([*files.values()][::-1], Path),
    )
    rows = one.rows(0, 100)
    assert len(rows) == 40 == len({row.url for row in rows}) == len({row.key for row in rows})
    assert rows == other.rows(0, 100)
    assert [row for start in range(0, 40, 7) for row in other.rows(start, 7)] == rows
    assert [row.url for row in rows] != sorted(row.url for row in rows)


def test_local_files_and_columns(tmp_path: Path, web: ImageServer) -> None:
    (tmp_path / "a.parquet").write_bytes(table([f"{web.url}/good/{n}" for n in range(12)]))
    pairs = source(tmp_path, path=str(tmp_path), caption="TEXT", limit=None)
    pairs.fetch(ALONE)
    assert pairs.count() == 12 and all(text.startswith("alt") for text in captions(pairs))
    wrong = source(tmp_path / "x", path=str(tmp_path), url="link")
    with pytest.raises(TemperaError, match=r"no column 'link' \(it has URL, TEXT, top_caption\)"):
        wrong.fetch(ALONE)


def test_a_gate_says_how_to_open_it_and_what_has_none(hub: Hub, web: Any, tmp_path: Path) -> None:
    fill(hub, web, gate="closed")
    with pytest.raises(TemperaError) as problem:
        source(tmp_path).fetch(ALONE)
    for words in ("is gated, and you are not logged in: accept its conditions at https://",
                  "not gated, with source.repository=Mayfull/laion-coco-1m"):  # fmt: skip
        assert words in str(problem.value)


def test_without_any_image_it_stops(web: ImageServer, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(table([f"{web.url}/missing/{n}" for n in range(5)]))
    with pytest.raises(TemperaError, match=r"no image of .* could be downloaded \(HTTP 404 5\)"):
        source(tmp_path, path=str(tmp_path)).fetch(ALONE)


def test_processes_share_the_shards(hub: Hub, web: ImageServer, tmp_path: Path) -> None:
    """The second of two makes every other shard, and no more."""
    fill(hub, web)
    source(tmp_path, limit=1).fetch(ALONE)  # the manifest and shard 0
    pairs = source(tmp_path, limit=16)
    assert pairs._download(pairs._table(ALONE), pairs._shards() + 1)
    names = sorted(path.name for path in (tmp_path / "images").glob("*.tar"))
    assert names == ["00000.tar", "00002.tar"] and pairs._shards() == 1
    pairs.fetch(ALONE)  # the other one fills the gap
    assert len(web.paths()) == len(set(web.paths())) == 30
