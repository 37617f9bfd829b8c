"""CONTRIBUTING.md's walk-through works as it is written: the rule is found exact, then biased,
and its YAML is an option.
"""

import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from paths import ROOT

from tempera.config.build import build_rule
from tempera.config.instantiate import instantiate

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def walk() -> dict[str, Any]:
    module = types.ModuleType("contributing_walk")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    for block in blocks("python"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), module.__dict__)
    return module.__dict__


def test_the_rule_takes_20_lines() -> None:
    lines = [
        line
        for line in blocks("python")[0].splitlines()
        if line.strip() and not line.startswith(("from", "import"))
    ]
    assert len(lines) <= 20


def test_one_is_found_exact_and_the_other_biased(walk: dict[str, Any]) -> None:
    assert walk["exact"].agrees
    assert str(walk["exact"]).startswith("agrees")
    assert not walk["biased"].agrees
    assert walk["biased"].accepted_length > walk["exact"].accepted_length


def test_the_preset_is_an_option(
    walk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    (conf / "rule" / "powered.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.setattr("tempera.rules.standard.Powered", walk["Powered"], raising=False)
    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("eval", ["method=eagle", "rule=powered", "alpha=0.5"])
        wrong = compose("eval", ["method=eagle", "rule=powered", "alpha=abc"])
    assert build_rule(cfg, depth=5) == walk["Powered"](0.5)
    with pytest.raises(ValueError, match="`alpha=abc` is not possible; it must be a number"):
        instantiate(wrong.rule)


def test_the_files_it_names_exist() -> None:
    for name in re.findall(r"`((?:src|tests|conf|eval)/[\w/.]+)`", TEXT):
        if name != "conf/rule/powered.yaml":
            assert (ROOT / name).exists(), name
