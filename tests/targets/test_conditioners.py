"""LlamaGen's conditioners: left-padded T5 features, class numbers and cleaned captions."""

import json
from pathlib import Path

import pytest
import torch
from tiny_targets import T5_SIZES, write_t5

from tempera.errors import TemperaError
from tempera.targets.conditioners import ClassLabels, RandomFeatures, clean_caption, load_flan_t5


def test_features_depend_on_their_caption_alone_and_are_left_padded(tmp_path: Path) -> None:
    model = write_t5(tmp_path)
    encoder = load_flan_t5(str(tmp_path), "google/flan-t5-xl", length=8, sizes=T5_SIZES)
    features, keep = encoder.encode(["A red ring", "a"])
    assert features.shape == (2, 8, 8) and keep.sum(1).tolist() == [4, 2]
    assert keep[:, -1].all() and features[~keep].abs().max() == 0
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([[2, 3, 4, 1]])).last_hidden_state[0]
        short = model(input_ids=torch.tensor([[2, 1]])).last_hidden_state[0]
    torch.testing.assert_close(features[0, 4:], alone)
    torch.testing.assert_close(features[1, 6:], short)
    features, keep = encoder.to("meta").encode(["A red ring", "a"])  # a dry run
    assert features.shape == (2, 8, 8) and keep.is_meta


def test_an_encoder_is_the_one_that_its_config_states(tmp_path: Path) -> None:
    write_t5(tmp_path)

    def encoded(**stated: object) -> torch.Tensor:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **stated}))
        encoder = load_flan_t5(str(tmp_path), "google/flan-t5-xl", length=8, sizes=T5_SIZES)
        return encoder.encode(["a red ring"])[0]

    usual = encoded()
    torch.testing.assert_close(encoded(feed_forward_proj="gated-gelu"), usual)
    assert not torch.allclose(encoded(feed_forward_proj="gated-silu"), usual)
    assert not torch.allclose(encoded(layer_norm_epsilon=1.0), usual)
    with pytest.raises(TemperaError, match="model_type=bert, but only t5 is supported"):
        encoded(model_type="bert")


def test_features_in_float16_do_not_overflow(tmp_path: Path) -> None:
    """T5's sums in the feed-forward layers exceed float16; elsewhere they are small."""
    write_t5(tmp_path)
    encoder = load_flan_t5(str(tmp_path), "google/flan-t5-xl", length=8, sizes=T5_SIZES)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if name.endswith(".wo.weight"):
                weight.mul_(30_000 / weight.abs().max())
            elif ".wi" in name:
                weight.mul_(10 / weight.abs().max())
    expected, _ = encoder.encode(["a red ring"])
    encoder.to(torch.float16)
    found, _ = encoder.encode(["a red ring"])
    assert found.dtype == torch.float16 and found.isfinite().all()
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.02)
    encoder.to(torch.bfloat16)
    assert {weight.dtype for weight in encoder.parameters()} == {torch.bfloat16}


def test_a_caption_that_is_too_long_is_refused_or_truncated(tmp_path: Path) -> None:
    write_t5(tmp_path)
    encoder = load_flan_t5(str(tmp_path), "google/flan-t5-xl", length=4, sizes=T5_SIZES)
    with pytest.raises(
        TemperaError, match="prompt 1 of 1 has 5 tokens, but the model takes at most 4"
    ):
        encoder.encode(["a red ring and"])
    cut = load_flan_t5(str(tmp_path), "google/flan-t5-xl", length=4, truncate=True, sizes=T5_SIZES)
    torch.testing.assert_close(cut.encode(["a red ring and"])[0], encoder.encode(["a red ring"])[0])
    with pytest.raises(TemperaError, match="prompt 2 of 2 is empty"):
        encoder.encode(["a", "  "])


def test_missing_text_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match=rf"{tmp_path} contains no tokenizer.json"):
        load_flan_t5(str(tmp_path), "google/flan-t5-xl", sizes=T5_SIZES)
    write_t5(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TemperaError, match="is not a tokenizer"):
        load_flan_t5(str(tmp_path), "google/flan-t5-xl", sizes=T5_SIZES)


def test_random_features_depend_on_the_caption_alone() -> None:
    encoder = RandomFeatures(3, 5).to(torch.bfloat16)
    features, keep = encoder.encode(["a", "b", "a"])
    assert features.dtype == torch.bfloat16 and keep.all()
    assert torch.equal(features[0], features[2]) and not torch.equal(features[0], features[1])


def test_class_numbers() -> None:
    labels, keep = ClassLabels(10).encode(["3", " 9 ", "0", "0" * 5000 + "7"])
    assert labels.tolist() == [3, 9, 0, 7] and keep.shape == (4, 1)
    for wrong in ("10", "cat", "-1", "", "1" * 5000):
        with pytest.raises(TemperaError, match=r"prompt 2 of 2, '.*', is not a class; .* 0 to 9"):
            ClassLabels(10).encode(["1", wrong])


@pytest.mark.parametrize(
    ("caption", "clean"),
    [
        ("A Blue Porsche 356, parked!", "a blue porsche 356, parked!"),
        ("see https://x.org/a.html now", "see now"),
        ("&quot;a&amp;b&quot; <br> cat.jpg", "a b"),
        ("this-is-my-cute-cat", "this is my cute cat"),
        ("red ★ © 2024 #5  @me", "red ★ 2024"),
    ],
)
def test_captions_are_cleaned(caption: str, clean: str) -> None:
    assert clean_caption(clean_caption(caption)).replace('"', "").strip() == clean
