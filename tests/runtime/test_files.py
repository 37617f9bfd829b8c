import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tempera.errors import TemperaError
from tempera.runtime.files import (
    check_same,
    create_json,
    read_json,
    replacing,
    unwritable,
    writable_directory,
    write_text,
)


def test_weights_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "model.safetensors") as temporary:
            save_file({"weight": torch.zeros(2)}, temporary)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses power may keep the name without the content."""
    path = tmp_path / "report.md"
    flushed: list[tuple[int, bool]] = []

    def fsync(number: int) -> None:
        flushed.append((os.fstat(number).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(path, "whole")
    assert flushed == [(path.stat().st_ino, False)]


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    write_text(path, "whole")

    def half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ha", encoding="utf-8")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        half()
    assert path.read_text(encoding="utf-8") == "whole"
    assert [file.name for file in tmp_path.iterdir()] == ["report.md"]


def test_of_several_that_create_a_file_at_once_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert create_json(tmp_path / "run.json", {"first": 1})
    monkeypatch.setattr(Path, "exists", lambda path: False)  # it came a moment later
    assert not create_json(tmp_path / "run.json", {"first": 2})
    assert read_json(tmp_path / "run.json") == {"first": 1} and len([*tmp_path.iterdir()]) == 1


def test_what_another_version_began_is_named_as_such() -> None:
    check_same(Path("run"), {"format": 2, "seed": 1}, {"format": 2, "seed": 1})
    with pytest.raises(TemperaError, match="run was started by another version of tempera"):
        check_same(Path("run"), {"format": 1, "seed": 1}, {"format": 2, "seed": 1})


def test_a_fact_that_is_new_or_gone_is_a_difference() -> None:
    check_same(Path("run"), {"seed": 1}, {"seed": 1, "steps": None})
    for before, now in (({"seed": 1}, {"seed": 1, "steps": 2}), ({"steps": 2}, {})):
        with pytest.raises(TemperaError, match="made with steps="):
            check_same(Path("run"), before, now)


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_short_space_is_told_as_such(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by errors without a number, of which the disk itself is asked."""
    path = tmp_path / "a"
    if isinstance(problem, RuntimeError):
        assert "a directory that can be written" in str(unwritable(path, problem))
        full = Mock(side_effect=OSError(errno.ENOSPC, "full"))
        monkeypatch.setattr("tempera.runtime.files.TemporaryFile", full)
    assert "; free some space, or give another directory." in str(unwritable(path, problem))


def test_what_killed_writers_left_is_removed_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    left = [
        ".manifest.json.7-7.tempera-tmp",
        "draft/.config.json.7-8.tempera-tmp",
        ".run.json.7-7.tempera-new",
    ]
    own = [".env", "draft/.a.tmp", "notes.7-7.tmp", ".a.b.7-7.tmp", "draft/.a.1-2.new", "run.json"]
    (tmp_path / "draft").mkdir()
    for name in (*left, *own):
        (tmp_path / name).touch()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    writable_directory(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == names
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    writable_directory(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == names - {*left}
