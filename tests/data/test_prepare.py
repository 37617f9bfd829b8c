"""Sources → shards: broken entries, restarts, refusals, and what a directory of shards may hold."""

import json
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_server import jpeg
from PIL import Image
from together import together

from tempera.data import prepare as preparation
from tempera.data.encoders import Encoded, VQEncoder, to_pixels
from tempera.data.entries import Broken, Entry, Listed, Source
from tempera.data.shards import MANIFEST, Manifest, read_shards
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.files import sha256_file
from tempera.runtime.image_decoding import decode_picture
from tempera.targets.conditioners import CaptionTokens

GRID = (2, 3)
SIX = {"shard_size": 6, "batch_size": 2}
prepare = partial(preparation.prepare, shard_size=1000, batch_size=32, max_broken=100)


class Counting:
    """Codes an entry by its caption's length; counts the entries it was given."""

    tokenizer, grid, length, vocab_size = "tok", GRID, 6, 1000

    def __init__(self, fail_after: int = 10**9) -> None:
        self.seen, self.fail_after = 0, fail_after

    def describe(self) -> dict[str, Any]:
        return {"kind": "counting"}

    def encode(self, entries: list[Entry]) -> Encoded:
        self.seen += len(entries)
        if self.seen > self.fail_after:
            raise KeyboardInterrupt
        codes = [[len(entry.caption)] * self.length for entry in entries]
        return Encoded(entries, np.array(codes, np.int32), [])


def listed(captions: Sequence[str | None]) -> Listed:
    """A source of captions; `None` is a broken entry."""
    entries = [
        Entry(f"line {n}", str(n), caption) if caption else Broken(f"line {n}", "no caption")
        for n, caption in enumerate(captions)
    ]
    return Listed(entries, {"kind": "captions", "count": len(captions)})


SOME: list[str | None] = [f"caption {'x' * i}" if i % 5 else None for i in range(23)]


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = listed(SOME)
    prepare(source, Counting(), tmp_path / "whole", limit=20, **SIX)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, Counting(12), tmp_path / "parts", limit=20, **SIX)
    with pytest.raises(TemperaError, match="unfinished"):
        read_shards(tmp_path / "parts", "tok", 1000, GRID)
    capsys.readouterr()
    rest = Counting()
    prepare(source, rest, tmp_path / "parts", limit=20, **SIX)
    assert rest.seen == 7
    assert {"12/20", "20/20"} <= set(re.findall(r"\d+/\d+", capsys.readouterr().err))
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_a_rerun_does_nothing_and_a_damaged_shard_is_rebuilt(tmp_path: Path) -> None:
    source, again = listed([None, None, *(f"caption {i}" for i in range(10)), None]), Counting()
    prepare(source, Counting(), tmp_path, shard_size=4)
    before = bytes_of(tmp_path)
    assert prepare(source, again, tmp_path, shard_size=4).count == 10
    assert again.seen == 0
    (tmp_path / "shard-00001.parquet").write_bytes(before["shard-00001.parquet"][:-7])
    with pytest.raises(TemperaError, match=r"00001.parquet is .* damaged.*prepare"):
        read_shards(tmp_path, "tok", 1000, GRID)
    prepare(source, again, tmp_path, shard_size=4)
    assert bytes_of(tmp_path) == before


def test_a_source_that_has_grown_at_its_end_is_encoded_to_its_end(tmp_path: Path) -> None:
    grown = listed(["a", "b", "c"])
    source, rest = Listed(grown.items[:2], grown.described), Counting()
    prepare(source, Counting(), tmp_path, shard_size=4)
    manifest = prepare(grown, rest, tmp_path, shard_size=4)
    assert manifest.complete and rest.seen == 1
    assert read_shards(tmp_path, "tok", 1000, GRID).captions == ["a", "b", "c"]
    assert prepare(grown, rest, tmp_path, shard_size=4, limit=None) == manifest and rest.seen == 1


