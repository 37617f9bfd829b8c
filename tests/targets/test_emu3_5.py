"""Emu3.5 against numbers of its published code, which no package holds: the ids of texts, the
guided distributions of a tiny network, and the codes and pixels of a tiny IBQ tokenizer.
emu3_5_numbers.json has them, with the names and shapes of the tensors, whose content follows from
their names; the ranks are those of the published file that the texts need.
"""

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import ROOT
from safetensors.torch import save_file
from tiny_targets import composed
from torch import Tensor

from tempera.config.parts import Parts
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import EMU3_5, VQConfig, VQModel, from_vqgan
from tempera.targets.emu3_5 import FIRST_SPECIAL, emu3_5, load_emu3_5_prompts

TEXT, CODES = 151854, 24
THEIRS = json.loads((ROOT / "tests" / "support" / "emu3_5_numbers.json").read_text())
SIZES = VQConfig(50, 12, 32, (1, 2), (1, 2), 2, 16, normalised=False, inner_product=True)


def filled(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Weights that follow from their names; NumPy keeps what a seeded RandomState draws."""
    state = {}
    for name, shape in shapes.items():
        drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if len(shape) > 1:
            drawn *= 1.3 / np.prod(shape[1:]) ** 0.5
        else:
            drawn = 0.1 * drawn + ("norm" in name and name.endswith("weight"))
        state[name] = torch.from_numpy(drawn).float()
    return state


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network in the published layout."""
    directory = tmp_path_factory.mktemp("emu3_5")
    save_file(filled(THEIRS["layers"]["shapes"]), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(THEIRS["layers"]["config"]))
    return directory


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


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """What the texts need of the published file."""
    lines = [f"{word} {rank}" for word, rank in THEIRS["text"]["ranks"].items()]
    (tmp_path / "emu3.tiktoken").write_text("\n".join(lines))
    return tmp_path / "emu3.tiktoken"


@pytest.mark.parametrize("text", THEIRS["text"]["ids"])
def test_ids_are_those_of_the_published_code(text: str, ranks: Path) -> None:
    spec = replace(emu3_5(), prompt=("{text}",), null=("",))
    encoder = load_emu3_5_prompts(spec, str(ranks), [], "hub")
    ids, _ = encoder.encode([text])[0][0].tolist()
    assert ids == THEIRS["text"]["ids"][text]


def test_guided_distributions_are_those_of_the_published_code(ranks: Path, published: Path) -> None:
    """From the text to what a code is drawn from."""
    of_layers = THEIRS["layers"]
    given = [*options(published), "guidance=5", f"model.prompt_weights={ranks}"]
    target = Parts.of(composed(*given)).target()
    target.sampling = Sampling(5.0)
    tokens = torch.tensor(of_layers["codes"])
    target.begin([*of_layers["prompts"]], 3)
    condition, _ = target.conditioner([*of_layers["prompts"]])
    for (prompt, null), ids in zip(condition.tolist(), of_layers["prompts"].values(), strict=True):
        assert [one for one in prompt if one >= 0] == ids
        assert [one for one in null if one >= 0] == of_layers["null"]
    p = target.score(Draft(tokens, torch.zeros(2, 3, CODES + 1), Tree.chain(3)), 0).p
    theirs = torch.tensor(of_layers["guided"]).view(2, 4, CODES)
    torch.testing.assert_close(p[..., :CODES], theirs, atol=1e-5, rtol=1e-3)


def test_codes_and_pixels_are_those_of_the_published_code() -> None:
    """In the published layout, which has no tensor that is not taken."""
    of_pictures = THEIRS["pictures"]
    ours = VQModel(SIZES)
    ours.load_state_dict(from_vqgan(filled(of_pictures["shapes"]), 2))
    pictures = np.random.RandomState(7).random_sample((2, 3, 16, 24)) * 2 - 1
    with torch.no_grad():
        codes = ours.eval().encode(torch.from_numpy(pictures).float())
        decoded = ours.decode_latents(ours.codebook[codes])
    assert codes.flatten().tolist() == of_pictures["codes"]
    theirs = torch.tensor(of_pictures["decoded"]).view(2, 3, 4, 5)
    torch.testing.assert_close(decoded[..., ::5, ::5], theirs, atol=1e-4, rtol=1e-3)


def test_images_with_and_without_a_draft_are_whole(published: Path) -> None:
    prompts = ["a cat", "a green bird"]
    drawn = []
    for method in (["method=ar"], ["method=jacobi", "window=4"]):
        parts = Parts.of(composed(*options(published), *method, "temperature=0"))
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
    with torch.device("meta"):
        names = VQModel(EMU3_5).state_dict()
    assert names["quantize.embedding.weight"].shape == (131072, 256) and EMU3_5.factor == 16
    assert "encoder.conv_blocks.4.attn.3.q.weight" in names


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
    with pytest.raises(TemperaError, match="not a tiktoken file"):
        ids()
