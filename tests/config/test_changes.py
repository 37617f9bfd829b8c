"""What runs are named by, and what they are identified by."""

from dataclasses import dataclass
from typing import Any

import pytest

from tempera.config.compose import composed, given
from tempera.config.parts import Parts
from tempera.rules.standard import Exact


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("method=coolsd model=lumina seed=3 data.limit=8", {}),
        ("method=coolsd delta=3 floor=1", {"delta": 3, "floor": 1}),
        ("method=coolsd drafter=sjd", {"drafter": "sjd"}),
        ("method=coolsd rule=exact", {"rule": "exact"}),
        ("method=eagle rule=relaxed schedule=linear", {"rule": "relaxed", "schedule": "linear"}),
        (
            "method=eagle rule=block temperature=0.5 dtype=bfloat16",
            {"rule": "block", "temperature": 0.5, "dtype": "bfloat16"},
        ),
        ("method=gsd drafter=eagle +tree=chain", {"drafter": "eagle", "tree": "chain"}),
        ("method=coolsd drafter.path=mine", {"drafter.path": "mine"}),
        ("experiment=lantern_table4 method=ar replace=3", {"replace": 3}),
        ("experiment=lantern_table4 method=ar", {"replace": 1}),
        ("method=coolsd floor=1 temperature=0.5 verbose=true", {"temperature": 0.5, "floor": 1}),
        ("method=coolsd expected_length=3 diagnostics=false metrics=none", {}),
    ],
)
def test_a_run_is_named_by_what_was_given(options: str, found: dict[str, Any]) -> None:
    cfg = composed("eval", options.split())
    assert Parts.of(cfg, elsewhere=True).changes(given(cfg)) == found


@dataclass(frozen=True)
class Named(Exact):
    """A rule with an option that is any text."""

    schedule: Any
    residual_kind: str


def test_a_text_is_identity_whatever_it_is() -> None:
    rule = [f"rule._target_={__name__}.Named", "rule.residual_kind=${texture}"]
    cfg = composed("eval", ["method=coolsd", "+texture=1/2", *rule])
    assert Parts.of(cfg).settings({})["texture"] == "1/2"


def test_an_option_of_ones_own_is_identity_once_a_part_takes_it() -> None:
    taken = composed("eval", ["method=coolsd", "+boost=0.5", "schedule.nu=${boost}"])
    parts = Parts.of(taken)
    assert parts.settings({})["boost"] == 0.5
    assert parts.changes(given(taken)) == {"boost": 0.5, "schedule.nu": 0.5}
    unread = composed("eval", ["method=coolsd", "+boost=0.5"])
    parts = Parts.of(unread)
    assert "boost" not in parts.settings({}) and not parts.changes(given(unread))
