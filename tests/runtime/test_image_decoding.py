"""One decoder for pictures: what a viewer shows, or a reason."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_server import _bomb
from PIL import Image, ImageCms

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


def fixed(*numbers: float) -> bytes:
    return b"".join(struct.pack(">i", round(number * 65536)) for number in numbers)


def profile(space: bytes, table: bytes = b"", **columns: tuple[float, float, float]) -> bytes:
    """An ICC profile, version 2: a table, or gamma 2.2 for grey or for primaries (for D50)."""
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + b"\0\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + b"\0" * 79
    tags = {b"desc": text, b"cprt": b"text\0\0\0\0x\0\0\0"}
    tags[b"wtpt"] = b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)
    for name, place in columns.items():
        tags[f"{name}XYZ".encode()] = b"XYZ \0\0\0\0" + fixed(*place)
        tags[f"{name}TRC".encode()] = curve
    if not columns:
        tags[b"A2B0" if table else b"kTRC"] = table or curve
    listing, body = struct.pack(">I", len(tags)), b""
    for tag, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        listing += tag + struct.pack(">II", 132 + 12 * len(tags) + len(body), len(data))
        body += data
    size = 128 + len(listing) + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"\0" * 4, 0x02400000, b"mntr", space, b"XYZ ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28
    return head + fixed(0.9642, 1, 0.8249) + b"\0" * 48 + listing + body


ADOBE = profile(
    b"RGB ", r=(0.6097, 0.3111, 0.0195), g=(0.2053, 0.6257, 0.0609), b=(0.1492, 0.0632, 0.7446)
)
DARK = profile(b"GRAY")
WIDE = (228, 90, 31)
"""COLOUR in Adobe RGB as sRGB: linear red is 1.398 R - 0.398 G, blue 1.043 B - 0.043 G."""
OF_ADOBE = {
    "PNG": encoded(PLAIN, icc_profile=ADOBE),
    "JPEG": encoded(PLAIN, "JPEG", icc_profile=ADOBE, quality=100, subsampling=0),
    "WebP": encoded(PLAIN, "WEBP", icc_profile=ADOBE, lossless=True),
    "TIFF": encoded(PLAIN, "TIFF", icc_profile=ADOBE),
    "AVIF": encoded(PLAIN, "AVIF", icc_profile=ADOBE, quality=100, subsampling="4:4:4"),
    "palette": encoded(PLAIN.quantize(2), icc_profile=ADOBE),
    "transparent palette": encoded(PLAIN.quantize(2), icc_profile=ADOBE, transparency=200),
    "opaque": encoded(PLAIN.convert("RGBA"), icc_profile=ADOBE),
}


@pytest.mark.parametrize("name", OF_ADOBE)
def test_colours_are_those_of_the_embedded_profile(name: str) -> None:
    shown = decode_picture(OF_ADOBE[name])
    assert shown.getpixel((1, 1)) == pytest.approx(WIDE, abs=2)
    assert decode_picture(shown).getpixel((1, 1)) == shown.getpixel((1, 1))  # once
    assert not Image.open(io.BytesIO(encoded(shown))).info.get("icc_profile")


def test_transparent_pictures_with_a_profile_are_on_white() -> None:
    clear = Image.new("RGBA", (6, 4), (*COLOUR, 128))
    half = [(255 + channel) / 2 for channel in WIDE]
    shown = decode_picture(encoded(clear, icc_profile=ADOBE))
    assert shown.getpixel((1, 1)) == pytest.approx(half, abs=2)
    hidden = decode_picture(encoded(PLAIN, icc_profile=ADOBE, transparency=COLOUR))
    assert hidden.getpixel((1, 1)) == (255, 255, 255)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
DIM = Image.new("L", (6, 4), 20)
CYAN = Image.new("CMYK", (6, 4), (255, 0, 0, 0))
AS_THEY_ARE = {
    "sRGB": (PLAIN, SRGB, COLOUR),
    "damaged": (PLAIN, b"nonsense", COLOUR),
    "cut off": (PLAIN, ADOBE[:300], COLOUR),
    "of grey": (PLAIN, DARK, COLOUR),
    "of another kind, CMYK": (Image.new("CMYK", (6, 4), (100, 30, 0, 0)), ADOBE, (155, 225, 255)),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_profiles_that_change_nothing(name: str) -> None:
    image, icc, colour = AS_THEY_ARE[name]
    shown = decode_picture(encoded(image, "TIFF", icc_profile=icc))
    assert shown.getpixel((1, 1)) == colour


@pytest.mark.parametrize(
    "image", [DIM, DIM.convert("LA"), Image.fromarray(np.full((4, 6), 20 * 257, np.uint16))]
)
def test_grey_of_a_profile_and_of_a_gamma(image: Image.Image) -> None:
    """20 of gamma 2.2 is as bright as 12 of sRGB, which is straight in the dark."""
    shown = decode_picture(encoded(image, icc_profile=DARK))
    assert shown.getpixel((1, 1)) == pytest.approx((12, 12, 12), abs=1)


def test_the_inks_of_a_profile() -> None:
    """A profile with a cyan of its own; its magenta and yellow are white."""
    white, cyan, black = (255, 128, 128), (140, 80, 90), (0, 128, 128)  # L*a*b*
    inks_of = (white + black) * 4 + (cyan + black) * 4
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table += bytes(range(256)) * 4 + bytes(inks_of) + bytes(range(256)) * 3
    inks = bytearray(profile(b"CMYK", table=table))
    inks[12:16], inks[20:24] = b"prtr", b"Lab "
    shown = decode_picture(encoded(CYAN, "TIFF", icc_profile=bytes(inks)))
    lab = Image.frombytes("LAB", (1, 1), bytes([140, 80 - 128 & 255, 90 - 128 & 255]))
    there = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    right = ImageCms.profileToProfile(lab, *there, outputMode="RGB")
    assert right is not None
    assert shown.getpixel((1, 1)) == pytest.approx(right.getpixel((0, 0)), abs=3)
    assert decode_picture(encoded(CYAN, "TIFF")).getpixel((1, 1)) == (0, 255, 255)


def with_gamma(image: Image.Image, gamma: int, *more: bytes) -> bytes:
    content = encoded(image)
    chunks = b""
    for chunk in (b"gAMA" + struct.pack(">I", gamma), *more):
        checksum = struct.pack(">I", zlib.crc32(chunk))
        chunks += struct.pack(">I", len(chunk) - 4) + chunk + checksum
    return content[:33] + chunks + content[33:]


def test_the_gamma_of_a_png() -> None:
    linear = decode_picture(with_gamma(Image.new("L", (6, 4), 55), 100000))
    assert linear.getpixel((1, 1)) == pytest.approx((128, 128, 128), abs=1)
    for content in (with_gamma(PLAIN, 45455), with_gamma(PLAIN, 100000, b"sRGB\0"),
                    with_gamma(PLAIN, 0)):  # fmt: skip
        assert decode_picture(content).getpixel((1, 1)) == COLOUR


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
