"""Standard output and errors, whatever their encoding."""

import codecs
import io
import sys

WRITTEN = "tempera"
"""The name of `_written` among the ways to treat what an encoding lacks."""


def take_all_text() -> None:
    r"""Let what the encoding of standard output and errors lacks be written as Python escapes it,
    `\u03b4`, instead of ending the command. Other ways that PYTHONIOENCODING names stay.
    """
    codecs.register_error(WRITTEN, _written)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=WRITTEN)


def _written(problem: UnicodeError) -> tuple[str | bytes, int]:
    """A letter as an escape; a byte of a file's name, which is no text, as it is."""
    assert isinstance(problem, UnicodeEncodeError)
    problem.end = problem.start + 1
    try:
        return codecs.lookup_error("surrogateescape")(problem)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(problem)
