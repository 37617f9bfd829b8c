"""CLIP score and HPSv2, on tiny random checkpoints in the official
layouts, against a second writing of the networks (`reference_clip`).
"""

import logging
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
from torch.nn.functional import linear
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import clip_model, hps
from tempera.metrics.clip import ClipScore, clip_scorer
from tempera.metrics.clip_model import ClipModel
from tempera.metrics.hps import HPS
from tempera.metrics.linear_chain import linear_chain
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

    visual = SimpleNamespace(image_size=(4, 5))

    def encode_image(self, images: Tensor) -> Tensor:
        assert images.shape == (2, 3, 4, 4)
        return images.mean((2, 3))

    def encode_text(self, ids: Tensor) -> Tensor:
        return torch.stack([ids, ids**2, torch.ones_like(ids)], 1)


def lengths(texts: list[str]) -> Tensor:
    return torch.tensor([float(len(text)) for text in texts])


def floats(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float()


OPEN_CLIP = SimpleNamespace(
    constants=SimpleNamespace(OPENAI_DATASET_MEAN=[0.0] * 3, OPENAI_DATASET_STD=[1.0] * 3),
    get_tokenizer=lambda name: lengths,
)


def cosines_of_means(images: Tensor, prefix: str = "") -> Tensor:
    texts = Means().encode_text(lengths([prefix + text for text in TEXTS]))
    return torch.cosine_similarity(images.float().mean((2, 3)), texts, dim=1)


def test_a_clip_score_is_the_cosine_of_picture_and_prefixed_prompt() -> None:
    images = pictures(4)
    found = clip_scorer(Means(), lengths, floats, CPU, "a ")(images, PROMPTS)
    torch.testing.assert_close(found["clip_score"], cosines_of_means(images, "a "))


def test_hpsv2_is_100_times_the_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HPS, "network", lambda self: Means())
    monkeypatch.setattr(hps, "import_open_clip", lambda: OPEN_CLIP)
    images = pictures(4)
    torch.testing.assert_close(scored(HPS(), images), 100 * cosines_of_means(images))


def test_files_of_a_tag_are_where_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = {
        "hub": {"hf_hub": "some/model/"},
        "named": {"hf_hub": "some/model/weights.bin"},
        "url": {"url": "https://example.org/models/ViT.pt"},
    }
    made = SimpleNamespace(
        list_models=lambda: ["ViT"],
        get_pretrained_cfg=lambda model, weights: tags.get(weights, {}),
        list_pretrained_tags_by_model=lambda model: list(tags),
    )
    monkeypatch.setattr(clip_model, "import_open_clip", lambda: made)
    names = clip_model._NAMES
    assert ClipModel("ViT", "hub").files == (WeightsFile("some/model", names),)
    assert ClipModel("ViT", "named").files == (WeightsFile("some/model", ("weights.bin",)),)
    assert ClipModel("ViT", "url").files == (WeightsFile(tags["url"]["url"], ("ViT.pt",)),)
    (tmp_path / "own.bin").touch()
    own = str(tmp_path / "own.bin")
    assert ClipModel("ViT", own).files == (WeightsFile(own, names),)
    for weights in (None, "nowhere"):
        with pytest.raises(TemperaError, match="give a file, or one of hub, named, url"):
            _ = ClipModel("ViT", weights).files
    with pytest.raises(TemperaError, match="other is not a model that open_clip knows"):
        _ = ClipModel("other").files


