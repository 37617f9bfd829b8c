"""Real images: opened before anything is generated, then cropped and resized."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub
from PIL import Image

from tempera.data.folder import image_folder
from tempera.errors import TemperaError
from tempera.metrics import reference as references
from tempera.metrics.reference import Reference
from tempera.runtime.hub import Repository

PICTURES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), np.uint8)


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


def test_every_file_of_a_directory_counts_or_is_told(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `source=imagefolder` counts them: any format, and nothing that is hidden."""
    for number, ending in enumerate(("bmp", "tif", "jfif", "GIF", "avif", "ppm")):
        Image.new("RGB", (30, 30), (250, 0, 0)).save(images / f"z{number}.{ending}")
    for hidden in (".ipynb_checkpoints", ".thumbs"):
        (images / hidden).mkdir()
        Image.new("RGB", (8, 8)).save(images / hidden / "x.png")
    (images / "LICENSE").touch()
    (images / "._a.png").touch()
    reference = Reference(str(images))
    reference.check()
    (batch,) = reference.pictures(8)
    assert len(batch) == 20 + 6 and (batch[20:, 0] > 240).all()
    line = (
        "26 pictures; left out: 1 files without an extension, 1 hidden files and 2 hidden folders."
    )
    assert capsys.readouterr().out.splitlines()[0] == f"metrics.reference: {line}"
    assert image_folder(str(images)).count() == 26


def test_a_batch_of_adms(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "batch.npz", PICTURES, np.arange(60))
    reference = Reference(str(tmp_path / "batch.npz"))
    reference.check()
    batches = list(reference.pictures(8))
    assert [len(batch) for batch in batches] == [50, 10]
    assert np.array_equal(np.concatenate(batches), PICTURES.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("z.PNG", b"junk", "cannot be read as an image"),
        ("a.npz", {"arr_0": PICTURES[:15]}, "holds 15 images"),
        ("a.npz", {"arr_0": PICTURES / 255}, r"arr_0 is float64 \[60, 8, 8, 3\], not uint8"),
        ("a.npz", b"junk", "contains no pictures"),
        ("a.npz", os.mkfifo, "is a pipe or a device"),
        ("a.npz", str, "there is no file"),
    ],
)
def test_everything_is_opened_first(name: str, content: Any, words: str, images: Path) -> None:
    """One sentence before anything is generated: of a picture in a directory, or an archive."""
    path = images / name
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
    place = path if name == "a.npz" else images
    with pytest.raises(TemperaError, match=words) as problem:
        Reference(str(place)).check()
    assert problem.value.option == "metrics.reference"


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
        monkeypatch.setattr(references, "COCO2014", Repository("some/coco", "dataset", commit))
        assert len(next(Reference("coco2014").pictures(8))) == 20
        (batch,) = reference.pictures(8)
        assert batch[:, 0, 0, 0].tolist() == [*range(0, 200, 20), *range(10, 200, 20)]
        monkeypatch.setattr(references, "COCO", Repository("some/coco", "dataset", "0" * 40))
        with pytest.raises(TemperaError, match="some/coco is not in the hub's cache"):
            reference.check()
