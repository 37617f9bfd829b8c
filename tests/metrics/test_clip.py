"""CLIP score and HPSv2, on tiny random checkpoints in the official
layouts, against a second writing of the networks (`reference_clip`).
"""

from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from reference_clip import (
    EDGE,
    cosines,
    embed_images,
    embed_texts,
    normalised,
    quick_gelu,
    random_state,
    register,
    tokens,
    write_open_clip,
)
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import hps
from tempera.metrics.clip import ClipScore, clip_scorer
from tempera.metrics.hps import HPS
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile

CPU = torch.device("cpu")
PROMPTS = [Prompt("a", "a red ring"), Prompt("b", "two green stars, one large and one small")]
TEXTS = [prompt.text for prompt in PROMPTS]


def pictures(edge: int = EDGE) -> Tensor:
    made = torch.randint(0, 256, (2, 3, edge, edge), generator=torch.Generator().manual_seed(1))
    return made.to(torch.uint8)


def scored(adapter: Adapter, images: Tensor | None = None) -> Tensor:
    networks = adapter.load(CPU)
    (score,) = networks.scores
    with torch.inference_mode():
        (values,) = score(pictures() if images is None else images, PROMPTS).values()
    return values


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return register(tmp_path_factory.mktemp("open_clip"))


@pytest.fixture(scope="module")
def state(tiny: str) -> dict[str, Tensor]:
    return random_state(tiny)


class Means(torch.nn.Module):
    """Embeds a picture as its mean colour, and a text as powers of its length."""

    def encode_image(self, images: Tensor) -> Tensor:
        assert images.shape == (2, 3, 4, 4)
        return images.mean((2, 3))

    def encode_text(self, ids: Tensor) -> Tensor:
        return torch.stack([ids, ids**2, torch.ones_like(ids)], 1)


def lengths(texts: list[str]) -> Tensor:
    return torch.tensor([float(len(text)) for text in texts])


