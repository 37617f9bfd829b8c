"""What runs change in their method's preset."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from tempera.config.changes import changes
from tempera.config.compose import composed


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("method=coolsd model=lumina seed=3 limit=8", {}),
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
    ],
)
def test_changes(options: str, found: dict[str, Any]) -> None:
    cfg = composed("eval", options.split())
    choices: Any = OmegaConf.to_container(cfg.choices)
    assert changes(cfg, choices) == found
