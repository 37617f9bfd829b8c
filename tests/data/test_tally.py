"""Counts add up in every source: what is used, refused and left out is what was given, and a
picture has its own caption. The sources are made up.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tempera.data.entries import Broken, Entry, Item, Source, Tally, shown, tallied
from tempera.data.folder import image_folder
from tempera.data.sources import LARGEST, parquet, tar_shards
from tempera.errors import TemperaError
from tempera.runtime.image_decoding import decode_picture

SETTINGS = settings(max_examples=60, deadline=None)
NAMES = st.sampled_from(["a", "b", "c", ".d", "sub/a", "sub/b"])
KINDS_OF_FILES = ["png", "PNG", "bmp", "txt", "TXT", "json", "seg.png", "cls", "md"]
MEMBERS = st.lists(
    st.tuples(NAMES, st.sampled_from([*KINDS_OF_FILES, "", "broken.txt"]), st.booleans()),
    max_size=12,
)


def number_of(name: str) -> int:
    """The colour of a sample's pictures, which its captions name."""
    return sum(map(ord, name)) % 251


def picture(name: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), (number_of(name), 0, 0)).save(file, "PNG")
    return file.getvalue()


def content(name: str, kind: str, empty: bool) -> bytes:
    """A file of a sample, by its kind."""
    text = f"colour {number_of(name)}"
    if kind.lower() in ("png", "bmp"):
        return b"" if empty else picture(name)
    if kind == "json":
        return json.dumps({} if empty else {"caption": text}).encode()
    if kind.lower() == "txt":
        return b"" if empty else text.encode()
    return b"" if empty else b"something"


