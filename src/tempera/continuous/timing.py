"""Where the time of a round of continuous tokens goes: wrappers that stop a clock."""

from typing import Any, TypeVar, cast

from tempera.decoding.timing import Clock

TargetT = TypeVar("TargetT")
RuleT = TypeVar("RuleT")


class _Timed:
    """A target or a rule that stops a clock before and after some of its methods.

    Args:
        one: the target or rule.
        clock: the clock.
        parts: by method, the parts of a round that end before and after it, or None.
    """

    def __init__(self, one: Any, clock: Clock, **parts: tuple[str | None, str | None]) -> None:
        self._one, self._clock, self._parts = one, clock, parts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        if name not in self._parts:
            return found

        def called(*given: Any) -> Any:
            before, after = self._parts[name]
            self._lap(before)
            result = found(*given)
            self._lap(after)
            return result

        return called

    def _lap(self, part: str | None) -> None:
        if part is not None:
            self._clock.lap(part)


def timed(target: TargetT, rule: RuleT, clock: Clock) -> tuple[TargetT, RuleT]:
    """The same target and rule; in rounds, from now on, they add the time of each part to a clock:
    draft, target, verify and commit. That of the last commit is left out.
    """
    clock.start()
    return (
        cast(TargetT, _Timed(target, clock, conditions=("draft", "target"))),
        cast(RuleT, _Timed(rule, clock, drafted=("commit", None), verify=(None, "verify"))),
    )
