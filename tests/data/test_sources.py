"""Every source reads what is whole, counts what is broken, and can start anywhere."""

import gzip
import io
import json
import os
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tempera.data import sources
from tempera.data.entries import Broken, Entry, Source
from tempera.data.folder import image_folder
from tempera.data.sources import tar_shards
from tempera.errors import TemperaError
from tempera.runtime.image_decoding import decode_picture

parquet = partial(sources.parquet, image="image")
Stream = partial(sources.Stream, split="train", image="image")


def picture(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (12, 8), (value % 256, 40, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def check(source: Source, captions: list[str], *broken: str) -> None:
    """What a source reads; reading from any position gives the rest; every picture can be decoded;
    its size is told or unknown.
    """
    items = list(source.read(0))
    assert source.count() in (len(items), None)
    entries = [item for item in items if isinstance(item, Entry)]
    assert [entry.caption for entry in entries] == captions
    failures = [str(item) for item in items if isinstance(item, Broken)]
    assert len(failures) == len(broken), failures
    assert all(part in failure for part, failure in zip(broken, failures, strict=True)), failures
    for start in {0, 1, len(items) - 1, len(items) + 1}:
        assert list(map(str, source.read(start))) == list(map(str, items[start:]))
    assert all(
        decode_picture(entry.image).size == (12, 8) for entry in entries if entry.image is not None
    )
    assert len({entry.key for entry in entries}) == len(entries)
    json.dumps(source.describe())


ROWS = {
    "metadata.jsonl": (
        [{"file_name": "a.PNG", "text": "one"}, "{oops", {"file_name": "gone.png", "text": "x"},
         {"file_name": "b.png", "text": None}, {"file_name": "b.png", "text": ["two\n lines", "x"]},
         {"file_name": "../evil.png", "text": "x"}, {"file_name": "/etc/hosts", "text": "x"}, [1],
         {"file_name": "x" * 300, "text": "x"}],
        ["jsonl:2: no image", "jsonl:3: image gone.png is missing", "jsonl:4: no caption",
         "jsonl:6: its file name points outside", "jsonl:7: its file name points outside",
         "jsonl:8: no image", "is missing"],
    ),
    "Metadata.csv": (
        ["file_name,Caption", "a.PNG,one", "b.png", "b.png,two lines", "b.png,x,y"],
        ["csv:3: no caption", "csv:5: no image"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ROWS)
def test_a_folder_with_metadata(name: str, mark: str, tmp_path: Path) -> None:
    for image in ("a.PNG", "b.png"):
        (tmp_path / image).write_bytes(picture())
    rows, broken = ROWS[name]
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / name).write_text(mark + "\r\n".join(lines), encoding="utf-8", newline="")
    check(image_folder(str(tmp_path)), ["one", "two lines"], *broken)
    (tmp_path / name).unlink()
    table = pa.table({"file_name": ["a.PNG", "a.PNG"], "caption": ["one", None]})
    pq.write_table(table, tmp_path / "metadata.parquet")
    check(image_folder(str(tmp_path)), ["one"], "metadata.parquet:2: no caption")


def test_a_folder_with_captions_beside_the_images(tmp_path: Path) -> None:
    (tmp_path / "loop.png").symlink_to("loop.png")
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        (tmp_path / name).write_bytes(picture(number))
    (tmp_path / "._a.png").write_bytes(b"of the file system")
    (tmp_path / "a.TXT").write_text("\ufeffone")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    check(
        image_folder(str(tmp_path)),
        ["one"],
        "b.png: no caption",
        "c.txt:1 is not UTF-8 text",
        "loop.png: no caption",
    )
    before = image_folder(str(tmp_path)).describe()
    (tmp_path / "a.png").write_bytes(picture() + b"more")
    assert image_folder(str(tmp_path)).describe() != before


def test_what_is_wrong_with_a_caption_is_told_by_its_cause(tmp_path: Path) -> None:
    """Bytes of Windows-1252, in a text that was read as Latin-1, or as they are; UTF-8 is read."""
    captions: list[Any] = ["it\x92s", "one", None]
    for column in (captions, [b"it\x92s", "caf\u00e9".encode(), None]):
        rows = [{"image": picture(), "caption": caption} for caption in column]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        read = ["one"] if column is captions else ["caf\u00e9"]
        check(parquet(str(tmp_path)), read, "1: its caption is not UTF-8", "3: no caption")


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_tar_shards_and_their_foreign_members(tmp_path: Path) -> None:
    tar_of(tmp_path / "0[a].tar", {
        "README": b"x", "._s.png": b"", "LICENSE.md": b"x", "s0.png": picture(), "s0.txt": b"one",
        "s1.JPG": picture(), "s1.JSON": b'{"caption": ["two", "x"], "words": "zwei"}',
        "s2.txt": b"x", "s3.png": picture(), "s3.json": b'{"caption": null}',
        "s4.png": picture(), "s4.json": b"{oops", "s5.png": picture(), "s5.txt": b"caf\xe9",
    })  # fmt: skip
    tar_of(tmp_path / "1.TAR", {"s0.png": picture(), "s0.txt": b"three", "s0.json": b"{}"})
    broken = ["s2: no image", "s3: no caption", "s4: its", "s5: its"]
    check(tar_shards(str(tmp_path)), ["one", "two", "three"], *broken)
    named = tar_shards(str(tmp_path), "words").read(0)
    assert [one.caption for one in named if isinstance(one, Entry)] == ["zwei"]
    (tmp_path / "0.tgz").write_bytes(gzip.compress((tmp_path / "1.TAR").read_bytes()))
    check(tar_shards(str(tmp_path / "*.tgz")), ["three"])


def two_samples(path: Path) -> bytes:
    tar_of(path, {"a.png": picture(), "a.txt": b"one", "b.png": picture(), "b.txt": b"two"})
    return path.read_bytes()


CUT: list[tuple[Any, list[str]]] = [
    (lambda content: content[:600], []),  # within a picture
    (lambda content: content[: 4 * 512 + 100], ["one"]),  # within the header of a picture
    (lambda content: gzip.compress(content)[:-20], ["one"]),
    (lambda content: b"nonsense" * 128, []),
    (lambda content: b"", []),
]


@pytest.mark.parametrize(("cut", "rest"), CUT)
def test_what_is_damaged_of_a_tar_costs_nothing_else(
    cut: Any, rest: list[str], tmp_path: Path
) -> None:
    whole = two_samples(tmp_path / "0.tar")
    (tmp_path / "1.tar").write_bytes(cut(whole))
    (tmp_path / "2.tar").write_bytes(whole[:512].replace(b"a.png", b"???.?") + whole[512:])
    names = ["the rest of it cannot be read", "2.tar/a: no image"]
    check(tar_shards(str(tmp_path)), ["one", "two", *rest, "two"], *names)


def test_parquet(tmp_path: Path) -> None:
    rows: list[Any] = [{"bytes": picture(i), "path": None} for i in range(7)]
    rows[2], rows[4] = {"bytes": None, "path": None}, {"bytes": None, "path": "a.png"}
    captions = [*(f"c{i}" for i in range(6)), None]
    for name in ("0.parquet", "1.PARQUET"):
        pq.write_table(
            pa.table({"image": rows, "Text": captions}), tmp_path / name, row_group_size=3
        )
    broken = ["no image", "image a.png is missing", "no caption"]
    texts = ["c0", "c1", "c3", "c5"]
    check(parquet(str(tmp_path)), texts * 2, *broken * 2)
    check(parquet(str(tmp_path / "*.parquet"), caption="Text"), texts, *broken)
    whole = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "0.parquet").write_bytes(whole[:-200])
    pq.write_table(pa.table({"image": [picture()], "words": ["d"]}), tmp_path / "2.parquet")
    check(parquet(str(tmp_path)), texts, "0.parquet: the rest", *broken, "no caption")
    check(parquet(str(tmp_path), caption="words"), ["d"], "0.parquet: the rest", "column words")


@pytest.mark.slow
def test_what_datasets_streams(tmp_path: Path) -> None:
    rows = [{"bytes": picture(), "path": None}, {"bytes": None, "path": None}]
    pq.write_table(pa.table({"image": rows, "Text": ["a", "b"]}), tmp_path / "0.parquet")
    file = {"data_files": str(tmp_path / "0.parquet")}
    check(Stream("parquet", **file), ["a"], "no image")
    check(Stream("parquet", image=None, **file), ["a", "b"])
    for source, told in (
        (Stream("parquet", image="picture", **file), "column picture"),
        (Stream("parquet", caption="words", **file), "column words"),
        (Stream(str(tmp_path / "absent")), "absent"),
    ):
        with pytest.raises(TemperaError, match=told) as problem:
            list(source.read(0))
        assert "\n" not in str(problem.value)
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    lines = Stream("json", image=None, data_files=str(tmp_path / "rows.jsonl"))
    check(lines, ["one", "two"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(picture())
    (tmp_path / "folder" / "metadata.csv").write_text("file_name,text\na.png,one\n")
    check(Stream(str(tmp_path / "folder")), ["one"])


@pytest.mark.slow
def test_what_the_builders_of_datasets_lose(tmp_path: Path) -> None:
    """What docs/training.md says of them, and why folders and tars are not read by them."""

    def rows(builder: str, file: str, image: str) -> int:
        return len(list(Stream(builder, image=image, data_files=str(tmp_path / file)).read(0)))

    two_samples(tmp_path / "0.tar")
    assert rows("webdataset", "0.tar", "png") == 2
    whole = {"README": b"x", "a.png": picture(), "a.txt": b"one"}
    tar_of(tmp_path / "1.tar", whole)
    assert rows("webdataset", "1.tar", "png") == 1  # without a word on README
    twice = tmp_path / "2.tar"
    two_samples(twice)
    with tarfile.open(twice, "a") as archive:
        archive.addfile(tarfile.TarInfo("b.txt"))
    tar_of(tmp_path / "3.tar", {**whole, "b.png": picture(), "b.json": b"{}"})
    (tmp_path / "4.tar").write_bytes(twice.read_bytes()[:600])
    for name in ("2.tar", "3.tar", "4.tar"):
        with pytest.raises(TemperaError, match="datasets cannot read"):
            rows("webdataset", name, "png")
    (tmp_path / "folder").mkdir()
    for name in "ab":
        (tmp_path / "folder" / f"{name}.png").write_bytes(picture())
    metadata = tmp_path / "folder" / "metadata.jsonl"
    metadata.write_text('{"file_name": "a.png", "text": "one"}\n')
    assert len(list(Stream(str(tmp_path / "folder")).read(0))) == 1  # without a word on b.png
    metadata.write_text('{"file_name": "a.png", "text": "one"}\n{oops\n')
    with pytest.raises(TemperaError, match="datasets cannot read"):
        list(Stream(str(tmp_path / "folder")).read(0))


@pytest.mark.slow
def test_paths_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, bytes] = {"hf://datasets/x/a.png": picture()}
    hub = "tempera.data.entries.HfFileSystem.cat_file"
    monkeypatch.setattr(hub, lambda self, path: there[path])
    names = [f"hf://datasets/x/{name}.png" for name in "ab"]
    pq.write_table(pa.table({"image": names, "text": ["a", "b"]}), tmp_path / "a.parquet")
    entries = Stream("parquet", data_files=str(tmp_path / "a.parquet")).read(0)
    assert next(entries).caption == "a"  # type: ignore[union-attr]
    with pytest.raises(TemperaError, match="cannot read parquet from row 1 on"):
        next(entries)


def test_places_without_anything_to_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    for source, told in (
        (image_folder, "there are no images"), (tar_shards, "pipe.tar is a pipe"),
        (parquet, r"matches no \.parquet file"),
    ):  # fmt: skip
        with pytest.raises(TemperaError, match=told):
            source(str(tmp_path))
        for absent in (str(tmp_path / "absent"), "x" * 5000):
            with pytest.raises(TemperaError, match="there are no images|matches no"):
                source(absent)
