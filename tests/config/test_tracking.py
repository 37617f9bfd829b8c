"""What a tracked run records of its configuration."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from paths import ROOT

from tempera.config.tracking import Tracking
from tempera.runtime import tracking


@pytest.mark.parametrize(
    ("script", "options"),
    [("eval", ["method=coolsd", "delta=2"]), ("train_draft", ["ttt_steps=3"])],
)
def test_the_whole_resolved_configuration_is_recorded(
    script: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(script, ["tracking=none", *options])
    taken: dict[str, Any] = {}

    def record(*, directory: Path, **settings: Any) -> tracking.Tracker:
        taken.update(settings)
        return tracking.Tracker()

    monkeypatch.setattr(tracking, "no_tracker", record)
    experiment = "study" if script == "eval" else None
    choices = {"model": "shapes", "experiment": experiment, "hydra/launcher": "basic"}
    Tracking.of(cfg, script, choices).start(tmp_path, {"machine": "this one"})
    assert (taken["job_type"], taken["group"]) == (script, experiment or "shapes")
    assert taken["tags"] == ["model=shapes", *["experiment=study"] * bool(experiment)]
    config = taken["config"]
    assert config["machine"] == "this one"
    assert config["model"]["name"] == "shapes"
    assert "${" not in str(config)
    assert not {"directory", "choices", "overrides", "tracking"} & config.keys()
    for option in options:
        name, _, value = option.partition("=")
        assert name == "method" or str(config[name]) == value
