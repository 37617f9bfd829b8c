"""The text encoder reads every caption once, whatever the number of epochs, restarts, processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import tiny_codes, tiny_target
from together import together

from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.training import conditions
from tempera.training.conditions import store_conditions

ALONE = Processes(cpu=True)


@pytest.fixture
def captions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(conditions, "PART", 4)
    return tiny_codes().images.captions


def test_captions_are_encoded_once_and_read_as_they_were(
    captions: list[str], tmp_path: Path
) -> None:
    target, seen = tiny_target(), list[str]()
    encode, some = target.conditioner.encode, captions[:7]
    features, keep = encode(some)
    target.conditioner.encode = lambda prompts: (seen.extend(prompts), encode(prompts))[1]
    store_conditions(target, captions, tmp_path, ALONE, batch_size=3)
    assert sorted(seen[1:]) == sorted(set(captions))
    found, kept = target.conditioner(some)
    assert torch.equal(kept, keep) and not found[~kept].any()
    torch.testing.assert_close(found[kept], features[keep])
    again = tiny_target()
    again.conditioner.encode = lambda prompts: encode(prompts) if len(prompts) == 1 else None  # type: ignore
    store_conditions(again, captions, tmp_path, ALONE)
    assert torch.equal(again.conditioner(some)[0], found)
    other = tiny_target()
    other.identity = "another"
    with pytest.raises(TemperaError, match="written by another text encoder"):
        store_conditions(other, captions, tmp_path, ALONE)


def test_two_processes_share_the_captions(captions: list[str], tmp_path: Path) -> None:
    store_conditions(tiny_target(), captions, tmp_path / "one", ALONE)

    targets = [tiny_target(), tiny_target()]

    def kept(process: Any) -> None:
        store_conditions(targets[process.rank], captions, tmp_path / "two", process)

    together(kept)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two and len(one) == 3


def test_numbers_of_tokens_are_not_kept(captions: list[str], tmp_path: Path) -> None:
    target = tiny_target()
    target.conditioner.encode = lambda prompts: (
        (torch.zeros(len(prompts), 6, dtype=torch.int64),) * 2
    )
    before = target.conditioner
    store_conditions(target, captions, tmp_path, ALONE)
    assert target.conditioner is before and not list(tmp_path.iterdir())
