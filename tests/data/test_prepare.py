"""Sources → shards: every reader, broken entries, restarts and refusals."""

import csv
import gzip
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tqdm import tqdm

from tempera.data.encoders import Encoded, VQEncoder, to_pixels
from tempera.data.prepare import prepare
from tempera.data.shards import Manifest, read_shards
from tempera.data.sources import (
    Broken,
    CocoCaptions,
    Dataset,
    Entry,
    ImageFolder,
    ParquetShards,
    Source,
    TarShards,
    decoded,
)
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.scenes import WorldScenes

GRID = (2, 3)


def picture(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (12, 8), (value % 256, 40, 90)).save(buffer, "PNG")
    return buffer.getvalue()


class Counting:
    """Codes an entry by its caption's length; counts the entries it was given."""

    tokenizer, grid, vocab_size = "tok", GRID, 1000

    def __init__(self, fail_after: int | None = None) -> None:
        self.seen, self.fail_after = 0, fail_after

    def describe(self) -> dict[str, Any]:
        return {"kind": "counting"}

    def encode(self, entries: list[Entry]) -> Encoded:
        self.seen += len(entries)
        if self.fail_after is not None and self.seen > self.fail_after:
            raise KeyboardInterrupt
        return Encoded(
            entries, np.array([[len(entry.caption)] * 6 for entry in entries], np.int32), []
        )


class Captions:
    """Captions in memory; `None` is a broken entry."""

    def __init__(self, captions: list[str | None]) -> None:
        self.captions = captions

    def describe(self) -> dict[str, Any]:
        return {"kind": "captions", "count": len(self.captions)}

    def count(self) -> int | None:
        return len(self.captions)

    def read(self, start: int) -> Iterator[Entry | Broken]:
        for index, caption in list(enumerate(self.captions))[start:]:
            yield (
                Entry(f"line {index}", str(index), caption)
                if caption
                else Broken(f"line {index}", "no caption")
            )


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_interrupted_run_continues_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = Captions([f"caption {'x' * i}" if i % 5 else None for i in range(23)])
    prepare(
        source, Counting(), tmp_path / "whole", shard_size=6, batch_size=2, report=lambda line: None
    )
    with pytest.raises(KeyboardInterrupt):
        prepare(
            source,
            Counting(fail_after=12),
            tmp_path / "parts",
            shard_size=6,
            batch_size=2,
            report=lambda line: None,
        )
    assert not Manifest.load(tmp_path / "parts").complete
    with pytest.raises(TemperaError, match="unfinished"):
        read_shards(tmp_path / "parts", "tok", 1000, GRID)
    rest = Counting()
    prepare(source, rest, tmp_path / "parts", shard_size=6, batch_size=2, report=lambda line: None)
    assert rest.seen < 18
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_a_rerun_does_nothing_and_a_damaged_shard_is_rebuilt(tmp_path: Path) -> None:
    source = Captions([f"caption {i}" for i in range(10)])
    prepare(source, Counting(), tmp_path, shard_size=4)
    before = bytes_of(tmp_path)
    again = Counting()
    assert prepare(source, again, tmp_path, shard_size=4).count == 10
    assert again.seen == 0
    (tmp_path / "shard-00001.parquet").write_bytes(before["shard-00001.parquet"][:-7])
    with pytest.raises(TemperaError, match=r"shard-00001.parquet is damaged .*prepare.py"):
        read_shards(tmp_path, "tok", 1000, GRID)
    prepare(source, again, tmp_path, shard_size=4)
    assert bytes_of(tmp_path) == before
    (tmp_path / "shard-00002.parquet").unlink()
    with pytest.raises(TemperaError, match=r"shard-00002.parquet is missing"):
        read_shards(tmp_path, "tok", 1000, GRID)


