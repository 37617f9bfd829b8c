"""CLIP score and HPSv2, on tiny random checkpoints that open_clip itself evaluates."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_metrics import EDGE, tiny_clip, write_clip
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.clip import HPS, ClipScore, check_activation, preprocessed
from tempera.metrics.standard import Adapter
from tempera.metrics.weights import WeightsFile

CPU = torch.device("cpu")
TEXTS = ["a red ring", "two green stars, one large and one small"]
NAME = "tiny-vit"


def pictures(edge: int = EDGE) -> Tensor:
    made = torch.randint(0, 256, (2, 3, edge, edge), generator=torch.Generator().manual_seed(1))
    return made.to(torch.uint8)


def scored(adapter: Adapter, images: Tensor) -> Tensor:
    (score,) = adapter.load(CPU).scores
    with torch.inference_mode():
        (values,) = score(images, [Prompt(text, text) for text in TEXTS]).values()
    return values


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return tiny_clip(tmp_path_factory.mktemp("open_clip"), NAME)


def expected(
    state: dict[str, Tensor], images: Tensor, prefix: str = "", quick: bool = False, **options: Any
) -> Tensor:
    """The cosines by open_clip."""
    network = open_clip.create_model(NAME, load_weights=False, force_quick_gelu=quick).eval()
    network.load_state_dict(state)
    transform = open_clip.image_transform(EDGE, is_train=False, **options)
    ids = open_clip.get_tokenizer(NAME)([prefix + text for text in TEXTS])
    with torch.inference_mode():
        image = network.encode_image(preprocessed(images, transform))
        return torch.cosine_similarity(image, network.encode_text(ids))


@pytest.mark.parametrize("quick", [False, True])
def test_clip_score_of_prefixed_prompts(
    quick: bool, state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activation is that of the weights' tag, whatever the model's name says."""
    file = tmp_path / "open_clip_model.safetensors"
    save_file(state, file)
    tag = {"quick_gelu": quick, "hf_hub": "some/model/"}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda *_: tag)
    found = scored(ClipScore(NAME, str(file), "A photo of "), pictures(40))
    torch.testing.assert_close(found, expected(state, pictures(40), "A photo of ", quick))
    write_clip(tmp_path, state)
    if not quick:
        found = scored(ClipScore(f"local-dir:{tmp_path}", None, prefix="A photo of "), pictures(40))
        torch.testing.assert_close(found, expected(state, pictures(40), "A photo of "))


def test_the_activation_of_weights_in_a_file_must_be_given(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    """No tensor shows it, and the scores differ."""
    file = tmp_path / "open_clip_model.safetensors"
    save_file(state, file)
    for ask in (lambda one: one.files, lambda one: one.load(CPU)):
        with pytest.raises(TemperaError, match="which activation .* quick_gelu=true"):
            ask(ClipScore(NAME, str(file)))
    scores = []
    for quick in (False, True):
        scores.append(scored(ClipScore(NAME, str(file), quick_gelu=quick), pictures(40)))
        torch.testing.assert_close(scores[-1], expected(state, pictures(40), quick=quick))
    assert not torch.allclose(*scores)


def test_an_activation_that_open_clip_states_is_not_given(tmp_path: Path) -> None:
    """By the model's name, or the tag of its weights."""
    file = tmp_path / "weights.safetensors"
    file.touch()
    for model, weights in (
        ("ViT-B-32-quickgelu", str(file)),
        ("ViT-B-32", "openai"),
        ("ViT-B-32", "laion2b_s34b_b79k"),
    ):
        with pytest.raises(TemperaError, match="leave quick_gelu out") as no:
            check_activation(model, weights, True)
        assert no.value.option == "quick_gelu"
        check_activation(model, weights, None)


def test_hps_shrinks_the_longer_side(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"epoch": 1, "state_dict": state}, tmp_path / "HPS_v2.1_compressed.pt")
    hps = HPS(str(tmp_path), NAME)
    square = pictures()
    torch.testing.assert_close(scored(hps, square), 100 * expected(state, square))
    wide = torch.zeros(2, 3, EDGE, 2 * EDGE, dtype=torch.uint8)
    wide[:, :, :, : EDGE // 2] = 255
    small = torch.stack([torch.zeros(3, EDGE, EDGE, dtype=torch.uint8)] * 2)
    small[:, :, EDGE // 4 : -EDGE // 4] = preprocessed(
        wide, lambda image: torch.tensor(list(image.resize((EDGE, EDGE // 2),
        Image.Resampling.BICUBIC).getdata()), dtype=torch.uint8).T.view(3, EDGE // 2, EDGE)
    )  # fmt: skip
    torch.testing.assert_close(scored(hps, wide), scored(hps, small), rtol=0.01, atol=0.5)


def test_weights_of_another_model_are_refused(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, no = tmp_path / "clip.safetensors", "does not hold the weights of tiny-vit"
    first = next(iter(state))
    integers = {name: one.to(torch.int8) for name, one in state.items()}
    for changed, words in (
        (integers, "as int8"),
        ({name: one for name, one in state.items() if "ln_final" not in name}, no),
        ({**state, first: state[first] * torch.nan}, "holds infinite numbers or NaN"),
    ):
        save_file(changed, path)
        with pytest.raises(TemperaError, match=words):
            ClipScore(NAME, str(path), quick_gelu=False).load(CPU)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("run"))
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "clip.pt"))
    with pytest.raises(TemperaError, match="TorchScript"):
        ClipScore(NAME, str(tmp_path / "clip.pt"), quick_gelu=False).load(CPU)
    torch.save({"state_dict": {"other": torch.ones(2)}}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(TemperaError, match="does not hold the weights of HPSv2"):
        HPS(str(tmp_path), NAME).load(CPU)


def test_the_files_of_a_model() -> None:
    (openai,) = ClipScore("ViT-L-14", "openai").files
    assert openai.location == "timm/vit_large_patch14_clip_224.openai"
    assert ClipScore("hf-hub:laion/CLIP-ViT-g-14-laion2B-s12B-b42K", None).files == ()
    assert ClipScore("ViT-B-32", "own.bin").files == (
        WeightsFile("own.bin", "open_clip_model.safetensors"),
    )
