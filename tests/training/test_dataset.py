"""What `train_data=` and `encoder=` choose, on a tiny target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import tiny_target

from tempera.data.encoders import target_encoder, vq_encoder
from tempera.data.prepare import prepare
from tempera.data.shards import read_shards
from tempera.data.sources import Entry
from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.network_identity import identity_of
from tempera.training.dataset import generated_codes, shard_codes


class Captions:
    """Captions in memory."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def describe(self) -> dict[str, Any]:
        return {"kind": "captions", "count": self.lines}

    def count(self) -> int:
        return self.lines

    def read(self, start: int) -> Iterator[Entry]:
        for index in range(start, self.lines):
            yield Entry(f"line {index}", str(index), f"a {'red' if index % 2 else 'blue'} ring")


def tiny_vq(seed: int = 0) -> VQModel:
    torch.manual_seed(seed)
    return VQModel(VQConfig(24, 4, 32, (1, 1, 1), (1, 1, 1), 1, 32)).eval()


def test_images_drawn_by_the_target_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    target, vq = tiny_target(), tiny_vq()
    for batch in (2, 5):
        prepare(
            Captions(7),
            target_encoder(target, vq, seed=3),
            tmp_path / str(batch),
            batch_size=batch,
            shard_size=4,
        )
    two, five = (
        read_shards(tmp_path / str(batch), identity_of(vq), 24, target.grid) for batch in (2, 5)
    )
    assert np.array_equal(two.codes, five.codes)
    assert two.codes.max() < 24
    assert len({tuple(row) for row in two.codes.tolist()}) > 5
    greedy = tiny_target()
    greedy.sampling = Sampling(guidance=2.0, temperature=0.0)
    with pytest.raises(TemperaError, match="holds shards of another encoder"):
        prepare(Captions(7), target_encoder(greedy, vq, seed=3), tmp_path / "2", shard_size=4)


def test_generated_codes_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, vq = tiny_target(), tiny_vq()
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(TemperaError, match="a target that is split among processes cannot"):
            generated_codes(target, vq, tmp_path, Captions(80), limit=60)
    first = generated_codes(target, vq, tmp_path, Captions(80), limit=60)
    assert len(first.images) == 60
    assert first.described["count"] == 60 and len(first.described["sha256"]) == 64

    def draw_nothing(entries: list[Entry]) -> None:
        raise AssertionError("they are drawn already")

    monkeypatch.setattr("tempera.data.encoders.TargetEncoder.encode", draw_nothing)
    again = generated_codes(target, vq, tmp_path, Captions(80), limit=60)
    assert np.array_equal(first.images.codes, again.images.codes)


def test_shards_belong_to_a_tokenizer(tmp_path: Path) -> None:
    target, vq = tiny_target(), tiny_vq()
    prepare(Captions(60), target_encoder(target, vq), tmp_path)
    assert len(shard_codes(target, vq, tmp_path, str(tmp_path)).images) == 60
    with pytest.raises(
        TemperaError, match=f"made with tokenizer {identity_of(vq)}, but the target's is"
    ):
        shard_codes(target, tiny_vq(seed=1), tmp_path, str(tmp_path))
    assert vq_encoder(target.grid, vq).size == (12, 16)


@pytest.mark.parametrize(("count", "limit"), [(19, None), (80, 19)])
def test_too_few_images_for_a_holdout_are_refused_before_encoding(
    count: int, limit: int | None, tmp_path: Path
) -> None:
    target, vq = tiny_target(), tiny_vq()
    with pytest.raises(TemperaError, match="19 images are too few"):
        generated_codes(target, vq, tmp_path, Captions(count), limit=limit)
    assert not list(tmp_path.iterdir())
