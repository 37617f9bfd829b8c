"""Errors for people: one sentence that says what is wrong, where, and what to do.

The sentences make sense in Python; `tempera.config.messages.OPTIONS` adds the option to give where
the command line prints them.
"""

import difflib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
class NaNProbabilities(TemperaError):
    """The target or the draft gave NaN for a prompt. who: "target" or "draft"."""

    who: str
    prompt: str

    def __str__(self) -> str:
        return (
            f"the {self.who} gave NaN probabilities for prompt '{self.prompt}'; check its weights, "
            "and try float32"
        )


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
class TooFewImages(TemperaError):
    """Too few training images to hold some out. count: how many there are."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} images are too few for a 5% hold-out: give a few hundred"


@dataclass(eq=False)
class EmptyDraft(TemperaError):
    """A drafter would draft no token. what: the argument that says so, such as "depth=0"."""

    what: str

    def __str__(self) -> str:
        return f"{self.what} drafts nothing; give 1 or more, or decode without a drafter"


@dataclass(eq=False)
class NotAChain(TemperaError):
    """A rule for chains got a draft that branches. rule: its class."""

    rule: str

    def __str__(self) -> str:
        return (
            f"{self.rule} accepts one chain by its prefixes, but this draft has branches; draft a "
            "chain, or take another rule"
        )


@dataclass(eq=False)
class OtherSchedule(TemperaError):
    """A rule got a schedule of another kind. rule: its class; wants, has: what schedules hold."""

    rule: str
    wants: str
    has: str

    def __str__(self) -> str:
        return f"{self.rule} takes a schedule of {self.wants}, and this one holds {self.has}"


@dataclass(eq=False)
class CoupledDraft(TemperaError):
    """A rule for fresh drafts got guesses from earlier rounds. rule: its class."""

    rule: str

    def __str__(self) -> str:
        return (
            f"{self.rule} is not lossless with guesses that live on from round to round; draw new "
            "ones in every round, or take the exact rule"
        )


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
class NotADiscreteRule(TemperaError):
    """A rule for continuous tokens met discrete ones. rule: its class."""

    rule: str

    def __str__(self) -> str:
        return f"{self.rule} is no rule for discrete tokens; choose another, such as Exact"


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
class NoSmallerModel(TemperaError):
    """A model has no smaller one that can draft for it."""

    def __str__(self) -> str:
        return "this model names no smaller one to draft for it; choose another model or drafter"


@dataclass(eq=False)
class NoStaticTree(TemperaError):
    """Statistics of drafts need a static tree of them."""

    def __str__(self) -> str:
        return (
            "a schedule is calibrated on chains or static trees of a draft network: use "
            "method=coolsd, eagle, uniform_rsd or optimal_rsd"
        )


@dataclass(eq=False)
class OtherCodebook(TemperaError):
    """A file holds the neighbours of another codebook; made, wanted: hashes of the codebooks."""

    path: Path
    made: str | None
    wanted: str

    def __str__(self) -> str:
        return (
            f"the neighbours in {self.path} were built for another codebook ({self.made}, but this "
            f"model's is {self.wanted}); delete the file, or keep this model's in another directory"
        )


@dataclass(eq=False)
class EmptySearch(TemperaError):
    """A search for an accepted length can find none. what: the argument, such as "prompts=0"."""

    what: str

    def __str__(self) -> str:
        return (
            f"a search for a length with {self.what} finds none: give at least 1 for prompts, "
            "trials and pilot, and a tolerance above 0"
        )


@dataclass(eq=False)
class NoRange(TemperaError):
    """Two ends enclose no values of a free parameter. least, most: the ends; option: its name."""

    least: float | None
    most: float | None
    option: str = field()

    def __str__(self) -> str:
        return (
            f"least={self.least} to most={self.most} is no range of {self.option}: give two "
            "numbers above 0, the smaller first"
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
class LengthBeyondDraft(TemperaError):
    """No schedule gives a round an expected length. drafted: tokens drafted in a round; low, high:
    the lengths that are possible.
    """

    wanted: float
    drafted: int
    low: float
    high: float

    def __str__(self) -> str:
        low, high = math.ceil(1000 * self.low) / 1000, math.floor(1000 * self.high) / 1000
        return (
            f"an expected length of {self.wanted:g} is out of reach with {self.drafted} drafted "
            f"tokens here: give {low:g} (exact decoding) to {high:g}"
        )


@dataclass(eq=False)
class LengthNotGiven(TemperaError):
    """A schedule is solved for an expected length, and none is given. schedule: its name; low,
    high: the lengths that are possible.
    """

    schedule: str
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"the {self.schedule} schedule needs an expected length: give {self.low:.2f} tokens a "
            f"round (exact decoding) to {self.high:.2f}"
        )


@dataclass(eq=False)
class DeltaNotUsed(TemperaError):
    """A schedule that is solved for an expected length got a δ."""

    delta: float

    def __str__(self) -> str:
        return (
            f"the calibrated schedule follows from an expected length and takes no δ, but got "
            f"{self.delta:g}: leave δ out, or choose another schedule"
        )


@dataclass(eq=False)
class ChainsTooShort(TemperaError):
    """A calibration has shorter chains than a run drafts. file: where it is; measured: its chains;
    drafted: the run's.
    """

    file: str
    measured: int
    drafted: int

    def __str__(self) -> str:
        return (
            f"{self.file} holds chains of {self.measured}, but this run drafts {self.drafted}: "
            f"measure again with {self.drafted}"
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


@dataclass(eq=False)
class NoReference(TemperaError):
    """Metrics compare with real images, and none are given. metrics: their titles."""

    metrics: Sequence[str]

    def __str__(self) -> str:
        return (
            f"no real images are given to compare with, which {' and '.join(self.metrics)} "
            f"need{'s' if len(self.metrics) == 1 else ''}: give a directory of images, or MS-COCO's"
        )


@dataclass(eq=False)
class UnknownMeasure(TemperaError):
    """A name stands for no metric. name: it; known: all names."""

    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        near = difflib.get_close_matches(self.name, self.known, n=1)
        meant = f"did you mean {near[0]}? The names are" if near else "the names are"
        return f"there is no metric {self.name}: {meant} {', '.join(self.known)}"


@dataclass(eq=False)
class UnknownTree(TemperaError):
    """A name stands for no public draft tree. name: it; known: all names."""

    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return f"there is no draft tree named '{self.name}'; choose one of {', '.join(self.known)}"


@dataclass(eq=False)
class OtherWorld(TemperaError):
    """An evaluator of one world of pictures met another model. model: its name."""

    model: str

    def __str__(self) -> str:
        return (
            "the shipped networks evaluate pictures of the shapes world, not of "
            f"{self.model}; take published networks, or none"
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


def main_guard(main: Callable[P, T]) -> Callable[P, T]:
    """Wrap a script's `main`: a `TemperaError` becomes `error: <sentence>` on standard error and
    exit status 1, without a traceback.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return main(*args, **kwargs)
        except TemperaError as problem:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(1)

    return guarded
