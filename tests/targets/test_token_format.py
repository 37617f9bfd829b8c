"""The format of a sequence: ids, forced tokens, room, and the formats of the real models."""

import pytest
import torch

from tempera.errors import TemperaError
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.targets.chameleon import anole, lumina
from tempera.targets.emu3 import emu3
from tempera.targets.shared_vocabulary import PromptEncoder
from tempera.targets.token_format import FORBIDDEN, ModelSpec

LINED = ModelSpec(
    2,
    3,
    codes=5,
    first_code=20,
    prompt=(1, "{text}!", 2),
    null=(2,),
    context=20,
    line_end=9,
    end=(3, 4),
)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_forced_positions_and_grid() -> None:
    assert (LINED.grid, LINED.length, LINED.room) == ((2, 4), 8, 10)
    assert LINED.token_ids.tolist() == [20, 21, 22, 23, 24, 9]
    assert LINED.forced is not None and LINED.forced.tolist() == [-1, -1, -1, 5, -1, -1, -1, 5]
    assert LINED.token_bias is not None and LINED.token_bias.tolist() == [0, 0, 0, 0, 0, FORBIDDEN]
    plain = ModelSpec(2, 3, codes=5, first_code=20, prompt=("{text}",), null=(), context=20)
    assert (plain.grid, plain.forced, plain.token_bias) == ((2, 3), None, None)


def test_a_forbidden_token_has_no_probability_and_no_infinite_loss() -> None:
    log = torch.tensor([0.0, FORBIDDEN]).log_softmax(-1)
    assert log.exp()[1] == 0 and torch.isfinite(log).all()


def test_prompts_are_left_padded_beside_the_null_prompt() -> None:
    condition, keep = PromptEncoder(LINED, letters).encode(["a", "abc"])
    assert condition[0].tolist() == [[-1, -1, 1, 97, 33, 2], [-1, -1, -1, -1, -1, 2]]
    assert condition[1].tolist() == [[1, 97, 98, 99, 33, 2], [-1, -1, -1, -1, -1, 2]]
    assert keep.tolist() == [[False, False, True, True, True, True], [True] * 6]


def test_a_prompt_that_is_too_long_is_refused_or_truncated() -> None:
    with pytest.raises(
        TemperaError,
        match=r"prompt 2 of 2 has 13 tokens, the model has room for 10: "
        r".* truncate=true",
    ):
        PromptEncoder(LINED, letters).encode(["ab", "cdef ghijk"])
    condition, keep = PromptEncoder(LINED, letters, truncate=True).encode(["cdef ghijk"])
    assert condition[0, 0].tolist() == [1, *letters("cdef!"), 2] and keep.all()
    with pytest.raises(TemperaError, match="prompt 1 of 1 is empty"):
        PromptEncoder(LINED, letters).encode([" "])


def test_the_papers_formats() -> None:
    spec = lumina()
    assert spec.grid == (48, 49) and spec.length == 2352
    assert spec.prompt[-3:] == (8197, 8828, 8828) == spec.null and spec.line_end == 8803
    assert lumina(512, 1024).grid == (32, 65) and lumina(512, 1024).null == (8197, 8820, 8836)
    assert "512x1024" not in str(lumina(512, 1024).prompt) and "1024x512" in str(
        lumina(512, 1024).prompt
    )
    assert anole().grid == (32, 32) and anole().forced is None and anole().room == 4096 - 1024 - 1
    spec = emu3()
    assert (
        spec.grid == (90, 91)
        and "90*90" in spec.prompt
        and spec.token_ids[-2:].tolist() == [184621, 151846]
    )


def test_a_format_without_a_place_for_the_prompt_is_refused() -> None:
    with pytest.raises(TemperaError, match="has no place for the prompt"):
        ModelSpec(2, 3, 5, 20, prompt=(1, "text"), null=(), context=20)
    with pytest.raises(TemperaError, match="lines=0 makes no image"):
        ModelSpec(0, 3, 5, 20, prompt=("{text}",), null=(), context=20)


def test_end_of_line_tokens_have_no_pixels() -> None:
    config = VQConfig(
        codebook_size=5,
        codebook_dim=4,
        channels=4,
        encoder_multipliers=(1, 1),
        decoder_multipliers=(1, 1),
        res_blocks=1,
        z_channels=4,
        norm_groups=2,
        normalised=False,
        level_attention=False,
    )
    vq = VQModel(config).eval()
    lined = LinedTokenizer(vq)
    images = torch.rand(2, 3, 4, 6) * 2 - 1
    codes = lined.encode(images)
    assert codes.shape == (2, 2, 4) and (codes[..., -1] == 5).all() and lined.vocab_size == 6
    assert torch.equal(codes[..., :-1], vq.encode(images))
    assert torch.equal(lined.decode_codes(codes), vq.decode_codes(codes[..., :-1]))
    assert lined.codebook.shape == (6, 4) and torch.equal(lined.codebook[:5], vq.codebook)
    assert (
        torch.cdist(lined.codebook[:5], lined.codebook)[:, 5].min()
        > torch.cdist(vq.codebook, vq.codebook).max()
    )
    assert lined.image_size((2, 4)) == (4, 6) == vq.image_size((2, 3))
