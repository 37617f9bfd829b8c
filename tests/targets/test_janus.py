"""Janus-Pro against Hugging Face's own implementation, tiny and random."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import composed, tiny_janus, write_janus
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tempera.config.parts import Parts
from tempera.decoding.interfaces import Draft
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.targets.janus import janus
from tempera.targets.prompt_encoder import about_as_many, load_prompts

pytestmark = pytest.mark.slow
SPECIAL = ("<begin_of_image>", "<｜▁pad▁｜>")
PROMPTS = ["a cat", "two dogs on a red sofa"]
FORMAT = "<|User|>: {}\n\n<|Assistant|>:<begin_of_image>"


@pytest.fixture(scope="module")
def official() -> Any:
    return tiny_janus()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_janus(tmp_path_factory.mktemp("janus"))


@torch.no_grad()
def test_logits_and_guidance_equal_those_of_hugging_face(official: Any, options: list[str]) -> None:
    target: Any = Parts.of(composed(*options)).target()
    tokens = torch.randint(24, (2, 3), generator=torch.Generator().manual_seed(1))
    target.begin(PROMPTS, 3)
    scores = target.score(Draft(tokens, torch.full((2, 3, 24), 1 / 24), Tree.chain(3)), 0)
    logits = []
    for row in range(4):
        ids = [100000, *about_as_many(FORMAT.format(PROMPTS[row % 2]))]
        if row >= 2:  # all but the first and the last become padding, which is attended to
            ids = [ids[0], *about_as_many(SPECIAL[1])[:1] * (len(ids) - 2), ids[-1]]
        prefix = official.get_input_embeddings()(torch.tensor([ids]))
        drawn = official.prepare_embeddings_for_image_generation(tokens[row % 2][None])
        states = official.model.language_model(inputs_embeds=torch.cat([prefix, drawn], 1))
        logits.append(official.model.generation_head(states.last_hidden_state[:, -4:]))
    wanted = torch.cat(logits)
    torch.testing.assert_close(target.head.lm_logits(scores.hidden), wanted, atol=2e-5, rtol=1e-4)
    conditional, unconditional = wanted.chunk(2)
    guided = unconditional + 5 * (conditional - unconditional)
    torch.testing.assert_close(scores.p, guided.softmax(-1), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_greedy_image_is_that_of_hugging_face(
    official: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate(generation_mode="image")`, from its prompts to its last token."""
    from transformers import GenerationConfig

    write_tokenizer(tmp_path, *SPECIAL)
    words = f"model.prompt_weights={tmp_path}"
    target: Any = Parts.of(composed(*options, "temperature=0", words)).target()
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    start, padding = map(own.token_to_id, SPECIAL)
    ids = [[100000, *own.encode(FORMAT.format(prompt)).ids] for prompt in PROMPTS]
    width = max(map(len, ids))
    padded = torch.tensor([[padding] * (width - len(row)) + row for row in ids])
    keep = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    config = GenerationConfig(
        bos_token_id=100000, pad_token_id=padding, eos_token_id=100001, do_sample=False,
        guidance_scale=5, max_length=width + 16, generation_kwargs={"boi_token_id": start},
    )  # fmt: skip
    monkeypatch.setattr(official.model.vision_model.config, "num_image_tokens", 16)
    wanted = official.generate(
        padded, attention_mask=keep, generation_mode="image", generation_config=config
    )
    got = decode(target, NoDraft(), Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens
    assert torch.equal(got, wanted)


@torch.no_grad()
def test_codes_and_pixels_equal_those_of_hugging_face(official: Any, options: list[str]) -> None:
    tokenizer, vq = (
        Parts.of(composed(*options)).tokenizer().double(),
        official.model.vqmodel.double(),
    )
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(2, 3, 64, 64, generator=generator).double() * 2 - 1
    assert torch.equal(tokenizer.encode(images).flatten(), vq.encode(images).image_tokens)
    codes = torch.randint(24, (2, 16), generator=generator)
    pixels = vq.decode(codes).clamp(-1, 1)
    torch.testing.assert_close(tokenizer.decode_codes(codes.view(2, 4, 4)), pixels)


def write_tokenizer(directory: Path, *special: str) -> None:
    characters = dict.fromkeys("?abcdefgh:|<>UserAssistant \n")
    words = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.save(str(directory / "tokenizer.json"))


def test_the_prompt_is_tokenised_whole_and_padding_is_found_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, *SPECIAL)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoder = load_prompts(janus(), str(tmp_path), ["tokenizer.json"], "x/y")
    (row, null), (shorter, _) = encoder.encode(["a bed", "a"])[0].tolist()
    text = own.encode(FORMAT.format("a bed")).ids
    start, padding = map(own.token_to_id, SPECIAL)
    assert row == [100000, *text] and row[-1] == start
    assert null == [100000, *[padding] * (len(row) - 2), start]
    assert shorter[:4] == [-1] * 4 and shorter[4] == 100000


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "<begin_of_image>")
    with pytest.raises(TemperaError, match=r"has no token <｜▁pad▁｜>: give the tokenizer.json"):
        load_prompts(janus(), str(tmp_path), ["tokenizer.json"], "x/y")


def test_both_sizes_are_the_published_ones() -> None:
    count = {}
    for size in ("1b", "7b"):
        with Parts.of(composed(f"model=janus_pro_{size}")).sized() as (sized, _):
            network = sized.target().network  # type: ignore[attr-defined]
            count[size] = sum(parameter.numel() for parameter in network.parameters())
    # 2.09B and 7.42B in all, of which the image encoder has 0.31B, the text head 0.21B and 0.42B,
    # the image tokenizer 0.07B
    assert count["1b"] == pytest.approx(1.49e9, rel=0.02)
    assert count["7b"] == pytest.approx(6.6e9, rel=0.02)
