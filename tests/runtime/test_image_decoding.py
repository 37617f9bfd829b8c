"""One decoder for pictures: what a viewer shows, or a reason."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_server import _bomb
from PIL import Image

from tempera.runtime import image_decoding
from tempera.runtime.image_decoding import decode_picture

COLOUR = (200, 90, 40)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PLAIN = Image.new("RGB", (6, 4), COLOUR)
GREY = Image.fromarray(np.full((4, 6), 127 * 257 + 129, np.uint16))  # 127.502, rounded
HALF = Image.new("RGBA", (6, 4), (0, 0, 0, 0))
SHOWN = {
    "plain": (encoded(PLAIN), COLOUR),
    "16-bit grey": (encoded(GREY), (128, 128, 128)),
    "16-bit grey, TIFF": (encoded(GREY, "TIFF"), (128, 128, 128)),
    "transparent": (encoded(HALF), (255, 255, 255)),
    "transparent colour": (encoded(PLAIN, transparency=COLOUR), (255, 255, 255)),
    "damaged EXIF": (encoded(PLAIN, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09junk"), COLOUR),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_is_what_a_viewer_shows(name: str, tmp_path: Path) -> None:
    content, colour = SHOWN[name]
    (tmp_path / "file").write_bytes(content)
    for image in (content, tmp_path / "file"):
        shown = decode_picture(image)
        assert (shown.mode, shown.size) == ("RGB", (6, 4))
        assert shown.getpixel((1, 1)) == pytest.approx(colour, abs=2)


def test_a_picture_stands_upright() -> None:
    exif = Image.Exif()
    exif[274] = 6
    assert decode_picture(encoded(PLAIN, "JPEG", exif=exif)).size == (4, 6)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n",
     encoded(PLAIN)[:-30], _bomb(), encoded(Image.new("F", (6, 4)), "TIFF"),
     encoded(Image.fromarray(np.full((4, 6), 2**20, np.int32)), "TIFF")],
)  # fmt: skip
def test_what_is_no_picture_says_why(content: bytes) -> None:
    with pytest.raises(OSError, match="^(?!.* at 0x|.*Ghostscript)."):
        decode_picture(content)


def test_pipes_and_directories_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(OSError, match=path.name):
            decode_picture(path)


def test_an_implausibly_large_picture_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Image.new("RGB", (4, 4))
    monkeypatch.setattr(image_decoding, "MOST_PIXELS", 16)
    assert decode_picture(picture).size == (4, 4)
    monkeypatch.setattr(image_decoding, "MOST_PIXELS", 15)
    with pytest.raises(OSError, match="4 × 4 pixels are too many"):
        decode_picture(picture)
