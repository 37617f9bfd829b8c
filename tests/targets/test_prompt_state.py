import torch

from tempera.targets.prompt_state import PromptConditioner, PromptState


def test_prompts_are_encoded_once_inside_the_block():
    texts: list[list[str]] = []

    def encode(prompts: list[str]):
        texts.append(prompts)
        return torch.zeros(len(prompts), 3), torch.ones(len(prompts), 3, dtype=torch.bool)

    conditioner = PromptConditioner(encode)
    with conditioner.encoded(["a red ring"]):
        assert len(texts) == 1
        first, second = conditioner(["a red ring"]), conditioner(["a red ring"])
        assert first is second and len(texts) == 1
        assert len(conditioner(["a", "b"])[0]) == 2  # other prompts are encoded all the same
    assert len(conditioner(["a red ring"])[0]) == 1
    assert texts == [["a red ring"], ["a", "b"], ["a red ring"]]


def test_rows_advance_separately_and_guidance_rows_share_roots():
    keep = torch.tensor([[False, True, True], [True, True, True]] * 2)
    prompt = PromptState(torch.zeros(4, 3, 8), keep, copies=2, length=5)
    assert (prompt.rows, prompt.prefix, prompt.last_slot) == (4, 3, 7)
    assert prompt.root_slots.tolist() == [2] * 4
    prompt.advance(torch.tensor([1, 3]), 4)
    assert prompt.lengths.tolist() == [1, 3] and prompt.root_slots.tolist() == [3, 5, 3, 5]
    assert prompt.longest == 4  # it may be
    prompt.longest = 3  # as the loop read
    prompt.advance(torch.tensor([1, 0]), 4)
    assert prompt.longest == 5  # at most 3 + 4, and no more than the image


def test_only_padding_is_masked():
    keep = torch.tensor([[False, True, True], [True, True, True]])
    prompt = PromptState(torch.zeros(2, 3, 8), keep, copies=1, length=5)
    mask = prompt.padding(keep, 6, torch.bfloat16)
    assert mask is not None and mask.shape == (2, 1, 1, 6)
    assert (mask[:, 0, 0] < 0).tolist() == [[True] + 5 * [False], 6 * [False]]
    assert prompt.padding(torch.ones_like(keep), 6, torch.bfloat16) is None