def test_the_manifest_counts_and_shards_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = listed(["a", None, "bbb", "cc", None, "d d d d d"])
    captions = CaptionTokens(lambda text: list(range(len(text.split()))), 4)
    manifest = prepare(source, Counting(), tmp_path, shard_size=2, captions=captions)
    assert (manifest.count, manifest.broken_count, manifest.complete) == (3, 3, True)
    assert manifest.broken[:2] == ("line 1: no caption", "line 4: no caption")
    assert manifest.broken[2].startswith("line 5: the caption has 6 tokens, but the model takes")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"skipped a broken entry: {line}" for line in manifest.broken]
    assert Manifest.load(tmp_path) == manifest
    assert [shard.count for shard in manifest.shards] == [1, 2, 0]
    images = read_shards(tmp_path, "tok", 1000, GRID)
    assert images.captions == ["a", "bbb", "cc"]
    assert images.codes[:, 0].tolist() == [1, 3, 2]


def test_codes_of_a_preview_stand_before_those_of_the_grid(tmp_path: Path) -> None:
    encoder = Counting()
    encoder.length = 8
    prepare(listed(["a", "bbb"]), encoder, tmp_path)
    assert read_shards(tmp_path, "tok", 1000, GRID, 8).codes.tolist() == [[1] * 8, [3] * 8]
    with pytest.raises(TemperaError, match="codes"):
        read_shards(tmp_path, "tok", 1000, GRID)


def test_a_source_whose_files_changed_is_told_by_that(tmp_path: Path) -> None:
    was, now = (Listed(listed(["a", "b"]).items, {"kind": "k", "fingerprint": f}) for f in "xy")
    prepare(was, Counting(), tmp_path)
    with pytest.raises(TemperaError, match="files of the source have changed"):
        prepare(now, Counting(), tmp_path)


REFUSED: list[tuple[list[str | None], dict[str, Any], str]] = [
    ([], {}, "captions yields no images, because it has no entries"),
    ([None], {}, r"all its entries are broken \(the first: line 0: no caption\)"),
    (["a", None, None], {"max_broken": 1}, "more than max_broken=1"),
    (["a"], {}, "made with source.count=2"),
    (["a", "b"], {"shard_size": 7}, "made with shard_size=1000"),
]


@pytest.mark.parametrize(("captions", "options", "told"), REFUSED)
def test_refusals(captions: list[Any], options: dict[str, Any], told: str, tmp_path: Path) -> None:
    if "made" in told:
        prepare(listed(["a", "b"]), Counting(), tmp_path)
    with pytest.raises(TemperaError, match=told):
        prepare(listed(captions), Counting(), tmp_path, **options)
    if captions[:1] in ([], [None]):
        assert prepare(listed(["a", "b"]), Counting(), tmp_path).count == 2  # it is free


def edit(name: str, value: Any) -> Any:
    """Changes a value of the manifest, or of its first shard."""

    def edited(directory: Path) -> None:
        content = json.loads((directory / MANIFEST).read_text())
        (content if name in content else content["shards"][0])[name] = value
        (directory / MANIFEST).write_text(json.dumps(content))

    return edited


def of(**columns: Any) -> Any:
    """Puts another table in the first shard's place, under its checksum."""

    def changed(directory: Path) -> None:
        path = directory / "shard-00000.parquet"
        usual = {"key": ["0", "1"], "caption": ["a", "b"], "codes": [[1] * 6] * 2}
        pq.write_table(pa.table(usual | columns), path)
        edit("sha256", sha256_file(path))(directory)

    return changed


def twice(directory: Path) -> None:
    """The second shard instead of the first, in the manifest, too."""
    shutil.copy(directory / "shard-00001.parquet", directory / "shard-00000.parquet")
    edit("sha256", sha256_file(directory / "shard-00001.parquet"))(directory)


BELIEVED = [
    (lambda directory: (directory / MANIFEST).unlink(), "has no manifest"),
    (edit("format", 0), "started by another version of tempera"),
    (edit("count", -1), "damaged .shards.0.count"),
    (edit("count", 1), "holds 2 images, not 1"),
    (edit("sha256", "0"), "00000.parquet is .* damaged"),
    (twice, "00000.parquet is .* a copy"),
    (of(codes=[[1] * 5] * 2), "codes has rows that do not have exactly 6"),
    (of(codes=[[-1] * 6] * 2), "codes contains numbers outside"),
    (of(caption=["a", None]), "caption has missing values"),
]


