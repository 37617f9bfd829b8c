"""tempera.accelerate with pictures in the prompts, against transformers' own `generate`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from held_models import Held, emu3_edits, glm_edits, glm_image, glm_turn, janus, noise

import tempera
from tempera import TemperaError
from tempera.targets.glm_image import GlmDecoder, GlmDecoderConfig, held_layout
from tempera.wrapped.ids import generate_ids, installed

PICTURED = {"glm_image": glm_edits, "emu3": emu3_edits}


@pytest.fixture(params=list(PICTURED))
def held(request: pytest.FixtureRequest) -> Held:
    return PICTURED[request.param]()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("method", ["ar", "scd"])
def test_greedy_images_are_those_of_generate(held: Held, method: str, size: int) -> None:
    """Of pictures of two sizes in one batch, or one after the other."""
    expected = held.greedy()
    assert len(expected.unique()) > 3
    fast = held.accelerated(method, batch_size=size)
    assert torch.equal(generate_ids(fast, **held.ids), expected)


@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_drafts_stand_where_the_rows_of_pictures_are(method: str) -> None:
    """With rows of other positions greedy images are the same, whatever is drafted."""
    held = glm_edits()
    fast = held.accelerated(method, **{"drafter.path": "random"}, batch_size=2)
    assert torch.equal(generate_ids(fast, **held.ids), held.greedy())


def test_the_picture_is_read(held: Held) -> None:
    other = {**held.ids, "pixel_values": held.ids["pixel_values"].flip(0) * -1}
    fast = held.accelerated()
    assert not torch.equal(generate_ids(fast, **held.ids), generate_ids(fast, **other))


def asked_with(texts: list[str], pictures: list[list[Any]]) -> dict[str, Any]:
    """What transformers' processor makes of them."""
    processor = glm_edits().processor()
    turns = [glm_turn(processor, t, len(p)) for t, p in zip(texts, pictures, strict=True)]
    made: dict[str, Any] = processor(
        text=turns, images=pictures, target_h=128, target_w=192, return_tensors="pt", padding=True
    )
    return made


@pytest.mark.parametrize(
    ("texts", "image", "pictures"),
    [
        (["a cat"], noise(64, 96), [[noise(64, 96)]]),
        (["a cat"], [noise(64, 96), noise(64, 64)], [[noise(64, 96), noise(64, 64)]]),
        (["a", "a red cat"], noise(64, 96), [[noise(64, 96)]] * 2),
        (["a", "a"], [noise(64, 96), [noise(96, 64)]], [[noise(64, 96)], [noise(96, 64)]]),
    ],
)
def test_texts_and_pictures(texts: list[str], image: Any, pictures: list[list[Any]]) -> None:
    """One picture, several of one prompt, one for all, one for each."""
    held = glm_edits()
    inputs = {**held.inputs, **asked_with(texts, pictures)}
    start = inputs["input_ids"].shape[1]
    expected = held.model.generate(**inputs, min_new_tokens=24)[:, start:]
    fast = held.accelerated(processor=held.processor(), batch_size=2)
    made = fast.generate(texts if len(texts) > 1 else texts[0], image=image, images=False)
    assert torch.equal(made.tokens, expected)
    assert made.prompts == tuple(texts)


def test_a_row_that_ends_takes_the_next_prompt() -> None:
    """Three prompts in two rows, with pictures of other sizes."""
    held = glm_edits()
    fast = held.accelerated(processor=held.processor(), batch_size=2)
    pictures = [noise(64, 96), noise(128, 64), noise(64, 64)]
    together = fast.generate(["a", "a cat", "a red"], image=pictures, images=False).tokens
    fast.batch_size = 1
    alone = [
        fast.generate(text, image=picture, images=False).tokens
        for text, picture in zip(["a", "a cat", "a red"], pictures, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_inside_the_pipeline_the_own_generate_is_replaced() -> None:
    held = glm_edits()
    asked = {**held.inputs, "suppress_tokens": None}
    with installed(held.accelerated(), held.model):
        found = held.model.generate(**asked)
    assert torch.equal(found[:, -24:], held.greedy())


def test_the_layout_has_no_preview() -> None:
    layout = held_layout(1024, 512, image_prompts=True)
    assert layout.prompt[0] == "{text}<sop>32 16<eop>"
    assert (layout.length, layout.pictures) == (512, True)


def test_impossible_pictures() -> None:
    held = glm_edits()
    fast = held.accelerated(processor=held.processor())

    def refused(sentence: str, act: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(TemperaError, match=sentence):
            act(*args, **options)

    def tokens(prompts: Any, image: Any = None) -> Any:
        return fast.generate(prompts, image=image, images=False)

    refused("prompt 1 of 1 has no picture: call generate with image=", tokens, "a cat")
    refused("image= has 3 entries for 2 prompts", tokens, ["a", "a red"], [1, 2, 3])
    refused("image= has 1 entries for 1 prompts", tokens, "a", [])
    refused("does not read the pictures of prompt 1 of 1", tokens, "a", 7)
    drawn = held.accelerated(
        processor=held.processor(),
        decoder=GlmDecoder(
            SimpleNamespace(transformer=None, text_encoder=None, vae=None), GlmDecoderConfig(24)
        ),
    )
    refused("GlmDecoder cannot make pictures for", drawn.generate, "a", image=noise(64, 96))
    plain = glm_image()
    text = plain.accelerated(processor=plain.processor())
    refused("this model does not read pictures in prompts", text.generate, "a", image=noise(64, 64))
    refused("ask for .* give tempera.accelerate image_prompts=True", generate_ids, text, **held.ids)
    lacking = {**held.ids, "image_grid_thw": None}
    refused("come without image_grid_thw", generate_ids, held.accelerated(), **lacking)
    fewer = {**held.ids, "input_ids": held.ids["input_ids"].clone()}
    fewer["input_ids"][0, 7] = 40
    refused(
        "13 picture tokens, but the pictures have 14 codes",
        generate_ids,
        held.accelerated(),
        **fewer,
    )
    other = janus()
    pixels = torch.zeros(2, 3, 48, 48)
    sentence = "pixel_values is not possible with a Janus.*: transformers also draws its images"
    refused(sentence, generate_ids, other.accelerated(), **other.ids, pixel_values=pixels)
    refused(
        "these images has no image_prompts", tempera.accelerate, other.model, image_prompts=True
    )
