"""Real images: opened before anything is generated, then cropped and resized."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub
from PIL import Image

from tempera.errors import TemperaError
from tempera.metrics import reference as references
from tempera.metrics.reference import Reference
from tempera.runtime.hub import Repository


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twenty pictures that have a darker edge beyond their central square."""
    directory = tmp_path / "real" / "deeper"
    directory.mkdir(parents=True)
    for number in range(20):
        size = (40, 30) if number % 2 else (30, 40)
        picture = Image.new("RGB", size)
        inner = ((size[0] - 30) // 2, (size[1] - 30) // 2)
        picture.paste(Image.new("RGB", (30, 30), (10 * number,) * 3), inner)
        picture.save(directory / f"{number:02}.png")
    return tmp_path / "real"


def test_central_squares_in_the_pictures_own_size(images: Path) -> None:
    Reference(str(images)).check()
    for edge in (24, 45):
        (batch,) = Reference(str(images)).pictures(edge)
        assert batch.shape == (20, 3, edge, edge)
        assert all((batch[number] == 10 * number).all() for number in range(20))
    one = Reference(str(images)).identity
    Image.new("I;16", (30, 30), 128 * 257).save(images / "grey.png")
    assert one != Reference(str(images)).identity
    (batch,) = Reference(str(images)).pictures(8)
    assert batch[-1].min() == batch[-1].max() == 128


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"junk"), os.mkfifo])
def test_everything_is_opened_first(write: Callable[[Path], object], images: Path) -> None:
    """One sentence before anything is generated."""
    write(images / "z.PNG")
    with pytest.raises(TemperaError, match=r"z\.PNG cannot be read as an image") as problem:
        Reference(str(images)).check()
    assert problem.value.option == "metrics.reference"


def test_few_images_are_refused(images: Path) -> None:
    for path in sorted(images.rglob("*.png"))[:5]:
        path.unlink()
    for place, words in (("", "holds 15 images"), ("nowhere", "is not a directory")):
        with pytest.raises(TemperaError, match=words):
            Reference(str(images / place)).check()


@pytest.mark.slow
def test_coco_from_the_hub(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Parquet files with every other picture, read part by part."""
    rows = [{"image": {"bytes": path.read_bytes(), "path": path.name}, "answer": [""]}
            for path in sorted(images.rglob("*.png"))]  # fmt: skip
    parts = {f"data/val-0000{number}-of-00002.parquet": tmp_path / f"{number}.parquet"
             for number in range(2)}  # fmt: skip
    for number, path in enumerate(parts.values()):
        pq.write_table(pa.Table.from_pylist(rows[number::2]), path)
    with Hub(tmp_path / "hub") as hub:
        hub.here(monkeypatch)
        commit = hub.add("some/coco", {**parts, "data/test-0.parquet": b""}, kind="datasets")
        monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", commit))
        reference = Reference("coco")
        reference.check()
        assert reference.to_download() == sum(part.stat().st_size for part in parts.values())
        assert hub.downloads() == []
        reference.fetch()
        assert sorted(hub.downloads()) == sorted(parts) and reference.to_download() == 0
        hub.here(monkeypatch, offline=True)
        reference.check()
        (batch,) = reference.pictures(8)
        assert batch[:, 0, 0, 0].tolist() == [*range(0, 200, 20), *range(10, 200, 20)]
        monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", "0" * 40))
        with pytest.raises(TemperaError, match="some/coco is not in the hub's cache"):
            reference.check()
