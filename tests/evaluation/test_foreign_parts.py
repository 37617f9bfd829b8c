"""What is read back belongs to the run that reads it: another run's files, mixtures with them and
values that cannot be are refused where they are read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny_evaluation import tiny_evaluate

from tempera.errors import TemperaError
from tempera.reporting.collect import read_run
from tempera.reporting.page import page_data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two finished runs of the same prompts with replays, which differ in an option alone."""
    places = {name: tmp_path_factory.mktemp("runs") / name for name in ("own", "other")}
    tiny_evaluate(places["own"])
    tiny_evaluate(places["other"], delta=1.75)
    return places


def copied(part: str) -> Callable[[Path, Path], None]:
    """Copy another run's files of a part over a run's own."""

    def change(own: Path, other: Path) -> None:
        files = sorted(path for path in other.glob(part) if path.is_file())
        assert files
        for file in files:
            shutil.copy(file, own / file.relative_to(other))

    return change


def among(part: str) -> Callable[[Path, Path], None]:
    """Put another run's file beside a run's own."""

    def change(own: Path, other: Path) -> None:
        file = next(other.glob(part))
        shutil.copy(file, own / file.relative_to(other).with_name("another.parquet"))

    return change


def black(own: Path, other: Path) -> None:
    path = own / "images/world-000003.png"
    with Image.open(path) as picture:
        Image.new("RGB", picture.size).save(path)


def swapped(own: Path, other: Path) -> None:
    shutil.copy(own / "images/world-000004.png", own / "images/world-000003.png")


def with_values(part: str, **values: Callable[[Any], Any]) -> Callable[[Path, Path], None]:
    """Change values of a part's first row, under its own identity."""

    def change(own: Path, other: Path) -> None:
        path = sorted(own.glob(part))[0]
        table = pq.read_table(path)
        rows = table.to_pylist()
        rows[0] |= {name: value(rows[0][name]) for name, value in values.items()}
        changed = type(table).from_pylist(rows)
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)

    return change


def added(number: float) -> Callable[[Any], Any]:
    return lambda given: (np.array(given) + number).tolist()


FOREIGN: dict[str, Callable[[Path, Path], None]] = {
    "records": copied("records/*"),
    "a part beside the records": among("records/*"),
    "timings": copied("timings/*/*"),
    "scores": copied("scores/toy/*"),
    "pictures": copied("images/*"),
    "a black picture": black,
    "another prompt's picture": swapped,
    "more accepted than tested": with_values("records/*", accepted=added(100_000)),
    "no rounds": with_values("records/*", rounds=lambda _: 0),
    "a timing below 0": with_values("timings/*/*", ar=lambda _: -1.0),
}
"""What is wrong in a run that goes on -> how it comes about."""


@pytest.mark.parametrize("what", FOREIGN)
def test_a_run_reads_its_own_parts_alone(what: str, runs: dict[str, Path], tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(runs["own"], own)
    FOREIGN[what](own, runs["other"])
    with pytest.raises(TemperaError) as refused:
        tiny_evaluate(own)
    told = str(refused.value)
    assert str(own) in told and "delete" in told and "\n" not in told


SHOWN: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "numbers": (copied("metrics.json"), r"metrics\.json belongs to another run"),
    "prompts": (copied("results.parquet"), "results.parquet does not match metrics.json"),
    "both": (copied("*s.*"), r"metrics\.json belongs to another run"),
    "values": (
        with_values("results.parquet", rounds=lambda _: 1),
        "results.parquet does not match",
    ),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_report_reads_a_runs_own_results_alone(
    what: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(runs["own"], own)
    change, told = SHOWN[what]
    read_run(own)
    change(own, runs["other"])
    with pytest.raises(TemperaError, match=told):
        read_run(own)


@pytest.mark.parametrize("change", [black, swapped, copied("images/*-000003.png")])
def test_a_page_shows_a_runs_own_pictures_alone(
    change: Callable[[Path, Path], None], runs: dict[str, Path], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(runs["own"], own)
    change(own, runs["other"])
    copied("replays/*")(own, runs["other"])
    data, problems = page_data([read_run(own)])
    prompts = data["runs"][0]["prompts"]
    assert [one["id"] for one in prompts if one["picture"] is None] == ["world-000003"]
    assert not any(one["replay"] for one in prompts)
    assert len(problems) == 2 and "from another run" in problems[0]
    assert "000003.png is not the picture that this run made" in problems[1]


def test_each_part_says_whose_it_is(runs: dict[str, Path]) -> None:
    """Every Parquet file and picture of a run carries the same identity."""
    found = {
        (pq.read_schema(path).metadata or {}).get(b"made_by", b"").decode()
        for path in runs["own"].rglob("*.parquet")
    }
    pictures = {
        Image.open(path).info["tempera"].partition("/")[0]
        for path in runs["own"].glob("images/*.png")
    }
    assert found == pictures == {read_run(runs["own"]).made_by}
    settings = json.loads((runs["own"] / "metrics.json").read_text())["settings"]
    assert settings["delta"] == 1.5
