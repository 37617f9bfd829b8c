"""Errors for people: one sentence that says what is wrong, where, and what to do.

An error carries the option at fault where one is; the command line adds it where the sentence does
not name it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class TemperaError(ValueError):
    """A mistake the user can correct. Its message is one sentence: what, where and what to do.

    option: the option at fault as the command line spells it, such as "delta" or
        "metrics.reference"; None if no single option is.
    details: lines that follow the sentence, such as commands to run.
    """

    option: str | None = None
    details: Sequence[str] = ()

    def __init__(
        self, message: str = "", *, option: str | None = None, details: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.option = option
        self.details = details

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.details])


@dataclass(eq=False)
class DraftTooShort(TemperaError):
    """A draft that drafts in one pass has too few slots. slots: how many; depth: of the tree."""

    slots: int
    depth: int

    def __str__(self) -> str:
        return (
            f"this draft was trained to draft {self.slots} tokens in one pass, not {self.depth}: "
            f"draft {self.slots} or fewer, or train one that drafts more"
        )


def misfit(problem: BaseException) -> str:
    """Why data that was read is not what it should be, given what reading it raised."""
    if isinstance(problem, KeyError):
        return f"{shortened(str(problem))} is missing"
    if isinstance(problem, ValueError):  # a parser's words
        return shortened(str(problem))
    return "a value has the wrong type"


def shown(value: object) -> str:
    """Any object on one line, for a sentence about it; its kind if it cannot be shown."""
    try:
        return shortened(repr(value))
    except Exception:
        return f"an object of {type(value).__name__}"


def shortened(text: str, most: int = 80) -> str:
    """Any text on one printable line of at most `most` characters, for a sentence about it."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= most else f"{line[: most - 1]}…"