def test_manifest_counts_and_shards_read_back(tmp_path: Path) -> None:
    source = Captions(["a", None, "bbb", "cc", None])
    lines: list[str] = []
    manifest = prepare(source, Counting(), tmp_path, shard_size=2, report=lines.append)
    assert (manifest.count, manifest.broken_count, manifest.complete) == (3, 2, True)
    assert manifest.broken == ("line 1: no caption", "line 4: no caption")
    assert lines == [f"skipped a broken entry: {line}" for line in manifest.broken]
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["tokenizer"] == "tok"
    assert content["count"] == 3
    assert [shard["count"] for shard in content["shards"]] == [1, 2, 0]
    images = read_shards(tmp_path, "tok", 1000, GRID)
    assert images.captions == ["a", "bbb", "cc"]
    assert images.codes[:, 0].tolist() == [1, 3, 2]
    assert (
        prepare(
            source, Counting(), tmp_path / "two", shard_size=2, limit=3, report=lines.append
        ).count
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other", 1000, GRID), "made with tokenizer tok, but the target's is other"),
        (("tok", 10, GRID), "2×3 codes below 1000, but the target draws 2×3 below 10"),
        (("tok", 1000, (3, 2)), "the target draws 3×2"),
    ],
)
def test_shards_for_another_target_are_refused(
    tmp_path: Path, arguments: tuple[Any, ...], message: str
) -> None:
    prepare(Captions(["a"]), Counting(), tmp_path)
    with pytest.raises(TemperaError, match=message):
        read_shards(tmp_path, *arguments)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match="it has no entries"):
        prepare(Captions([]), Counting(), tmp_path / "empty")
    with pytest.raises(
        TemperaError, match=r"all its entries are broken \(the first: line 0: no caption\)"
    ):
        prepare(Captions([None]), Counting(), tmp_path / "broken", report=lambda line: None)
    with pytest.raises(TemperaError, match="more than max_broken=1"):
        prepare(
            Captions(["a", None, None]),
            Counting(),
            tmp_path / "limit",
            max_broken=1,
            report=lambda line: None,
        )
    prepare(Captions(["a", "b"]), Counting(), tmp_path / "made")
    with pytest.raises(TemperaError, match="holds shards of another source"):
        prepare(Captions(["a"]), Counting(), tmp_path / "made")
    with pytest.raises(TemperaError, match="holds shards of another shard_size"):
        prepare(Captions(["a", "b"]), Counting(), tmp_path / "made", shard_size=7)
    (tmp_path / "file").touch()
    with pytest.raises(TemperaError, match=r"cannot write in .*file"):
        prepare(Captions(["a"]), Counting(), tmp_path / "file" / "below")
    with pytest.raises(TemperaError, match=r"holds no manifest.json"):
        read_shards(tmp_path, "tok", 1000, GRID)
    (tmp_path / "made" / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(TemperaError, match=r"manifest.json is damaged"):
        read_shards(tmp_path / "made", "tok", 1000, GRID)


def check(source: Source, captions: list[str], broken: list[str], counts: bool = True) -> None:
    """What a source reads; reading from any position gives the rest; every picture can be decoded;
    its size is told or unknown.
    """
    items = list(source.read(0))
    assert source.count() == (len(items) if counts else None)
    entries = [item for item in items if isinstance(item, Entry)]
    assert [entry.caption for entry in entries] == captions
    failures = [str(item) for item in items if isinstance(item, Broken)]
    assert len(failures) == len(broken), failures
    assert all(part in failure for part, failure in zip(broken, failures, strict=True)), failures
    for start in range(len(items) + 2):
        assert list(map(str, source.read(start))) == list(map(str, items[start:]))
    assert all(decoded(entry.image).size == (12, 8) for entry in entries if entry.image is not None)
    assert len({entry.key for entry in entries}) == len(entries)
    json.dumps(source.describe())


def test_imagefolder_with_jsonl(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture())
    rows = [
        '{"file_name": "a.png", "text": "one"}',
        "",
        "{oops",
        '{"file_name": "gone.png", "text": "x"}',
        '{"file_name": "b.png", "text": ""}',
    ]
    rows += [
        '{"file_name": "b.png", "text": "two\\n lines"}',
        "[1]",
        '{"file_name": "b.png", "text": "again"}',
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    broken = [
        "metadata.jsonl:3: not valid JSON",
        "metadata.jsonl:4: image gone.png is missing",
        "metadata.jsonl:5: no caption",
    ]
    check(
        ImageFolder(str(tmp_path)),
        ["one", "two lines", "again"],
        [*broken, "metadata.jsonl:7: not a JSON object"],
    )


def test_imagefolder_with_csv_and_with_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "b.png").write_bytes(picture(3))
    (tmp_path / "a.txt").write_text("one")
    check(ImageFolder(str(tmp_path)), ["one"], ["b.txt: unreadable caption"])
    with (tmp_path / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["file_name", "words"], ["a.png", "uno"], ["b.png"], ["b.png", "dos"]]
        )
    check(
        ImageFolder(str(tmp_path), caption="words"),
        ["uno", "dos"],
        ["metadata.csv:3: not 2 columns"],
    )
    (tmp_path / "none").mkdir()
    with pytest.raises(TemperaError, match="holds neither metadata"):
        ImageFolder(str(tmp_path / "none"))
    with pytest.raises(TemperaError, match="does not exist"):
        ImageFolder(str(tmp_path / "absent"))


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_webdataset_tars(tmp_path: Path) -> None:
    tar_of(
        tmp_path / "0.tar",
        {
            "s0.png": picture(),
            "s0.txt": b"one",
            "s1.png": picture(),
            "s1.json": b'{"caption": "two"}',
            "s2.txt": b"x",
        },
    )
    tar_of(
        tmp_path / "1.tar",
        {"s0.png": picture(), "s0.json": b"{", "s1.png": picture(), "s1.txt": b"three"},
    )
    tar_of(tmp_path / "2.tar", {"s0.png": picture(), "s0.txt": b"four"})
    whole = (tmp_path / "1.tar").read_bytes()
    broken = ["0.tar sample s2: no image", "1.tar sample s0: unreadable caption"]
    check(TarShards(str(tmp_path)), ["one", "two", "three", "four"], broken, counts=False)
    for name, successes in (("0", 3), ("1", 2), ("2", 1)):
        (tmp_path / f"{name}_stats.json").write_text(
            json.dumps({"count": 9, "successes": successes})
        )
    check(TarShards(str(tmp_path)), ["one", "two", "three", "four"], broken)
    (tmp_path / "2_stats.json").write_text("{}")
    (tmp_path / "1.tar").write_bytes(whole[:2000])
    check(
        TarShards(str(tmp_path / "*.tar")),
        ["one", "two", "four"],
        ["0.tar sample s2", "1.tar: the archive is damaged after 2 members"],
        False,
    )
    with pytest.raises(TemperaError, match=r"matches no \.tar file"):
        TarShards(str(tmp_path / "nothing*"))


