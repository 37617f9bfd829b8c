"""The shipped CLIP reads captions of its world with CLIP's own tokens, renumbered."""

import open_clip
import pytest
import torch

from tempera.shapes.clip import CHARACTERS, CONTEXT, END, START, TOKENS, tokenize
from tempera.shapes.world import WORDS, World


def test_tokens_of_captions_are_clips_renumbered() -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=CONTEXT)
    whole = {token: f"{token}</w>" for token in TOKENS} | {"chec": "chec"}
    numbers = [tokenizer.encoder[whole[token]] for token in TOKENS]
    assert numbers == sorted(numbers)
    rows = torch.cat([torch.arange(CHARACTERS), torch.tensor(numbers), tokenizer("")[0, :2]])
    captions = [sample.caption for sample in World(1).batch(0, 12)]
    texts = [*WORDS, "A red ring.", "a " * 40, *captions]
    assert torch.equal(rows[tokenize(texts)], tokenizer(texts))


@pytest.mark.parametrize("text", ["astronaut", "?!"])
def test_tokens_of_other_worlds_are_padding(text: str) -> None:
    assert tokenize([f"a {text}"])[0].tolist() == [START, 320, 0, END, *[0] * (CONTEXT - 4)]
