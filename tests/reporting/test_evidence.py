"""evidence.md: one page of a sweep's runs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from report_runs import RUNS, made_up_runs

from tempera.reporting.collect import collect, find_runs
from tempera.reporting.evidence import EvidencePage, write
from tempera.runtime.files import fingerprint
from tempera.runtime.image_files import write_picture


def test_a_sweep_becomes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run's numbers and pictures stand in its row, the paper's table below; what is damaged
    is named.
    """
    typed = ["eval/run.py", "-m", "experiment=evidence", "method=ar,scd", "model=shapes"]
    monkeypatch.setattr(sys, "argv", typed)
    made_up_runs(tmp_path, RUNS[:4], prompts=2, model="a_b|c")
    for number, path in enumerate(sorted(tmp_path.rglob("metrics.json"))):
        content = json.loads(path.read_text())
        content["memory"] = (number + 1) * 2**30
        content["metrics"] |= {"latency": {"value": number + 7}, "latency_ar": {"value": 5}}
        content["about"]["paper"] = {"table": "coolsd_table1"}
        path.write_text(json.dumps(content))
        for picture in (path.parent / "images").iterdir():
            pixels = np.full((3, 8, 8), 60 * (number + 1), np.uint8)
            write_picture(picture, pixels, fingerprint(content["settings"]))
    (tmp_path / "3_coolsd" / "metrics.json").write_text("half")
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))))
    EvidencePage().on_multirun_end(config)
    said = capsys.readouterr().out
    assert str(tmp_path / "evidence.md") in said and "left out: " in said and "3_coolsd" in said
    text = (tmp_path / "evidence.md").read_text()
    assert "# Evidence: a_b\\|c\n" in text and "\n> Paper: " in text
    assert f"python {' '.join(typed)}" in text and "evidence.png" in text
    cells = json.loads((tmp_path / "evidence.json").read_text())
    found = {
        column: [one["value"] for one in cells if one["column"] == column]
        for column in ("seconds an image", "peak memory, GiB")
    }
    assert found == {"seconds an image": [5, 8, 9], "peak memory, GiB": [1, 2, 3]}
    image = imread(tmp_path / "evidence.png")[..., :3]
    height, width, _ = image.shape
    assert height > width / 2
    rows = [np.argwhere((image == round(60 * shade) / 255).all(-1))[:, 0] for shade in (1, 2, 3)]
    first, second, third = (np.median(one) for one in rows)
    assert first < second < third


def test_a_picture_of_another_text_under_the_same_id_stands_in_no_column(tmp_path: Path) -> None:
    """Nor does a prompt that a run lacks stop the page."""
    for number, text in enumerate(("a red ring", "a blue star")):
        made_up_runs(tmp_path / str(number), RUNS[number : number + 1], prompts=2, text=text)
        (run,) = (tmp_path / str(number)).iterdir()
        own = json.loads((run / "run.json").read_text())["identity"]
        for picture in (run / "images").iterdir():
            write_picture(
                picture, np.full((3, 8, 8), 60 * (1 + number), np.uint8), fingerprint(own)
            )
    made_up_runs(tmp_path / "2", RUNS[2:3], prompts=1)
    runs, _ = collect(find_runs([tmp_path])[0])
    assert [len(run.texts) for run in runs] == [2, 2, 1]
    write(tmp_path, runs)
    image = imread(tmp_path / "evidence.png")[..., :3]
    shades = [(image == round(60 * shade) / 255).all(-1).sum() for shade in (1, 2)]
    assert shades[0] > 0 and shades[1] == 0


def test_a_sweep_without_a_finished_run_has_no_page(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))))
    EvidencePage().on_multirun_end(config)
    assert not list(tmp_path.iterdir())