@pytest.mark.parametrize(("change", "told"), BELIEVED)
def test_shards_are_looked_at_before_they_are_believed(
    change: Any, told: str, tmp_path: Path
) -> None:
    prepare(listed(["a", "b", "c", "d"]), Counting(), tmp_path, shard_size=2)
    change(tmp_path)
    with pytest.raises(TemperaError, match=told) as problem:
        read_shards(tmp_path, "tok", 1000, GRID)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("target", [("other", 1000, GRID), ("tok", 1, GRID), ("tok", 1000, (3, 2))])
def test_shards_of_another_target_are_refused(target: Any, tmp_path: Path) -> None:
    prepare(listed(["a", "b"]), Counting(), tmp_path)
    with pytest.raises(TemperaError, match="made with (tokenizer|grid)=|codes contains numbers"):
        read_shards(tmp_path, *target)


def test_two_processes_share_the_work_and_write_the_same_bytes(tmp_path: Path) -> None:
    source, encoders = listed(SOME), [Counting(), Counting()]
    prepare(source, Counting(), tmp_path / "one", **SIX)

    def prepared(process: Any) -> Manifest:
        mine = encoders[process.rank]
        return prepare(source, mine, tmp_path / "two", processes=process, **SIX)

    manifests = together(prepared)
    assert all(manifest.complete and manifest.count == 18 for manifest in manifests)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert sum(one.seen for one in encoders) == 18 and min(one.seen for one in encoders) > 6


class Watching(Source):
    """Entries with pictures that are counted while they are held."""

    def __init__(self, count: int) -> None:
        self.held: weakref.WeakSet[Entry] = weakref.WeakSet()
        self.number, self.most = count, 0

    def describe(self) -> dict[str, Any]:
        return {"kind": "watching"}

    def read(self, start: int) -> Iterator[Entry]:
        for number in range(self.number):
            entry = Entry(str(number), str(number), "a", jpeg())
            self.held.add(entry)
            self.most = max(self.most, len(self.held))
            yield entry
            del entry


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_holds_the_pictures_of_one_batch(processes: int, tmp_path: Path) -> None:
    sources = [Watching(40), Watching(40)]
    options = {"shard_size": 20, "batch_size": 4}
    if processes == 1:
        prepare(sources[0], Counting(), tmp_path, **options)
    else:
        together(lambda one: prepare(sources[one.rank], Counting(), tmp_path, processes=one,
                                     **options))  # fmt: skip
    for source in sources[:processes]:
        assert 4 <= source.most <= 6  # and the one that is read


def test_what_is_left_out_is_counted_at_the_end(tmp_path: Path) -> None:
    source = Listed([Entry("x", "0", "a")], {"kind": "some"}, {"links": 3, "README files": 1})
    assert prepare(source, Counting(), tmp_path).left_out == {"links": 3, "README files": 1}
    assert Manifest.load(tmp_path).left_out["links"] == 3


def test_the_vq_encoder_gives_the_images_codes_and_counts_broken_images() -> None:
    vq = VQModel(VQConfig(64, 4, 32, (1, 1, 1), (1, 1, 1), 1, 32)).eval()
    encoder = VQEncoder(GRID, vq)
    good, bad = Entry("x", "0", "a", jpeg()), Entry("y", "1", "b", b"not an image")
    encoded = encoder.encode([bad, good])
    expected = vq.encode(to_pixels(decode_picture(jpeg()), (8, 12))[None]).flatten(1)
    (entry,) = encoded.entries
    assert replace(entry, key="x") == replace(good, key="x") and entry.key.endswith("#0")
    assert encoded.codes.tolist() == expected.tolist()
    assert "unreadable image" in encoded.broken[0].why
    wide = Image.new("RGB", (40, 20))
    wide.paste("white", (10, 0, 30, 20))
    assert to_pixels(wide, (20, 20)).min() == 1  # its centre
    with pytest.raises(TemperaError, match="use encoder=target"):
        encoder.encode([replace(good, image=None)])
    same = Entry("z", "2", "c", decode_picture(jpeg()))  # in another file
    other = Entry("z", "3", "c", jpeg((0, 0, 0)))
    names = [one.key.partition("#")[0] for one in encoder.encode([good, same, other]).entries]
    assert names[0] == names[1] != names[2]
