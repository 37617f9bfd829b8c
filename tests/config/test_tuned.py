"""method=auto is what tuning has found, under the conditions that it was found for."""

import json
from pathlib import Path
from typing import Any

import pytest

import tempera
from tempera.config.compose import composed, composed_run
from tempera.config.tuned import beside, conditions, save_tuned
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
def test_another_file(stored: Path) -> None:
    other = stored.rename("other.json")
    assert composed("eval", ["method=auto", f"tuned={other}"]).depth == 3


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
    with pytest.raises(TemperaError, match="is no result of tuning"):
        composed("eval", ["method=auto"])


def test_plain_autoregression_has_no_draft() -> None:
    shared = ["seed=1", "drafter.path=here"]
    assert beside(shared, ["method=ar"]) == ["seed=1", "method=ar"]
    assert beside(shared, ["method=block"]) == [*shared, "method=block"]


@pytest.mark.slow
def test_in_python(stored: Path) -> None:
    drafter = tempera.load(method="auto").pipeline.method.drafter  # type: ignore[attr-defined]
    assert drafter.depth == 3
