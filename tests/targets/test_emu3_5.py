"""Emu3.5 against transformers' Qwen3, which has its layers and their names; its text tokenizer, a
file of tiktoken's; and its IBQ image tokenizer.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_networks import lively
from tiny_targets import composed

from tempera.config.parts import Parts
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import EMU3_5, VQConfig, VQModel, from_vqgan
from tempera.runtime.huggingface import Qwen3Config, Qwen3ForCausalLM
from tempera.targets.emu3_5 import FIRST_SPECIAL, emu3_5, load_emu3_5_prompts

TEXT, CODES = 151854, 24
SIZES = VQConfig(CODES, 12, 32, (1, 2), (1, 2), 2, 16, normalised=False, inner_product=True)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    config = Qwen3Config(
        vocab_size=TEXT + CODES,
        hidden_size=20,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # 4 · 8 is not the width
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = lively(Qwen3ForCausalLM(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
    directory = tmp_path_factory.mktemp("emu3_5")
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "Emu3"}))
    return model, directory


def options(directory: Path) -> list[str]:
    return [
        "model=emu3_5_image",
        f"weights={directory}",
        "image_size=64",
        f"+model.spec.codes={CODES}",
        "model.prompt_weights=random",
        "model.tokenizer_weights=random",
        f"+model.tokenizer.config={{codebook_size:{CODES},channels:32,res_blocks:1}}",
        "dtype=float32",
    ]


def test_logits_are_those_of_transformers(official: tuple[Any, Path]) -> None:
    model, directory = official
    target = Parts.of(composed(*options(directory), "guidance=5")).target()
    target.sampling = Sampling(5.0)
    prompts = ["a cat", "two dogs on a sofa"]
    tokens = torch.tensor([[3, 1, 23], [0, 7, 7]])
    target.begin(prompts, 3)
    p = target.score(Draft(tokens, torch.zeros(2, 3, CODES + 1), Tree.chain(3)), 0).p
    condition, _ = target.conditioner(prompts)
    for row in range(2):
        logits = []
        for ids in condition[row]:
            sequence = torch.cat([ids[ids >= 0], TEXT + tokens[row]])
            with torch.no_grad():
                logits.append(model(sequence[None]).logits[0, -4:, TEXT:].log_softmax(-1))
        guided = logits[1] + 5 * (logits[0] - logits[1])
        torch.testing.assert_close(p[row, :, :CODES], guided.softmax(-1), atol=1e-5, rtol=1e-4)


def test_images_with_and_without_a_draft_are_whole(official: tuple[Any, Path]) -> None:
    prompts = ["a cat", "a green bird"]
    drawn = []
    for method in (["method=ar"], ["method=jacobi", "window=4"]):
        parts = Parts.of(composed(*options(official[1]), *method, "temperature=0"))
        target = parts.target()
        streams = RandomStreams(0, prompts)
        method_of = parts.method(target, parts.rule())
        drawn.append(method_of.decode(target, streams, prompts).tokens)
    grid = drawn[0].view(2, 4, 5)
    assert (grid[..., -1] == CODES).all() and (grid[..., :-1] < CODES).all()
    assert drawn[0].equal(drawn[1])
    pictures = parts.tokenizer().decode_codes(grid)
    assert pictures.shape == (2, 3, 64, 64)


def test_published_sizes_and_formats() -> None:
    spec = emu3_5()
    assert spec.grid == (64, 65) and spec.first_code + spec.codes == 282926
    assert spec.prompt[0].startswith("<|extra_203|>You are a helpful assistant for t2i task. USER")
    turn = "<|extra_203|>You are a helpful assistant. USER:  ASSISTANT: <|extra_100|>"
    assert spec.null[0] == turn
    assert emu3_5(880, 1168).prompt[1:] == (151852, "55*73", 151851)
    with pytest.raises(TemperaError, match="multiple of 16"):
        emu3_5(height=1000)
    for name, task in {"emu3_5_image": "", "xiaomi_u0": " for t2i task"}.items():
        with Parts.of(composed(f"model={name}")).sized() as (sized, files):
            network = sized.target().network
            sized.tokenizer()
        weights = sum(weight.numel() for weight in network.parameters())
        assert network.spec.null[0].startswith(f"<|extra_203|>You are a helpful assistant{task}. U")
        assert weights == pytest.approx(34.1e9, rel=0.01)
        assert {file.hub for file in files} >= {"BAAI/Emu3.5-VisionTokenizer"}


def test_the_text_tokenizer_is_a_file_of_tiktokens(tmp_path: Path) -> None:
    words = [bytes([byte]) for byte in range(256)] + [b"ca", b"cat", b" cat"]
    file = tmp_path / "unis.tiktoken"

    def write(tokens: list[bytes]) -> None:
        lines = [f"{base64.b64encode(token).decode()} {n}" for n, token in enumerate(tokens)]
        file.write_text("\n".join(lines))

    def ids() -> tuple[list[int], list[int]]:
        encoder = load_emu3_5_prompts(emu3_5(), str(tmp_path), ["emu3.tiktoken", file.name], "hub")
        prompt, null = encoder.encode(["a cat"])[0][0].tolist()
        return prompt, [token for token in null if token >= 0]

    write(words)
    prompt, null = ids()
    head = [151852, ord("6"), ord("4"), ord("*"), ord("6"), ord("4"), 151851]
    assert prompt[0] == null[0] == FIRST_SPECIAL + 3 + 203 == 151849
    assert prompt[-8:] == null[-8:] == [151746, *head]
    assert 258 in prompt and 258 not in null
    write([*words[:-1], b" dog"])  # the same place holds another file
    assert 258 not in ids()[0]
    file.write_text("no ranks")
    with pytest.raises(TemperaError, match="not a file of tiktoken"):
        ids()


def test_codes_are_those_of_the_largest_inner_product() -> None:
    """The published code's encoder is Chameleon's with attention, as transformers has both."""
    from transformers.models.chameleon.configuration_chameleon import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAEEncoder

    config = ChameleonVQVAEConfig(
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=2,
        attn_resolutions=[8],
        attn_type="vanilla",
        resolution=16,
        latent_channels=16,
        double_latent=False,
    )
    theirs = lively(ChameleonVQVAEEncoder(config))
    ours = lively(VQModel(SIZES), 1)
    named = {f"encoder.{name}": tensor for name, tensor in theirs.state_dict().items()}
    state = {name: tensor for name, tensor in ours.state_dict().items() if "encoder." not in name}
    ours.load_state_dict({**state, **from_vqgan(named, 2)})
    images = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        vectors = ours.quant_conv(theirs(images)).permute(0, 2, 3, 1)
        scores = vectors @ ours.quantize.embedding.weight.T
        found = ours.encode(images)
    assert found.equal(scores.argmax(-1)) and found.unique().numel() > 5
    with torch.device("meta"):
        names = VQModel(EMU3_5).state_dict()
    assert names["quantize.embedding.weight"].shape == (131072, 256) and EMU3_5.factor == 16
    assert "encoder.conv_blocks.4.attn.3.q.weight" in names
