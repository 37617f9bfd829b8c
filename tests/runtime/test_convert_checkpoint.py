from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tempera.errors import TemperaError
from tempera.runtime.convert_checkpoint import convert, main, salvage
from tempera.runtime.tensor_files import read_tensors


class Callback:
    """What a trainer keeps beside the weights."""

    def __init__(self) -> None:
        self.best, self.seen = torch.ones(2), {"epochs": [1, 2]}


class Evil:
    def __reduce__(self) -> tuple[Any, Any]:
        return print, ("run",)


def lightning(path: Path, *more: object) -> dict[str, torch.Tensor]:
    """A checkpoint as Lightning writes it; returns its weights."""
    layer = torch.nn.Linear(3, 2)
    weights = {**layer.state_dict(), "tied": layer.weight.data, "half": torch.ones(2).half()}
    torch.save(
        {
            "state_dict": weights,
            "callbacks": {Callback: Callback(), "more": more},
            "hyper_parameters": Namespace(lr=0.1),
        },
        path,
    )
    return weights


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tensors_of_a_lightning_checkpoint(tmp_path: Path, zipped: bool) -> None:
    path, out = tmp_path / "vqgan.ckpt", tmp_path / "vqgan.safetensors"
    weights = lightning(path)
    if not zipped:
        torch.save({"state_dict": weights, "more": Callback()}, path,
                   _use_new_zipfile_serialization=False)  # fmt: skip
    assert convert(path, out) == 4
    found = load_file(out)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert found["half"].dtype == torch.float16


def test_no_code_of_the_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = lightning(tmp_path / "a.ckpt", Evil())
    assert salvage(tmp_path / "a.ckpt").keys() == weights.keys()
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "target", "words"),
    [
        ({"state_dict": {"a": 1}}, "out.safetensors", "holds no named tensors"),
        (torch.ones(2), "out.safetensors", "holds no named tensors"),
        ({"a": torch.ones(2)}, "out.pt", "does not end in .safetensors"),
        (None, "out.safetensors", "is no PyTorch checkpoint"),
    ],
)
def test_what_cannot_be_converted(content: object, target: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "in.ckpt"
    if content is None:
        source.write_bytes(b"rubbish")
    else:
        torch.save(content, source)
    with pytest.raises(TemperaError, match=words):
        convert(source, tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["in.ckpt"]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lightning(tmp_path / "a.ckpt")
    arguments = [str(tmp_path / "a.ckpt"), str(tmp_path / "a.safetensors")]
    monkeypatch.setattr("sys.argv", ["convert_checkpoint", *arguments])
    main()
    assert capsys.readouterr().out == f"4 tensors: {arguments[1]}\n"
    monkeypatch.setattr("sys.argv", ["convert_checkpoint", str(tmp_path / "none"), arguments[1]])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("read", [salvage, read_tensors])
def test_programs_are_refused_and_not_run(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "a.pt"))
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("run"))
    with pytest.raises(TemperaError, match="is a TorchScript program"):
        read(tmp_path / "a.pt")
