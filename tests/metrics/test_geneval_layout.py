from pathlib import Path

import pytest

from tempera.errors import TemperaError
from tempera.metrics.geneval_layout import arrange


def test_images_are_where_genevals_scorer_looks(tmp_path: Path) -> None:
    images, metadata, out = (tmp_path / name for name in ("images", "meta.jsonl", "out"))
    images.mkdir()
    metadata.write_text('{"tag": "a"}\n{"tag": "b"}\n')
    for name in ("00000-0000", "00000-0001", "00001-0003"):
        (images / f"{name}.png").write_text(name)
    assert arrange(images, metadata, out) == 3
    assert (out / "00001/metadata.jsonl").read_text() == '{"tag": "b"}\n'
    samples = sorted(path.relative_to(out).as_posix() for path in out.glob("*/samples/*"))
    assert samples == ["00000/samples/0000.png", "00000/samples/0001.png", "00001/samples/0003.png"]
    assert (out / "00001/samples/0003.png").read_text() == "00001-0003"
    (images / "00002-0000.png").touch()
    with pytest.raises(TemperaError, match="no line for 00002-0000"):
        arrange(images, metadata, out)
    with pytest.raises(TemperaError, match="no images"):
        arrange(tmp_path, metadata, out)
