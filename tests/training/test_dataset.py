"""What `train_data=` and `encoder=` choose, on a tiny target, and the order of training images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import tiny_codes, tiny_target

from tempera.data.encoders import TargetEncoder, VQEncoder
from tempera.data.entries import Entry, Listed
from tempera.data.prepare import prepare
from tempera.data.shards import CodedImages, read_shards
from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.network_identity import identity_of
from tempera.training.dataset import ShardCodes, encoded_codes, shard_codes

DRAWN: dict[str, Any] = {"draws": True, "batch_size": 32, "seed": 0}


def captions(count: int) -> Listed:
    texts = [f"a {'red' if index % 2 else 'blue'} ring" for index in range(count)]
    entries = [Entry(f"line {index}", str(index), text) for index, text in enumerate(texts)]
    return Listed(entries, {"kind": "captions", "count": count})


def tiny_vq(seed: int = 0) -> VQModel:
    torch.manual_seed(seed)
    return VQModel(VQConfig(24, 4, 32, (1, 1, 1), (1, 1, 1), 1, 32)).eval()


def test_images_drawn_by_the_target_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    target, vq = tiny_target(), tiny_vq()
    places = {batch: tmp_path / str(batch) for batch in (2, 5)}
    encoder = TargetEncoder(target, vq, seed=3)
    for batch, place in places.items():
        prepare(captions(7), encoder, place, batch_size=batch, shard_size=4, max_broken=0)
    two, five = (read_shards(place, identity_of(vq), 24, target.grid) for place in places.values())
    assert np.array_equal(two.codes, five.codes) and two.codes.max() < 24
    assert len({tuple(row) for row in two.codes.tolist()}) > 5
    other = TargetEncoder(target, vq, seed=4).encode([*captions(7).items])
    assert not np.array_equal(other.codes, two.codes)
    greedy = tiny_target()
    greedy.sampling = Sampling(guidance=2.0, temperature=0.0)
    with pytest.raises(TemperaError, match="made with encoder.sampling"):
        encoder = TargetEncoder(greedy, vq, seed=3)
        prepare(captions(7), encoder, tmp_path / "2", shard_size=4, batch_size=2, max_broken=0)


def test_generated_codes_are_drawn_once_and_belong_to_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, vq = tiny_target(), tiny_vq()
    for count, limit in ((19, None), (80, 19)):
        with pytest.raises(TemperaError, match="19 images are too few"):
            encoded_codes(target, vq, tmp_path, captions(count), **DRAWN, limit=limit)
    assert not list(tmp_path.iterdir())
    first = encoded_codes(target, vq, tmp_path, captions(80), **DRAWN, limit=60)
    assert first.described["count"] == len(first.images) == 60
    assert len(first.described["sha256"]) == 64
    monkeypatch.setattr("tempera.data.encoders.TargetEncoder.encode", None)
    again = encoded_codes(target, vq, tmp_path, captions(80), **DRAWN, limit=60)
    assert np.array_equal(first.images.codes, again.images.codes)
    with pytest.raises(TemperaError, match=f"tokenizer={identity_of(vq)}"):
        shard_codes(target, tiny_vq(seed=1), tmp_path, str(tmp_path / "codes"), seed=0)
    assert VQEncoder(target.grid, vq).size == (12, 16)


def images_of(keys: list[str]) -> CodedImages:
    numbers = np.arange(len(keys), dtype=np.int32)[:, None]
    return CodedImages(keys, [f"caption {key}" for key in keys], numbers)


def test_an_epoch_shows_every_training_image_once_and_no_held_out_one() -> None:
    codes = ShardCodes(images_of([str(i) for i in range(400)]), seed=3)
    held, kept = len(codes.held), len(codes.train_rows)
    assert held + kept == 400 and 8 <= held <= 36
    first, second = (
        codes.train(list(range(epoch * kept, (epoch + 1) * kept))).codes[:, 0].tolist()
        for epoch in (0, 1)
    )
    assert first != second and sorted(first) == sorted(second) == sorted(codes.train_rows.tolist())
    assert not set(first) & set(codes.holdout(list(range(held))).codes[:, 0].tolist())
    assert codes.holdout([held]).captions == codes.holdout([0]).captions
    with pytest.raises(TemperaError, match="2 images are too few"):
        ShardCodes(images_of(["1", "2"]))


def test_the_order_depends_on_the_seed_and_the_number_alone() -> None:
    one, two, other = tiny_codes(), tiny_codes(), ShardCodes(tiny_codes().images, seed=9)
    two.train([500])
    assert one.train([7, 90]).captions == two.train([7, 90]).captions
    assert np.array_equal(one.train([7, 90]).codes, two.train([7, 90]).codes)
    assert not np.array_equal(one.train(list(range(20))).codes, other.train(list(range(20))).codes)
    assert np.array_equal(one.held, other.held)


def test_captions_of_one_image_stay_on_one_side() -> None:
    codes = ShardCodes(images_of([f"{i // 5}#{i}" for i in range(1000)]))
    held = {codes.images.keys[i].partition("#")[0] for i in codes.held}
    assert not held & {codes.images.keys[i].partition("#")[0] for i in codes.train_rows}
