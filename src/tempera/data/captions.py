"""Checks captions against a model: those it cannot use count as broken, before any computation."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from typing_extensions import override

from tempera.data.prompts import Prompt, check_unique
from tempera.data.sources import Broken, Entry, Source
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes


class CaptionCheck(Protocol):
    """The part of a model's text encoder that tells usable captions from unusable ones."""

    def check(self, prompts: list[str]) -> None:
        """Raise TemperaError for a prompt that cannot be used."""


class CheckedCaptions(Source):
    """A source in which entries with unusable captions are broken.

    Args:
        source: captions, with or without images.
        captions: the model's check.
    """

    def __init__(self, source: Source, captions: CaptionCheck) -> None:
        self.source, self.captions = source, captions

    @override
    def describe(self) -> dict[str, Any]:
        return self.source.describe()

    @override
    def count(self) -> int | None:
        return self.source.count()

    @override
    def fetch(self, processes: Processes) -> None:
        self.source.fetch(processes)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for entry in self.source.read(start):
            yield entry if isinstance(entry, Broken) else self._checked(entry)

    def _checked(self, entry: Entry) -> Entry | Broken:
        try:
            self.captions.check([entry.caption])
        except TemperaError as problem:
            why = str(problem).removeprefix("prompt 1 of 1").partition(";")[0].partition(":")[0]
            return Broken(entry.where, f"the caption{why}")
        return entry


def check_prompts(prompts: Sequence[Prompt], captions: CaptionCheck) -> None:
    """Raise TemperaError for the first prompt that the model cannot use, or if two have one id."""
    check_unique(prompts)
    captions.check([prompt.text for prompt in prompts])
