"""The shipped CLIP computes what open_clip computes from the same files."""

import numpy as np
import pytest
import torch

from tempera.metrics.clip import preprocessed
from tempera.runtime.torchvision import import_open_clip
from tempera.shapes.clip import CONTEXT, END, START, TOKENS, load_clip, tokenize
from tempera.shapes.evaluator import _signed
from tempera.shapes.networks import SHIPPED
from tempera.shapes.world import WORDS, World

SAMPLES = World(1).batch(0, 12)


def test_embeddings_are_open_clips() -> None:
    model, _, preprocess = import_open_clip().create_model_and_transforms(
        f"local-dir:{SHIPPED / 'clip'}"
    )
    images = np.stack([sample.image for sample in SAMPLES]).transpose(0, 3, 1, 2)
    pictures = torch.from_numpy((255 * images).round().astype(np.uint8))
    ids = tokenize([sample.caption for sample in SAMPLES])
    network = load_clip()
    with torch.no_grad():
        seen, read, _ = model.eval()(preprocessed(pictures, preprocess), ids)
        own = network.encode_images(_signed(pictures, torch.device("cpu")))
        torch.testing.assert_close(own, seen)
        torch.testing.assert_close(network.encode_texts(ids), read)


def test_tokens_of_captions_are_clips_renumbered() -> None:
    tokenizer = import_open_clip().SimpleTokenizer(context_length=CONTEXT)
    whole = {token: f"{token}</w>" for token in TOKENS} | {"chec": "chec"}
    numbers = [tokenizer.encoder[whole[token]] for token in TOKENS]
    assert numbers == sorted(numbers)
    rows = torch.cat([torch.arange(512), torch.tensor(numbers), tokenizer("")[0, :2]])
    texts = [*WORDS, "A red ring.", "a " * 40, *(sample.caption for sample in SAMPLES)]
    assert torch.equal(rows[tokenize(texts)], tokenizer(texts))


@pytest.mark.parametrize("text", ["astronaut", "été", "?!", "__"])
def test_words_of_other_worlds_are_padding(text: str) -> None:
    assert tokenize([f"a {text}"])[0].tolist() == [START, 320, 0, END, *[0] * (CONTEXT - 4)]
