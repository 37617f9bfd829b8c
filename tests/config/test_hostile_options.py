"""Any value of any option of an evaluation composes and is told what to do, or is refused in one
sentence; nothing ends in a traceback.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tempera.commands.evaluate import main
from tempera.config.compose import composed, in_one_sentence
from tempera.config.messages import sentence
from tempera.errors import TemperaError

QUIET = {"method": "coolsd", "metrics": "none", "tracking": "none", "dry_run": "true"}
GROUPS = {
    *("method", "model", "rule", "schedule", "drafter", "tree", "data", "experiment", "launcher")
}


def names(options: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all options."""
    for key, value in options.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from names(value, f"{prefix}{key}.")


COMPOSED: Any = OmegaConf.to_container(composed("eval", ["method=coolsd"]))
OPTIONS = st.sampled_from(sorted({*GROUPS, *names(COMPOSED)} - {"directory", "overrides"}))
KNOWN = (
    *("", "null", "true", "nan", "inf", "-1", "0", "1e400", "1" * 20, "1.5", "abc", "a,b", "???"),
    *("[]", "[1]", "[null]", "[[1]]", "{}", "{a:1}", "{_target_:os.system}", "os.system", "'it'"),
    *("${seed}", "\\${a}", "${a}", "${oc.env:NO}", "${hydra:x}", "/dev/null", "x" * 5000, "[", "="),
)
VALUES = st.sampled_from(KNOWN) | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


def answer(option: str, place: Path) -> None:
    """Run a dry evaluation with an option, as the command line does."""
    quiet = [f"{name}={value}" for name, value in QUIET.items() if not option.startswith(name)]
    given = [*quiet, option]
    try:
        with in_one_sentence("eval", given):
            main(composed("eval", given, place))
    except TemperaError as problem:
        said = sentence(problem, "eval", given)
        assert said and "\n" not in said and "Traceback" not in said, said


def fuzz(examples: int, *, same: bool) -> Any:
    """A test of so many examples, the same in every run or others."""
    how = {"deadline": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=examples, derandomize=same, **how)
    @given(prefix=st.sampled_from(["", "", "+", "++", "~"]), option=OPTIONS, value=VALUES)
    @example(prefix="", option="replays", value="${hydra:x}")
    @example(prefix="", option="experiment", value="[1]")
    def test(prefix: str, option: str, value: str, tmp_path: Path) -> None:
        answer(f"~{option}" if prefix == "~" else f"{prefix}{option}={value}", tmp_path)

    return test


test_a_sample_of_hostile_values = fuzz(8, same=True)
test_many_hostile_values = pytest.mark.slow(fuzz(20, same=False))