@pytest.mark.parametrize(
    ("named", "quick", "tagged", "said"),
    [
        (False, True, False, "holds OpenAI's weights"),
        (False, True, True, ""),
        (True, True, False, ""),
        (True, False, False, "may have been trained without it"),
        (False, False, False, ""),
    ],
)
def test_a_warning_where_weights_and_activation_do_not_match(
    named: bool,
    quick: bool,
    tagged: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = SimpleNamespace(
        get_model_config=lambda model: {"quick_gelu": True} if named else {},
        get_pretrained_cfg=lambda model, weights: {"url": "any"} if tagged else {},
    )
    monkeypatch.setattr(clip_model, "import_open_clip", lambda: made)
    ClipModel("ViT", "any")._check_activation(Path("file"), quick)
    told = capsys.readouterr().out
    assert said in told and bool(told) == bool(said)


def test_an_architecture_is_made_without_weights_or_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def create(name: str, **options: object) -> torch.nn.Module:
        assert logging.root.manager.disable == logging.WARNING
        asked.append((name, options))
        return torch.nn.Identity()

    monkeypatch.setattr(
        clip_model, "import_open_clip", lambda: SimpleNamespace(create_model=create)
    )
    clip_model.architecture("ViT")
    clip_model.architecture("ViT", True)
    assert logging.root.manager.disable == logging.NOTSET
    usual = {"load_weights": False, "pretrained_text": False, "device": "meta"}
    assert asked == [
        ("ViT", {**usual, "force_quick_gelu": False}),
        ("ViT", {**usual, "force_quick_gelu": True}),
    ]


def test_a_chain_of_linear_layers_is_in_the_order_of_their_numbers() -> None:
    sizes, state = {2: (4, 3), 10: (3, 5), 0: (6, 4)}, {"other.1.weight": torch.zeros(1)}
    for number, (into, out) in sizes.items():
        state[f"layers.{number}.weight"] = torch.randn(out, into)
        state[f"layers.{number}.bias"] = torch.randn(out)
    expected = x = torch.randn(2, 6)
    for number in (0, 2, 10):
        weight, bias = (state[f"layers.{number}.{kind}"] for kind in ("weight", "bias"))
        expected = linear(expected, weight, bias)
    chain = linear_chain(state, "layers.", Path("file"), "a chain")
    torch.testing.assert_close(chain(x), expected)
    with pytest.raises(TemperaError, match="it has no layers.0.weight"):
        linear_chain({"other.1.weight": torch.zeros(1)}, "layers.", Path("file"), "a chain")


@pytest.mark.slow
def test_clip_score(tiny: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "open_clip_model.safetensors")
    adapter = ClipScore(tiny, str(tmp_path / "open_clip_model.safetensors"), prefix="A photo of ")
    texts = tokens([f"A photo of {text}" for text in TEXTS])
    expected = cosines(embed_images(normalised(pictures()), state), embed_texts(texts, state))
    assert torch.allclose(scored(adapter), expected, atol=1e-5)
    write_open_clip(tmp_path, tiny, state)
    directory = ClipScore(f"local-dir:{tmp_path}", None, prefix="A photo of ")
    assert torch.allclose(scored(directory), expected, atol=1e-5)


@pytest.mark.slow
def test_openais_weights_get_their_activation(
    tiny: str, state: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of OpenAI's under a model's plain name: open_clip itself would compute it with the
    other activation.
    """
    path = tmp_path / "openai" / "open_clip_model.safetensors"
    path.parent.mkdir()
    save_file(state, path)
    image = embed_images(normalised(pictures()), state, quick_gelu)
    expected = cosines(image, embed_texts(tokens(TEXTS), state, quick_gelu))
    assert torch.allclose(scored(ClipScore(tiny, str(path))), expected, atol=1e-5)
    assert "holds OpenAI's weights: computing with QuickGELU" in capsys.readouterr().out


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_of_another_model_are_refused(
    tiny: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "clip.safetensors"
    save_file({name: one for name, one in state.items() if "ln_final" not in name}, path)
    with pytest.raises(TemperaError, match=r"does not hold the weights of tiny-vit \(.* lacks 2"):
        ClipScore(tiny, str(path)).network()
    with pytest.raises(TemperaError, match="ViT-none is not a model that open_clip knows"):
        ClipScore("ViT-none", str(path)).network()
    with pytest.raises(TemperaError, match="nowhere is neither a file nor a tag of open_clip's"):
        _ = ClipScore("ViT-B-32", "nowhere").files
    torch.save({"state_dict": {"other": torch.zeros(2)}}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(TemperaError, match="does not hold the weights of HPSv2"):
        HPS(str(tmp_path), tiny).network()


@pytest.mark.slow
def test_where_tags_are_published() -> None:
    (openai,) = ClipScore("ViT-L-14", "openai").files
    assert openai.place == "timm/vit_large_patch14_clip_224.openai"
    config, weights = ClipScore("hf-hub:laion/CLIP-ViT-g-14-laion2B-s12B-b42K", None).files
    assert config.place == weights.place == "laion/CLIP-ViT-g-14-laion2B-s12B-b42K"


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


def test_the_tokenizer_of_a_hub_model_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_clip itself would ask the hub again."""
    names = ("open_clip_config.json", "open_clip_model.safetensors")
    for name in names:
        (tmp_path / name).touch()
    files = tuple(WeightsFile(str(tmp_path), (name,)) for name in names)
    network = SimpleNamespace(visual=SimpleNamespace(preprocess_cfg={}))
    monkeypatch.setattr(ClipModel, "files", files)
    monkeypatch.setattr(ClipModel, "network", lambda self: network)
    open_clip = SimpleNamespace(
        get_tokenizer=lambda name: name,
        transform=SimpleNamespace(
            PreprocessCfg=dict, image_transform_v2=lambda config, is_train: config
        ),
    )
    monkeypatch.setattr(clip_model, "import_open_clip", lambda: open_clip)
    assert ClipModel("hf-hub:owner/name", None).tools()[1] == f"local-dir:{tmp_path}"
    monkeypatch.setattr(ClipModel, "files", files[1:])
    assert ClipModel("ViT-B-32", "openai").tools()[1] == "ViT-B-32"
