"""SimpleAR as transformers saves its network, against transformers; and its image tokenizer, a
TorchScript file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_networks import lively
from tiny_targets import composed

from tempera.config.parts import Parts
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.image_tokenizers.cosmos import load_cosmos
from tempera.runtime.huggingface import Qwen2Config, Qwen2ForCausalLM
from tempera.targets.prompt_encoder import load_prompts
from tempera.targets.qwen2 import simplear

TEXT, CODES = 300, 24


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = Qwen2Config(
        vocab_size=TEXT + CODES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = lively(Qwen2ForCausalLM(config))
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_(generator=torch.Generator().manual_seed(3))
    directory = tmp_path_factory.mktemp("simplear")
    model.save_pretrained(directory)
    return model, directory


def options(directory: Path) -> list[str]:
    return [
        "model=simplear_05b",
        f"weights={directory}",
        "image_size=64",
        f"+model.spec.text_tokens={TEXT}",
        f"+model.spec.codes={CODES}",
        f"+model.tokenizer.codes={CODES}",
        "model.prompt_weights=random",
        "model.tokenizer_weights=random",
    ]


def test_logits_are_those_of_transformers(official: Any) -> None:
    model, directory = official
    target = Parts.of(composed(*options(directory), "guidance=6", "dtype=float32")).target()
    target.sampling = Sampling(6.0)
    prompts = ["a cat", "two dogs on a sofa"]
    tokens = torch.tensor([[3, 1, 23], [0, 7, 7]])
    target.begin(prompts, 3)
    draft = Draft(tokens, torch.zeros(2, 3, CODES), Tree.chain(3))
    p = target.score(draft, 0).p
    condition, _ = target.conditioner(prompts)
    for row in range(2):
        logits = []
        for ids in condition[row]:
            sequence = torch.cat([ids[ids >= 0], TEXT + tokens[row]])
            with torch.no_grad():
                logits.append(model(sequence[None]).logits[0, -4:, TEXT:].log_softmax(-1))
        guided = logits[1] + 6 * (logits[0] - logits[1])
        torch.testing.assert_close(p[row], guided.softmax(-1), atol=1e-5, rtol=1e-4)


def test_published_sizes_and_format() -> None:
    spec = simplear()
    assert spec.length == 4096
    assert spec.first_code == 151672
    with Parts.of(composed("model=simplear_15b")).sized() as (sized, files):
        network = sized.target().network
        sized.tokenizer()
    layers = sum(weight.numel() for weight in network.model.layers.parameters())
    assert layers == pytest.approx(1.31e9, rel=0.01)  # Qwen2.5-1.5B without its table
    names = {name for file in files for name in file.files}
    assert names == {"model.safetensors", "tokenizer.json", "decoder.jit", "encoder.jit"}


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TemperaError, match=r"no token <\|t2i\|>"):
        load_prompts(simplear(), str(tmp_path), ["tokenizer.json"], "hub")
    tokenizer.add_special_tokens(["<|t2i|>", "<|soi|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TemperaError, match="3 tokens, but the image codes begin after 151,672"):
        load_prompts(simplear(), str(tmp_path), ["tokenizer.json"], "hub")
    encoder = load_prompts(simplear(text_tokens=3), str(tmp_path), ["tokenizer.json"], "hub")
    condition, _ = encoder.encode(["a cat"])
    ids = condition[0, 0]
    assert ids[ids >= 0].tolist() == [1, *[0] * 7, 2]


class Decoder(torch.nn.Module):
    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        grey = codes.float()[:, None] / 12 - 1
        grey = grey.repeat_interleave(16, -1).repeat_interleave(16, -2)
        return grey.expand(-1, 3, -1, -1, -1)


class Encoder(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = ((images[:, 0, :, ::16, ::16] + 1) * 12).round().int()
        return codes, images


def test_the_image_tokenizer_runs_the_published_script(tmp_path: Path) -> None:
    torch.jit.script(Decoder()).save(str(tmp_path / "decoder.jit"))
    torch.jit.script(Encoder()).save(str(tmp_path / "encoder.jit"))
    tokenizer = load_cosmos(str(tmp_path), ["decoder.jit", "encoder.jit"], "hub", codes=24)
    codes = torch.arange(24).view(1, 4, 6)
    images = tokenizer.decode_codes(codes)
    assert images.shape == (1, 3, 64, 96)
    assert torch.equal(tokenizer.encode(images), codes)
    assert tokenizer.image_size((4, 6)) == (64, 96)
    with pytest.raises(TemperaError, match="no codebook"):
        _ = tokenizer.codebook
    (tmp_path / "decoder.jit").write_bytes(b"no script")
    with pytest.raises(TemperaError, match="not TorchScript"):
        load_cosmos(str(tmp_path), ["decoder.jit", "encoder.jit"], "hub")
