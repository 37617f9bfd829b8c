import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tempera.errors import TemperaError
from tempera.runtime.files import replacing, replacing_all, write_text


def test_weights_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "model.safetensors") as temporary:
            save_file({"weight": torch.zeros(2)}, temporary)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640


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


def test_files_that_belong_together_are_replaced_together(tmp_path: Path) -> None:
    def written(text: str, whole: bool) -> dict[str, str]:
        with suppress(KeyboardInterrupt), replacing_all(tmp_path / "report") as place:
            write_text(place / "a", text)
            if not whole:
                raise KeyboardInterrupt
            write_text(place / "b", text)
        return {path.name: path.read_text() for path in (tmp_path / "report").iterdir()}

    assert written("old", whole=False) == {}
    assert written("old", whole=True) == {"a": "old", "b": "old"}
    assert written("new", whole=False) == {"a": "old", "b": "old"}
    assert written("new", whole=True) == {"a": "new", "b": "new"}
    (tmp_path / "report" / "b").unlink()
    (tmp_path / "report" / "b").mkdir()
    with pytest.raises(TemperaError, match=r"^cannot write .*report/b: Is a directory; "):
        written("new", whole=True)
