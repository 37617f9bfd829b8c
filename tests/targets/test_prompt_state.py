import torch

from tempera.targets.prompt_state import PromptConditioner


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