def check(source: Source, parts: int) -> list[Entry]:
    """The entries. The numbers agree, wherever reading starts, and captions fit their pictures."""
    items = list(source.read(0))
    tally, entries = source.tally, [item for item in items if isinstance(item, Entry)]
    assert tally.given == tally.accounted == parts
    assert tally.used == sum(entry.parts for entry in entries)
    assert tally.refused == sum(item.parts for item in items if isinstance(item, Broken))
    assert len({entry.key for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.image is not None
        red = decode_picture(entry.image).getpixel((0, 0))
        assert entry.caption == f"colour {red[0]}"  # type: ignore[index]
    assert list(map(str, source.read(1))) == list(map(str, items[1:]))
    assert source.tally == tally
    return entries


def write_tar(path: Path, members: list[tuple[str, bytes]], links: int = 0) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for number in range(links):
            info = tarfile.TarInfo(f"link{number}.png")
            info.type, info.linkname = tarfile.SYMTYPE, "a.png"
            archive.addfile(info)


@SETTINGS
@given(MEMBERS, st.integers(0, 2), st.sampled_from([None, "caption"]))
def test_tars(members: list[tuple[str, str, bool]], links: int, caption: str | None) -> None:
    with TemporaryDirectory() as folder:
        parts = [(f"{name}.{kind}" if kind else name, content(name, kind, empty))
                 for name, kind, empty in members]  # fmt: skip
        write_tar(Path(folder, "0.tar"), [("x.png", picture("x")), *parts], links)
        check(tar_shards(folder, caption), 1 + len(parts) + links)


@SETTINGS
@given(MEMBERS, st.lists(st.tuples(NAMES, st.sampled_from(["png", "bmp", "gone"]))), st.booleans())
def test_folders(
    members: list[tuple[str, str, bool]], rows: list[tuple[str, str]], nested: bool
) -> None:
    """With captions beside the pictures, or metadata at the top or in Hugging Face's layout."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        root = folder / "train" if nested and rows else folder
        files = {f"{name}.{kind}" if kind else name: content(name, kind, empty)
                 for name, kind, empty in members}  # fmt: skip
        files["x.png"] = picture("x")
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        given = len(files) + len(rows)
        if nested and rows:
            (folder / "test").mkdir()
            (folder / "test" / "a.png").write_bytes(picture("a"))
            given += 1
        if rows:
            named = [{"file_name": f"{name}.{kind}", "text": f"colour {number_of(name)}"}
                     for name, kind in rows]  # fmt: skip
            lines = map(json.dumps, named)
            (root / "metadata.jsonl").write_text("\n".join(lines))
        source = image_folder(place)
        assert source.count() == len(list(source.read(0)))
        for entry in source.items:
            if isinstance(entry, Entry) and not Path(str(entry.image)).stat().st_size:
                return  # the encoder refuses empty pictures
        check(source, given)


@SETTINGS
@given(
    st.lists(st.tuples(NAMES, st.booleans(), st.booleans()), max_size=8),
    st.integers(1, 4),
    st.booleans(),
)
def test_parquet(rows: list[tuple[str, bool, bool]], group: int, cut: bool) -> None:
    images = [{"bytes": None if lost else picture(name), "path": None} for name, lost, _ in rows]
    texts = [None if lost else f"colour {number_of(name)}" for name, _, lost in rows]
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
                        "text": pa.string()})  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder, "0.parquet")
        pq.write_table(pa.table([images, texts], schema=schema), path, row_group_size=group)
        if cut:
            path.write_bytes(path.read_bytes()[:-9])
        check(parquet(folder, "image"), 1 if cut else len(rows))


def test_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    a, b = picture("a"), picture("b")
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
        members = [
            *(("a.png", a), ("a.txt", b"colour 97"), ("a.TXT", b"colour 98")),
            *(("b.png", b), ("b.txt", b"colour 98"), ("c.png", a), ("b.png", a), ("b.txt", b"no")),
        ]
        write_tar(tmp_path / directory / "0.tar", members)
    source = tar_shards(str(tmp_path / "*" / "0.tar"))
    assert len(check(source, 16)) == 2  # of the same name in two files
    told = [str(item).partition("0.tar/")[2] for item in source.read(0) if isinstance(item, Broken)]
    assert told[:3] == [
        "a: its .txt is there 2 times", "c: no caption", "b: a sample of this name came before"
    ]  # fmt: skip


def test_a_large_member_is_not_read(tmp_path: Path) -> None:
    """A member of 6 GiB in a file of a few kilobytes, of which the rest is a hole."""
    path = tmp_path / "0.tar"
    with path.open("wb") as file:
        info = tarfile.TarInfo("a.png")
        info.size = 6 * 2**30
        file.write(info.tobuf())
        file.truncate(tarfile.BLOCKSIZE + info.size)
        file.seek(0, io.SEEK_END)
        for name, data in (
            ("a.txt", b"colour 97"),
            ("b.png", picture("b")),
            ("b.txt", b"colour 98"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.write(info.tobuf() + data + bytes(-len(data) % tarfile.BLOCKSIZE))
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    source = tar_shards(str(tmp_path))
    assert len(check(source, 4)) == 1
    (broken,) = [item for item in source.read(0) if isinstance(item, Broken)]
    assert "its .png has 6,442,450,944 bytes, too many" in str(broken) and LARGEST < 6 * 2**30


def test_what_a_folder_leaves_out_is_told(tmp_path: Path) -> None:
    train = tmp_path / "train"
    for place in (train, tmp_path / "test", tmp_path / ".git", tmp_path / "elsewhere"):
        place.mkdir()
    (train / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("a.png", "b.png", "notes.md", ".DS_Store", "metadata.csv"):
        (train / name).write_bytes(picture("a"))
    (tmp_path / "test" / "metadata.jsonl").write_text("{}")
    (train / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "colour 97"}')
    source = image_folder(str(tmp_path))
    (entry,) = check(source, 9)
    assert entry.key == "train/a.png#1"
    assert shown(source.tally.left_out) == (
        "1 .csv files, 1 .md files, 1 files outside train, 1 hidden files, 1 hidden folders, "
        "1 linked folders and 1 pictures that no usable row names"
    )
    (train / "metadata.jsonl").unlink()
    (train / "metadata.csv").unlink()
    with pytest.raises(TemperaError, match="there are no images"):
        image_folder(str(tmp_path / "elsewhere"))


def test_pictures_of_one_name_do_not_share_a_caption(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "b.png"):
        (tmp_path / name).write_bytes(picture("a"))
    for name in ("a.txt", "b.txt", "b.TXT", "c.txt"):
        (tmp_path / name).write_text("colour 97")
    source = image_folder(str(tmp_path))
    assert check(source, 7) == []
    told = [item.why for item in source.read(0) if isinstance(item, Broken)]
    assert "one caption is for two pictures" in told[0] and told[2] == "it has 2 files of captions"
    assert source.tally.left_out == {".txt files without a picture": 1}


def test_a_reader_that_loses_a_part_is_found_out() -> None:
    def losing(tally: Tally) -> Iterator[Item]:
        tally.given += 2
        yield Entry("here", "a", "caption")

    source: Any = type("Losing", (), {})()
    with pytest.raises(RuntimeError, match="met 2 parts and told of 1"):
        list(tallied(source, losing))
