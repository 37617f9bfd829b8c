"""method=auto is what tuning has found, under the conditions that it was found for."""

import json
from pathlib import Path
from typing import Any

import pytest

from tempera.config.compose import composed, composed_run
from tempera.config.tuned import conditions, merged, save_tuned
from tempera.errors import TemperaError

CHOSEN = ["method=uniform_rsd", "depth=3", "delta=2.0"]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("outputs/tuning/shapes.json")
    save_tuned(path, CHOSEN, conditions(composed("eval", ["method=eagle"])), {"budget": "kl:1"})
    return path


@pytest.mark.slow
def test_auto_is_the_stored_options(stored: Path) -> None:
    found = composed_run("eval", ["method=auto", "seed=3"], "somewhere")
    assert found == composed_run("eval", ["seed=3", *CHOSEN], "somewhere")
    assert (found.depth, found.choices.method, "tuned" in found) == (3, "uniform_rsd", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("guidance=3.5", "was found with guidance=2.0, but this run has guidance=3.5: run `python"),
        ("dtype=bfloat16", "was found with dtype=float32, but this run has dtype=bfloat16"),
        ("compile=true", "was found with compile=False, but this run has compile=True"),
        ("drafter.path=nowhere", "was found with draft=.*, but this run has draft=None"),
        ("tuned=no.json", "there is no no.json, which method=auto reads: run `python eval/tune.py"),
        ("depth=4", "there is no option `depth` with method=auto"),
    ],
)
def test_refused(option: str, message: str, stored: Path) -> None:
    with pytest.raises(TemperaError, match=message):
        composed("eval", ["method=auto", option])


@pytest.mark.slow
@pytest.mark.parametrize("content", [{"options": "method=ar", "conditions": {}}, {"options": []}])
def test_a_file_that_tuning_did_not_write(content: dict[str, Any], stored: Path) -> None:
    stored.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TemperaError, match="is not a result of tuning"):
        composed("eval", ["method=auto"])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["method=ar"], ["seed=1"]),  # it has no draft
        (["method=block"], ["seed=1", "drafter.path=here", "drafter.dtype=bfloat16"]),
        (["method=parallel"], ["seed=1", "drafter.dtype=bfloat16"]),
        (["method=block", "drafter=parallel"], ["seed=1", "drafter.dtype=bfloat16"]),
    ],
)
def test_options_of_another_draft_are_left_out(options: list[str], kept: list[str]) -> None:
    shared = ["seed=1", "drafter.path=here", "drafter.dtype=bfloat16"]
    assert merged(shared, options) == [*kept, *options]
