"""Every source reads what is whole, tells what is broken, can start anywhere, notices changes, and
gives a picture its own caption.
"""

import gzip
import io
import json
import os
import tarfile
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tempera.data import sources
from tempera.data.benchmarks import prompt_file
from tempera.data.entries import Broken, Entry, Source, shown
from tempera.data.folder import image_folder
from tempera.data.sources import LARGEST, tar_shards
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


Members = dict[str, bytes] | list[tuple[str, bytes]]


def tar_of(path: Path, members: Members) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
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
    check(parquet(str(tmp_path)), texts, "0.parquet: the rest", *broken, "it has no column caption")
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
        files = str(tmp_path / file)
        return len(list(Stream(builder, image=image, caption="txt", data_files=files).read(0)))

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
    hub = "huggingface_hub.HfFileSystem.cat_file"
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


SETTINGS = settings(max_examples=60, deadline=None)
NAMES = st.sampled_from(["a", "b", "c", ".d", "sub/a", "sub/b"])
KINDS = ["png", "PNG", "bmp", "txt", "TXT", "json", "seg.png", "cls", "md", "", "broken.txt"]
MEMBERS = st.lists(st.tuples(NAMES, st.sampled_from(KINDS), st.booleans()), max_size=12)


def colour_of(name: str) -> int:
    """The colour of a sample's pictures, which its captions name."""
    return sum(map(ord, name)) % 251


def content(name: str, kind: str, empty: bool) -> bytes:
    """A file of a sample, by its kind."""
    text = f"colour {colour_of(name)}"
    if kind.lower() in ("png", "bmp"):
        return b"" if empty else picture(colour_of(name))
    if kind == "json":
        return json.dumps({} if empty else {"caption": text}).encode()
    return b"" if empty else text.encode()