def floats(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float()


def cosines_of_means(images: Tensor, prefix: str) -> Tensor:
    texts = Means().encode_text(lengths([prefix + text for text in TEXTS]))
    return torch.cosine_similarity(images.float().mean((2, 3)), texts, dim=1)


def test_a_clip_score_is_the_cosine_of_picture_and_prefixed_prompt() -> None:
    images = pictures(4)
    found = clip_scorer(Means(), lengths, floats, CPU, "a ")(images, PROMPTS)
    torch.testing.assert_close(found["clip_score"], cosines_of_means(images, "a "))


@pytest.mark.parametrize("quick", [False, True])
def test_clip_score(
    quick: bool,
    tiny: str,
    state: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The activation is that of the weights' tag, whatever the model's name says."""
    file = tmp_path / "open_clip_model.safetensors"
    save_file(state, file)
    adapter = ClipScore(tiny, str(file), prefix="A photo of ")
    texts = tokens([f"A photo of {text}" for text in TEXTS])
    activation = quick_gelu if quick else gelu
    image = embed_images(normalised(pictures()), state, activation)
    expected = cosines(image, embed_texts(texts, state, activation))
    with monkeypatch.context() as patch:
        patch.setattr(ClipScore, "_tag", {"quick_gelu": quick, "mean": (0.5,) * 3})
        network = adapter.network()
        assert network.visual.preprocess_cfg["mean"] == (0.5,) * 3
        patch.setattr(ClipScore, "_tag", {"quick_gelu": quick})
        assert torch.allclose(scored(adapter), expected, atol=1e-5)
    if not quick:
        write_open_clip(tmp_path, tiny, state)
        directory = ClipScore(f"local-dir:{tmp_path}", None, prefix="A photo of ")
        assert torch.allclose(scored(directory), expected, atol=1e-5)


def test_hps(tiny: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    """Pictures become floats before they are resized."""
    torch.save({"epoch": 1, "state_dict": state}, tmp_path / "HPS_v2.1_compressed.pt")
    large = pictures(3 * EDGE)
    small = resize(large.float() / 255, [EDGE, EDGE], InterpolationMode.BICUBIC, antialias=True)
    image = embed_images(normalised(small * 255), state)
    expected = 100 * cosines(image, embed_texts(tokens(TEXTS), state))
    found = scored(HPS(str(tmp_path), tiny), large)
    assert torch.allclose(found, expected, atol=1e-3)
    wide = torch.cat([pictures(), torch.zeros_like(pictures())], 3)  # its longer side must fit
    assert scored(HPS(str(tmp_path), tiny), wide).shape == (2,)


def test_weights_of_another_model_are_refused(
    tiny: str, state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, no = tmp_path / "clip.safetensors", "does not hold the weights of tiny-vit"
    first = next(iter(state))
    for changed, words in (
        ({name: one for name, one in state.items() if "ln_final" not in name}, no),
        ({**state, "more": torch.ones(1)}, no),
        ({**state, first: state[first].to(torch.int8)}, f"holds {first} as int8"),
        ({**state, first: state[first] * torch.nan}, "holds infinite numbers or NaN"),
    ):
        save_file(changed, path)
        with pytest.raises(TemperaError, match=words):
            ClipScore(tiny, str(path)).network()
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("run"))
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "clip.pt"))
    with pytest.raises(TemperaError, match="is a TorchScript program"):
        ClipScore(tiny, str(tmp_path / "clip.pt")).network()
    torch.save({"state_dict": {"other": torch.ones(2)}}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(TemperaError, match="does not hold the weights of HPSv2"):
        HPS(str(tmp_path), tiny).network()


def test_the_files_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (openai,) = ClipScore("ViT-L-14", "openai").files
    assert openai.place == "timm/vit_large_patch14_clip_224.openai"
    with monkeypatch.context() as patch:
        patch.setattr(ClipScore, "_tag", {"url": "https://example.org/ViT.pt"})
        assert ClipScore().files == (WeightsFile("https://example.org/ViT.pt", ("ViT.pt",)),)
    config, weights = ClipScore("hf-hub:laion/CLIP-ViT-g-14-laion2B-s12B-b42K", None).files
    assert config.place == weights.place == "laion/CLIP-ViT-g-14-laion2B-s12B-b42K"
    own = str(tmp_path / "own.bin")
    for model, given, words in (
        ("ViT-B-32", own, "own.bin is neither a file nor a tag .*openai, "),
        ("ViT-B-32", None, "None is neither"),
        ("ViT-none", "openai", "ViT-none is not a model that open_clip knows"),
    ):
        with pytest.raises(TemperaError, match=words):
            _ = ClipScore(model, given).files
    (tmp_path / "own.bin").touch()
    assert ClipScore("ViT-B-32", own).files == (WeightsFile(own, ("own.bin",)),)


def test_hps_pads_the_shorter_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer side fills the input; zeros on both sides of the other, one more at the end."""
    edge, white = 8, torch.full((1, 3, 5, 16), 255, dtype=torch.uint8)
    mean, deviation = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    constants = SimpleNamespace(
        OPENAI_DATASET_MEAN=mean.tolist(), OPENAI_DATASET_STD=deviation.tolist()
    )
    monkeypatch.setattr(hps, "import_open_clip", lambda: SimpleNamespace(constants=constants))
    for pictures, turned in ((white, False), (white.transpose(2, 3), True)):
        found = hps._input(pictures, edge)[0]
        found = found.transpose(1, 2) if turned else found
        rows = (found[:, :, 0] * deviation[:, None] + mean[:, None])[0]
        assert found.shape == (3, edge, edge)
        assert rows.tolist() == pytest.approx([0, 0, 0, 1, 1, 0, 0, 0], abs=1e-5)
    odd = hps._input(torch.full((1, 3, 3, 8), 255, dtype=torch.uint8), edge)[0]
    rows = (odd[:, :, 0] * deviation[:, None] + mean[:, None])[0]
    assert rows.tolist() == pytest.approx([0, 0, 1, 1, 1, 0, 0, 0], abs=1e-5)