def bitmap(value: int) -> bytes:
    """A picture whose size in bytes does not depend on what it shows."""
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 4), (value, 0, 0)).save(buffer, "BMP")
    return buffer.getvalue()


def test_pictures_in_archives_are_read_when_they_are_decoded(tmp_path: Path) -> None:
    file, shown, later = tmp_path / "0.tar", bitmap(10), bitmap(200)
    tar_of(file, {"s0.bmp": shown, "s0.txt": b"one"})
    (entry,) = TarShards(str(tmp_path)).read(0)
    assert isinstance(entry, Entry) and entry.image is not None
    assert decoded(entry.image).getpixel((0, 0)) == (10, 0, 0)
    file.write_bytes(file.read_bytes().replace(shown, later))
    assert decoded(entry.image).getpixel((0, 0)) == (200, 0, 0)
    file.write_bytes(gzip.compress(file.read_bytes()))  # has no places to read from
    (entry,) = TarShards(str(tmp_path)).read(0)
    assert isinstance(entry, Entry) and entry.image == later


def test_row_groups_that_are_done_are_not_read_again(tmp_path: Path) -> None:
    table = pa.table(
        {"image": [bitmap(i) for i in range(30)], "caption": [f"c{i}" for i in range(30)]}
    )
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=10, compression="NONE")
    whole = [
        entry.caption for entry in ParquetShards(str(tmp_path)).read(23) if isinstance(entry, Entry)
    ]
    assert whole == [f"c{i}" for i in range(23, 30)]
    data = bytearray((tmp_path / "0.parquet").read_bytes())
    data[4:100] = bytes(96)  # in the first group
    (tmp_path / "0.parquet").write_bytes(data)
    assert [
        entry.caption for entry in ParquetShards(str(tmp_path)).read(23) if isinstance(entry, Entry)
    ] == whole
    assert isinstance(next(iter(ParquetShards(str(tmp_path)).read(0))), Broken)


