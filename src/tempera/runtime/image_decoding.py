"""Images of any format as 8-bit sRGB, from files that may be damaged or hostile."""

import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from tempera.errors import shortened
from tempera.runtime.files import regular_file

MOST_PIXELS = 89_478_485
"""Larger images are not decoded; Pillow warns of decompression bombs from here on."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""What is decoded; Pillow would hand others, such as PostScript, to programs that run them."""
ENDINGS = (
    *("jpg", "jpeg", "png", "webp", "bmp", "jfif", "jpe", "gif", "tif", "tiff", "avif", "apng"),
    *("jp2", "jpx", "j2k", "ppm", "pgm", "pbm", "pnm", "tga", "ico", "dib"),
)
"""What the names of such files end in; of several pictures of one thing the first is taken."""
GREY = ("1", "L", "LA", "La")
"""Pillow's modes of grey pictures in 8 bits."""
SRGB_GAMMA = 1 / 2.2
"""The gamma that files in sRGB state (PNG, section 11.3.2)."""


def decode_picture(image: bytes | Path | Image.Image) -> Image.Image:
    """An image in any format as a viewer shows it, in 8-bit sRGB: colours by the embedded profile
    or the gamma of a PNG, upright by its EXIF orientation, on white where it is transparent,
    16-bit grey scaled down. Damaged EXIF, and a profile that is damaged or of another kind of
    picture, are ignored.

    Raises:
        OSError: it cannot be decoded, is not a regular file, or is implausibly large.
    """
    try:
        if isinstance(image, Image.Image):
            return _shown(image)
        if isinstance(image, Path):
            image = regular_file(image).read_bytes()
        return _shown(Image.open(io.BytesIO(image), formats=FORMATS))
    except MemoryError:
        raise
    except UnidentifiedImageError:  # its text names an object in memory
        raise OSError("it is not in a known image format") from None
    except Exception as problem:  # Pillow may raise anything on damaged bytes
        raise OSError(shortened(str(problem) or type(problem).__name__, 200)) from problem


def _shown(image: Image.Image) -> Image.Image:
    """An opened image as of `decode_picture`; OSError if it cannot be shown."""
    if image.width * image.height > MOST_PIXELS:
        raise OSError(f"{image.width} × {image.height} pixels are too many")
    image.load()
    with suppress(Exception):  # Pillow may raise anything on damaged EXIF
        image = ImageOps.exif_transpose(image)
    about = image.info
    if image.mode.startswith("I"):
        image = _in_8_bits(image)
    elif image.mode == "F":
        raise OSError("floating-point pixels have no defined white level")
    alpha = None
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("LA" if image.mode in GREY else "RGBA")
        alpha = image.getchannel("A")
    image = _in_srgb(image, about)
    if alpha is not None:
        image.putalpha(alpha)
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _in_srgb(image: Image.Image, about: Mapping[Any, Any]) -> Image.Image:
    """An image without its transparency in sRGB, by what its file says about its colours: the
    profile (ICC.1), else the gamma of a PNG. The spaces of colours without either are sRGB's.
    """
    shown = image.convert("RGB")
    profile = about.get("icc_profile")
    gamma = about.get("gamma")
    if profile:
        with suppress(OSError, ImageCms.PyCMSError):  # damaged
            shown = _by_profile(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    elif gamma and "srgb" not in about and abs(gamma - SRGB_GAMMA) > 1e-3:
        levels = [_srgb_level(level, gamma) for level in range(256)]
        shown = shown.point(levels * 3)
    shown.info.pop("icc_profile", None)  # it is no longer true
    return shown


def _by_profile(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """The colours of an image by their profile, as perceived; those of a profile for another kind
    of picture as they are.
    """
    space = profile.profile.xcolor_space
    if space == "GRAY" and image.mode in GREY:
        image = image.convert("L")
    elif space == "RGB " and image.mode != "CMYK":
        image = image.convert("RGB")
    elif space != "CMYK" or image.mode != "CMYK":
        return image.convert("RGB")
    srgb = ImageCms.createProfile("sRGB")
    shown = ImageCms.profileToProfile(image, profile, srgb, outputMode="RGB")
    assert shown is not None  # it is not made in place
    return shown


def _srgb_level(level: int, gamma: float) -> int:
    """The level of sRGB (IEC 61966-2-1) that is as bright as one of a PNG's gamma."""
    light: float = (level / 255) ** (1 / gamma)
    value: float = 12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055
    return round(255 * value)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits scaled down; OSError if its values exceed them."""
    grey: NDArray[Any] = np.asarray(image)
    if grey.min() < 0 or grey.max() > 65535:
        raise OSError("its values exceed 16 bits")
    rounded = (grey.astype(np.uint32) + 128) // 257
    return Image.fromarray(rounded.astype(np.uint8))
