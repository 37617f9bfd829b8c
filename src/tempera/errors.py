"""Errors for people: one sentence that says what is wrong, where, and what to do.

An error carries the option at fault where one is; the command line adds it where the sentence does
not name it.
"""

import math
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TemperaError(ValueError):
    """A mistake the user can correct. Its message is one sentence: what, where and what to do.

    option: the option at fault as the command line spells it, such as "delta" or
        "metrics.reference"; None if no single option is.
    """

    option: str | None = None

    def __init__(self, message: str = "", *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@dataclass(eq=False)
class MemoryUnknown(TemperaError):
    """No size can be chosen for a device whose free memory is not known."""

    device: str

    def __str__(self) -> str:
        return (
            f"how much memory {self.device} has free is not known, so no batch size can be chosen "
            "for it: give a number"
        )


@dataclass(eq=False)
class MemoryTooSmall(TemperaError):
    """A job does not fit on its device. device: its name; needed, free: amounts of memory."""

    device: str
    needed: str
    free: str

    def __str__(self) -> str:
        return (
            f"this takes about {self.needed} of memory and {self.device} has {self.free}: take a "
            "smaller batch, half precision, a smaller model or a larger device"
        )


@dataclass(eq=False)
class DiskTooSmall(TemperaError):
    """A disk has no room. place: a directory on it; needed, free: amounts."""

    place: str
    needed: str
    free: str

    def __str__(self) -> str:
        return (
            f"{self.place} will hold {self.needed} more and its disk has room for {self.free}: "
            "free some space, or put it elsewhere"
        )


@dataclass(eq=False)
class EmptyDraft(TemperaError):
    """A drafter would draft no token. what: the argument that says so, such as "depth=0"."""

    what: str

    def __str__(self) -> str:
        return f"{self.what} drafts nothing; give 1 or more, or decode without a drafter"


@dataclass(eq=False)
class NotADensityRule(TemperaError):
    """A rule for discrete tokens met continuous ones. rule: its class."""

    rule: str

    def __str__(self) -> str:
        return (
            f"{self.rule} is no rule for continuous tokens; choose CSpD, "
            "MaximalCoupling or PathCoupling"
        )


@dataclass(eq=False)
class MissingWeights(TemperaError):
    """Published weights are not where they were sought.

    problem: what is missing and where. command: what downloads it. argument: what names the place,
    an argument in Python and an option on the command line.
    """

    problem: str
    command: str
    argument: str = "weights"

    def __str__(self) -> str:
        return f"{self.problem} get it with `{self.command}` and give {self.argument}=DIR"


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


@dataclass(eq=False)
class LengthOutOfReach(TemperaError):
    """No value of a free parameter gives an accepted length. low, high: those that are possible."""

    wanted: float
    low: float
    high: float

    def __str__(self) -> str:
        low, high = math.ceil(100 * self.low) / 100, math.floor(100 * self.high) / 100
        return (
            f"an accepted length of {self.wanted:g} is out of reach of this method: give about "
            f"{low:.2f} to {high:.2f}"
        )


@dataclass(eq=False)
class LengthNotFound(TemperaError):
    """No value that was tried gives an accepted length. option: the free parameter; value, length:
    the nearest that was measured.
    """

    option: str = field()
    wanted: float
    value: float
    length: float

    def __str__(self) -> str:
        return (
            f"no {self.option} was found that accepts {self.wanted:g} tokens a round; the nearest "
            f"is {self.option}={self.value:g} with {self.length:.3f}: take this length, or a "
            "larger tolerance"
        )


@dataclass(eq=False)
class PromptTooLong(TemperaError):
    """A prompt has more tokens than the model reads; where: which one, as in "prompt 1 of 2"."""

    where: str
    tokens: int
    room: int

    def __str__(self) -> str:
        return (
            f"{self.where} has {self.tokens} tokens, the model has room for {self.room}; shorten "
            "it, or let the text encoder truncate it"
        )


@dataclass(eq=False)
class NotAClass(TemperaError):
    """A prompt of a class-conditional model is not a class number. where: which prompt."""

    where: str
    classes: int

    def __str__(self) -> str:
        return f"{self.where}, is no class; give a number from 0 to {self.classes - 1}"


@dataclass(eq=False)
class BenchmarkTooLarge(TemperaError):
    """Memory ran out in a benchmark."""

    batch_size: int

    def __str__(self) -> str:
        return (
            f"out of memory at batch {self.batch_size}: take a smaller batch, half precision, or "
            "fewer drafted tokens"
        )


@dataclass(eq=False)
class CannotCompile(TemperaError):
    """PyTorch's compiler failed. reason: its first line."""

    reason: str

    def __str__(self) -> str:
        return (
            f"the model cannot be compiled on this machine ({self.reason}); install a C++ "
            "compiler, and on a GPU Triton, or go without"
        )


def misfit(problem: BaseException) -> str:
    """Why data that was read is not what it should be, given what reading it raised."""
    if isinstance(problem, KeyError):
        return f"{shortened(str(problem))} is missing"
    if isinstance(problem, ValueError):  # a parser's words
        return shortened(str(problem))
    return "a value is of another kind"


def shortened(text: str, most: int = 80) -> str:
    """Any text on one printable line of at most `most` characters, for a sentence about it."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= most else f"{line[: most - 1]}…"
