"""An image server on loopback that behaves as the web does: by the first part of a path."""

import io
import struct
import zlib

from loopback import Answer, Request, Server
from PIL import Image


def jpeg(colour: tuple[int, int, int] = (200, 90, 40), size: tuple[int, int] = (48, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG")
    return file.getvalue()


class ImageServer(Server):
    """/good/… is a JPEG; /redirect/… leads to one; others are trouble."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: Request) -> Answer:
        path = request.path
        kind = path.split("/")[1]
        number = sum(path.encode())
        body = jpeg((number % 256, 7 * number % 256, 90))
        image = {"Content-Type": "image/jpeg"}
        match kind:
            case "missing":
                return Answer(404, {}, b"not here")
            case "hang":
                return Answer(200, image, body, pause=30)
            case "slow":
                return Answer(200, image, body, pause=0.3, chunk=1)
            case "redirect":
                return Answer(302, {"Location": f"/good/{path.rsplit('/', 1)[1]}"})
            case "html":
                return Answer(200, {"Content-Type": "text/html"}, b"<html>moved</html>")
            case "huge":
                return Answer(200, image, body + bytes(3_000_000))
            case "bomb":
                return Answer(200, {"Content-Type": "image/png"}, _bomb())
            case "noai":
                return Answer(200, {**image, "X-Robots-Tag": "noai"}, body)
            case "cut":
                return Answer(200, image, body, cut=len(body) // 2)
            case "tiny":
                return Answer(200, image, jpeg(size=(2, 2)))
        return Answer(200, image, body)


def _bomb() -> bytes:
    """A PNG of 30,000 × 30,000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
