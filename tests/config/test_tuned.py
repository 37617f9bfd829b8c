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


@pytest.fixture
def parallel(stored: Path) -> Path:
    """A stored setting with a parallel draft of its own; returns the draft's weights."""
    weights = stored.with_name("other") / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    options = ["method=block", "drafter=parallel", "depth=2", f"drafter.path={weights.parent}"]
    found_under = conditions(composed("eval", ["method=eagle"]))
    save_tuned(stored, options, found_under, {"budget": "none"}, str(weights.parent))
    return weights


@pytest.mark.slow
def test_auto_with_a_parallel_draft(parallel: Path) -> None:
    found = composed("eval", ["method=auto", "seed=3"])
    assert found.drafter._target_ == "tempera.drafters.parallel.build_parallel"
    assert (found.drafter.path, found.depth, found.seed) == (str(parallel.parent), 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"others")])
def test_a_parallel_draft_that_has_changed_is_refused(change: Any, parallel: Path) -> None:
    change(parallel)
    with pytest.raises(TemperaError, match=f"the draft in {parallel.parent}, which has changed or"):
        composed("eval", ["method=auto"])


@pytest.mark.slow
def test_auto_is_the_stored_options(stored: Path) -> None:
    found = composed("eval", ["method=auto", "seed=3"])
    assert found == composed("eval", [*CHOSEN, "seed=3"])
    assert (found.depth, found.delta, "tuned" in found) == (3, 2.0, False)


@pytest.mark.slow
def test_a_run_knows_the_choices_behind_auto(stored: Path) -> None:
    cfg = composed_run("eval", ["method=auto"], "somewhere")
    assert cfg.directory == "somewhere"
    assert cfg.choices.method == "uniform_rsd" and cfg.choices.schedule == "uniform"
    assert list(cfg.overrides) == CHOSEN


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