def test_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"bytes": picture(i), "path": None} for i in range(70)]
    rows[2] = {"bytes": None, "path": None}
    pq.write_table(
        pa.table({"image": rows, "top_caption": [f"c{i}" for i in range(70)]}),
        tmp_path / "0.parquet",
    )
    pq.write_table(pa.table({"image": [picture()], "top_caption": ["d"]}), tmp_path / "1.parquet")
    pq.write_table(
        pa.table({"image": ["a.png", "b.png"], "top_caption": ["e", "f"]}), tmp_path / "2.parquet"
    )
    (tmp_path / "3.parquet").write_bytes(b"PAR1nonsense")
    captions = [f"c{i}" for i in range(70) if i != 2] + ["d", "e"]
    check(
        ParquetShards(str(tmp_path)),
        captions,
        [
            "0.parquet row 2: no image",
            "2.parquet row 1: image b.png is missing",
            "3.parquet: unreadable",
        ],
    )
    with pytest.raises(TemperaError, match=r"no column 'picture' \(it has image, top_caption\)"):
        list(ParquetShards(str(tmp_path), image="picture").read(0))


def test_a_damaged_row_group_of_parquet_is_broken_row_by_row_and_the_rest_is_read(
    tmp_path: Path,
) -> None:
    rows = [{"bytes": picture(i), "path": None} for i in range(30)]
    path = tmp_path / "0.parquet"
    pq.write_table(
        pa.table({"image": rows, "caption": [f"c{i}" for i in range(30)]}),
        path,
        row_group_size=10,
        compression="gzip",
    )
    columns = [pq.ParquetFile(path).metadata.row_group(1).column(number) for number in range(2)]
    data = bytearray(path.read_bytes())
    for column in columns:
        first = column.dictionary_page_offset or column.data_page_offset
        data[first : first + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    broken = [f"0.parquet row {number}: unreadable row group" for number in range(10, 20)]
    check(ParquetShards(str(tmp_path)), [f"c{i}" for i in (*range(10), *range(20, 30))], broken)


def test_coco_captions(tmp_path: Path) -> None:
    (tmp_path / "7.png").write_bytes(picture())
    annotations: list[Any] = [{"image_id": 7, "id": i, "caption": f"seven {i}"} for i in range(3)]
    annotations += [
        {"image_id": 8, "id": 9, "caption": " "},
        "nonsense",
        {"image_id": 9, "id": 10, "caption": "nine"},
    ]
    content = {
        "images": [{"id": 7, "file_name": "7.png"}, {"id": 9, "file_name": "9.png"}],
        "annotations": annotations,
    }
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(content))
    check(
        CocoCaptions(str(path)),
        ["seven 0", "nine"],
        ["annotation 3: no caption", "annotation 4: no image_id"],
    )
    everything = CocoCaptions(str(path), images=str(tmp_path), per_image=0)
    check(
        everything,
        ["seven 0", "seven 1", "seven 2"],
        ["annotation 3", "annotation 4", "9.png is missing"],
    )
    path.write_text("[1]")
    with pytest.raises(TemperaError, match="captions.json holds no JSON object"):
        CocoCaptions(str(path))
    path.write_text('{"annotations": null}')
    with pytest.raises(TemperaError, match="not an MS-COCO captions file"):
        CocoCaptions(str(path))


@pytest.mark.slow
def test_anything_that_datasets_streams(tmp_path: Path) -> None:
    rows = [{"bytes": picture(i), "path": None} for i in range(3)]
    pq.write_table(pa.table({"image": rows, "text": ["a", "b", ""]}), tmp_path / "x.parquet")
    check(
        Dataset("parquet", data_files=str(tmp_path / "x.parquet")),
        ["a", "b"],
        ["parquet row 2: no caption"],
        False,
    )
    with pytest.raises(TemperaError, match="datasets cannot load"):
        list(Dataset(str(tmp_path / "absent")).read(0))


def test_the_bar_shows_where_in_the_source_one_is(tmp_path: Path) -> None:
    source = Captions([f"caption {i}" if i % 5 else None for i in range(23)])
    shown = io.StringIO()

    def bar() -> Any:
        return tqdm(unit="image", file=shown, mininterval=0)

    with pytest.raises(KeyboardInterrupt), bar() as begun:
        prepare(
            source,
            Counting(fail_after=12),
            tmp_path,
            shard_size=6,
            batch_size=2,
            limit=20,
            report=lambda line: None,
            bar=begun,
        )
    assert (begun.initial, begun.n, begun.total) == (0, 14, 20)
    with bar() as rest:
        prepare(
            source,
            Counting(),
            tmp_path,
            shard_size=6,
            batch_size=2,
            limit=20,
            report=lambda line: None,
            bar=rest,
        )
    assert (rest.initial, rest.n, rest.total) == (12, 20, 20)
    assert "20/20" in shown.getvalue() and "image/s" in shown.getvalue()