def check_fit(source: Source) -> None:
    """Captions fit their pictures, wherever reading starts."""
    items = list(source.read(0))
    entries = [item for item in items if isinstance(item, Entry)]
    assert len({entry.key for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.image is not None
        if not isinstance(entry.image, Path) or entry.image.stat().st_size:
            red = decode_picture(entry.image).getpixel((0, 0))
            assert entry.caption == f"colour {red[0]}"  # type: ignore[index]
    assert list(map(str, source.read(1))) == list(map(str, items[1:]))


@SETTINGS
@given(MEMBERS, st.sampled_from([None, "caption"]))
def test_pictures_in_tars_have_their_captions(
    members: list[tuple[str, str, bool]], caption: str | None
) -> None:
    with TemporaryDirectory() as folder:
        parts = [(f"{name}.{kind}" if kind else name, content(name, kind, empty))
                 for name, kind, empty in members]  # fmt: skip
        tar_of(Path(folder, "0.tar"), [("x.png", picture()), *parts])
        check_fit(tar_shards(folder, caption))


@SETTINGS
@given(MEMBERS, st.lists(st.tuples(NAMES, st.sampled_from(["png", "bmp", "gone"]))))
def test_pictures_in_folders_have_their_captions(
    members: list[tuple[str, str, bool]], rows: list[tuple[str, str]]
) -> None:
    """With captions beside the pictures, or metadata."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        files = {f"{name}.{kind}" if kind else name: content(name, kind, empty)
                 for name, kind, empty in members}  # fmt: skip
        for name, data in {**files, "x.png": picture()}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if rows:
            named = [{"file_name": f"{name}.{kind}", "text": f"colour {colour_of(name)}"}
                     for name, kind in rows]  # fmt: skip
            (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, named)))
        check_fit(image_folder(place))


def test_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    a, b = picture(97), picture(98)
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
        members = [
            *(("a.png", a), ("a.txt", b"colour 97"), ("a.TXT", b"colour 98")),
            *(("b.png", b), ("b.txt", b"colour 98"), ("c.png", a), ("b.png", a), ("b.txt", b"no")),
        ]
        tar_of(tmp_path / directory / "0.tar", members)
    check(
        tar_shards(str(tmp_path / "*" / "0.tar")),
        ["colour 98"] * 2,  # of the same name in two files
        *["a: it has 2 .txt files", "c: no caption", "b: an earlier sample has the same name"] * 2,
    )


def test_a_large_member_is_not_read(tmp_path: Path) -> None:
    """A member of 6 GiB in a file of a few kilobytes, of which the rest is a hole."""
    path = tmp_path / "0.tar"
    with path.open("wb") as file:
        info = tarfile.TarInfo("a.png")
        info.size = 6 * 2**30
        file.write(info.tobuf())
        file.truncate(tarfile.BLOCKSIZE + info.size)
        file.seek(0, io.SEEK_END)
        for name, data in (("a.txt", b"one"), ("b.png", picture()), ("b.txt", b"two")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.write(info.tobuf() + data + bytes(-len(data) % tarfile.BLOCKSIZE))
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    check(tar_shards(str(tmp_path)), ["two"], "a: its picture is too large")
    assert LARGEST < 6 * 2**30


def test_what_a_folder_leaves_out_is_told(tmp_path: Path) -> None:
    train = tmp_path / "train"
    for place in (train, tmp_path / "test", tmp_path / ".git", tmp_path / "elsewhere"):
        place.mkdir()
    (train / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("a.png", "b.png", "notes.md", ".DS_Store", "metadata.csv"):
        (train / name).write_bytes(picture())
    (tmp_path / "test" / "metadata.jsonl").write_text("{}")
    (train / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "one"}')
    source = image_folder(str(tmp_path))
    (entry,) = source.read(0)
    assert isinstance(entry, Entry) and entry.key == "train/a.png#1"
    assert shown(source.left_out) == (
        "1 .csv files, 1 .md files, 1 files outside train, 1 hidden files, 1 hidden folders, "
        "1 linked folders and 1 pictures without a usable row"
    )


def test_pictures_of_one_name_do_not_share_a_caption(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "b.png"):
        (tmp_path / name).write_bytes(picture())
    for name in ("a.txt", "b.txt", "b.TXT", "c.txt"):
        (tmp_path / name).write_text("one")
    same = "has the same name, so it is unclear which picture the caption describes"
    check(image_folder(str(tmp_path)), [], same, same, "it has 2 caption files")


ASKED: dict[str, Any] = {"prompt": "Describe the image.", "caption": "a ring"}
MORE: list[dict[str, Any]] = [
    ASKED,
    {"prompt": "Describe the image.", "caption": None},
    {"prompt": "Describe it."},
]


def a_table(place: Path, kind: str) -> Source:
    """A source of MORE: in the second and third row only an instruction is left."""
    named = [{"file_name": "a.png", **row} for row in MORE]
    cells = [[row.get(name) or "" for name in ("prompt", "caption")] for row in MORE]
    (place / "a.png").write_bytes(picture())
    if kind == "jsonl":
        (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, named)))
    elif kind == "csv":
        lines = ["file_name,prompt,Caption", *(f"a.png,{','.join(row)}" for row in cells)]
        (place / "metadata.csv").write_text("\n".join(lines))
    elif kind == "tar":
        parts = {}
        for number, row in enumerate([*MORE[:2], {"caption": "", **MORE[2]}]):
            parts[f"{number}.png"] = picture()
            parts[f"{number}.json"] = json.dumps(row).encode()
        tar_of(place / "0.tar", parts)
        return tar_shards(str(place))
    else:
        rows = [{"image": picture(), **row} for row in MORE]
        pq.write_table(pa.Table.from_pylist(rows), place / "a.parquet")
        if kind == "dataset":
            return Stream("parquet", data_files=str(place / "a.parquet"))
        return parquet(str(place))
    return image_folder(str(place))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tar", "parquet", "dataset"])
def test_an_instruction_beside_a_caption_is_none(kind: str, tmp_path: Path) -> None:
    check(a_table(tmp_path, kind), ["a ring"], "no caption", "no caption")


def test_a_prompt_file_for_training_has_its_captions(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ASKED))
    check(prompt_file(str(tmp_path / "a.jsonl")), ["a ring"])


SOURCES_OF: dict[str, Any] = {
    "metadata.jsonl": image_folder,
    "metadata.csv": image_folder,
    "a.txt": image_folder,
    "a.png": image_folder,
    "0.tar": tar_shards,
    "0.parquet": parquet,
    "named.parquet": parquet,
    "lines.csv": lambda place: Stream("csv", data_files=f"{place}/lines.csv"),
    "lines.jsonl": lambda place: Stream("json", data_files=f"{place}/lines.jsonl"),
    "hub/metadata.jsonl": lambda place: Stream(f"{place}/hub"),
}


def described(name: str, place: Path) -> dict[str, Any]:
    source: Source = SOURCES_OF[name](str(place))
    return source.describe()


@pytest.mark.parametrize("name", SOURCES_OF)
def test_a_source_notices_what_was_edited(name: str, tmp_path: Path) -> None:
    """Captions and pictures, also those that a table names, though they are as large as before."""
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    image = tmp_path / "a.png"
    image.write_bytes(picture())
    row = {"file_name": "a.png", "image": "a.png", "text": "a red ring"}
    if name.startswith("lines"):
        row["image"] = str(image)
    if place.parent != tmp_path:
        (place.parent / "a.png").write_bytes(picture())
    if place.suffix == ".jsonl":
        place.write_text(json.dumps(row) + "\n")
    elif place.suffix == ".csv":
        place.write_text("\n".join([",".join(row), ",".join(row.values())]))
    elif place.suffix == ".tar":
        tar_of(place, {"a.png": picture(), "a.txt": b"a red ring"})
    elif place.suffix == ".parquet":
        pictures: Any = {"bytes": picture(), "path": None} if name[0] == "0" else "a.png"
        table = pa.Table.from_pylist([{"image": pictures, "text": "a red ring"}])
        pq.write_table(table, place, compression="none", use_dictionary=False)
    else:
        (tmp_path / "a.txt").write_text("a red ring")
    states = [described(name, tmp_path)]
    (tmp_path / "unread.md").write_text("notes")
    assert described(name, tmp_path) == states[0]
    changed = [image] if name == "named.parquet" else [place]
    if name in ("metadata.jsonl", "lines.csv", "lines.jsonl"):
        changed.append(image)
    for file in changed:
        state = file.stat()
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
        states.append(described(name, tmp_path))
        assert states[-1] != states[-2]


def test_datasets_would_read_several_tables_in_any_order(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.png").write_bytes(picture(number))
        (folder / "metadata.csv").write_text("file_name,text\na.png,one\n")
    with pytest.raises(TemperaError, match="3 metadata files.*source=imagefolder"):
        Stream(str(tmp_path)).describe()
    with pytest.raises(TemperaError, match="3 metadata files.*source=imagefolder"):
        list(Stream(str(tmp_path)).read(0))
    check(image_folder(str(tmp_path)), ["one"] * 3)


def anonymous() -> int:
    """Bytes of memory of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_what_is_held_of_a_parquet_file_does_not_grow_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    image = os.urandom(2**18)
    schema = pa.schema({"image": pa.binary(), "text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for number in range(20):
            pictures = [image + bytes([number, row]) for row in range(50)]
            writer.write_table(pa.table([pictures, ["one"] * 50], schema=schema))
    held = []
    for number, _ in enumerate(parquet(str(tmp_path)).read(0)):
        if number % 50 == 49:
            held.append(anonymous())
    assert max(held[5:]) - held[4] < path.stat().st_size / 4