class Endless(Captions):
    """Does not know its size."""

    def count(self) -> int | None:
        return None


def test_a_source_of_unknown_size_has_a_bar_without_an_end(tmp_path: Path) -> None:
    with tqdm(file=io.StringIO()) as bar:
        prepare(Endless(["a", "b"]), Counting(), tmp_path / "all", bar=bar)
        assert (bar.n, bar.total) == (2, None)
        prepare(Endless(["a", "b"]), Counting(), tmp_path / "one", limit=1, bar=bar)
        assert (bar.n, bar.total) == (1, 1)


class Together:
    """One of two processes, which take turns in threads of one."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.count, self.is_main = rank, 2, rank == 0
        self.shared, self.barrier = shared, barrier

    def gather(self, value: Any) -> list[Any]:
        self.shared[self.rank] = value
        self.barrier.wait(60)
        every = list(self.shared)
        self.barrier.wait(60)
        return every

    def wait(self) -> None:
        self.barrier.wait(60)


@pytest.mark.slow
def test_two_processes_share_the_work_and_write_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever returns first, the shards are complete."""
    save = Manifest.save

    def slowly(manifest: Manifest, directory: Path) -> None:
        time.sleep(0.2)
        save(manifest, directory)

    source = Captions([f"caption {'x' * i}" if i % 5 else None for i in range(29)])
    options: dict[str, Any] = {"shard_size": 8, "batch_size": 2, "report": lambda line: None}
    prepare(source, Counting(), tmp_path / "one", **options)
    shared, barrier, encoders = [None, None], threading.Barrier(2), [Counting(), Counting()]
    monkeypatch.setattr(Manifest, "save", slowly)

    def prepared(rank: int) -> Manifest:
        together: Any = Together(rank, shared, barrier)
        prepare(source, encoders[rank], tmp_path / "two", processes=together, **options)
        return Manifest.load(tmp_path / "two")

    with ThreadPoolExecutor(2) as pool:
        manifests = list(pool.map(prepared, (0, 1)))
    assert all(manifest.complete for manifest in manifests)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert [manifest.count for manifest in manifests] == [23, 23]
    assert (
        min(encoder.seen for encoder in encoders) > 8
        and sum(encoder.seen for encoder in encoders) == 23
    )


def tiny_vq() -> VQModel:
    torch.manual_seed(0)
    return VQModel(VQConfig(64, 4, 32, (1, 1, 1), (1, 1, 1), 1, 32)).eval()


def test_images_are_scaled_to_cover_and_cropped() -> None:
    image = PIL.Image.fromarray(
        np.repeat(np.arange(200, dtype=np.uint8)[None, :, None], 100, 0).repeat(3, 2)
    )
    pixels = to_pixels(image, (50, 50))
    assert pixels.shape == (3, 50, 50)
    assert pixels[0, 25, 25] == pytest.approx(99.5 / 127.5 - 1, abs=0.02)
    same = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    assert torch.equal(
        to_pixels(PIL.Image.fromarray(same), (8, 12)),
        torch.from_numpy(same).permute(2, 0, 1) / 127.5 - 1,
    )


def test_vq_encoder_gives_the_images_codes_and_counts_broken_images(tmp_path: Path) -> None:
    vq = tiny_vq()
    encoder = VQEncoder(vq, "tok", GRID)
    good, bad = Entry("x", "0", "a", picture(9)), Entry("y", "1", "b", b"not an image")
    encoded = encoder.encode([bad, good])
    expected = vq.encode(to_pixels(decoded(picture(9)), (8, 12))[None]).flatten(1)
    assert encoded.entries == [good]
    assert encoded.codes.tolist() == expected.tolist()
    assert "unreadable image" in encoded.broken[0].why
    with pytest.raises(TemperaError, match="use encoder=target"):
        encoder.encode([Entry("z", "2", "c")])


def test_the_world_becomes_shards(tmp_path: Path) -> None:
    encoder = VQEncoder(tiny_vq(), "tok", (16, 16))
    assert prepare(WorldScenes(3, seed=5), encoder, tmp_path, shard_size=2).count == 3
    images = read_shards(tmp_path, "tok", 64, (16, 16))
    assert images.captions[2] == WorldScenes(3, seed=5).world.sample(2).caption
    with pytest.raises(TemperaError, match="empty source"):
        WorldScenes(0)
