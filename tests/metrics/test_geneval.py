"""GenEval: requests of its prompts, judgement of found objects, and the detector and the colours on
tiny random checkpoints.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from reference_clip import embed_images, embed_texts, normalised, random_state, register, tokens
from safetensors.torch import save_file
from tiny_metrics import write_detector
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import detector as detectors
from tempera.metrics import geneval
from tempera.metrics.clip_model import ClipModel
from tempera.metrics.colour_namer import _cut, colour_namer
from tempera.metrics.detector import detect, load_detector
from tempera.metrics.evaluators import Networks
from tempera.metrics.geneval import GenEval
from tempera.metrics.geneval_tasks import (
    CLASSES,
    COLOURS,
    TASKS,
    Found,
    Task,
    Wanted,
    fulfilled,
    relations,
    task_of,
)
from tempera.metrics.quality import quality

CPU = torch.device("cpu")
NO_MASK = np.zeros((1, 1), bool)


@pytest.mark.parametrize(
    ("prompt", "task"),
    [
        ("a photo of a bench", Task("single_object", (Wanted("bench"),))),
        ("a photo of an orange", Task("single_object", (Wanted("orange"),))),
        ("a photo of an orange orange", Task("colors", (Wanted("orange", 1, "orange"),))),
        ("a photo of a toothbrush and a carrot",
         Task("two_object", (Wanted("toothbrush"), Wanted("carrot")))),
        ("a photo of three buses", Task("counting", (Wanted("bus", 3),), exactly=True)),
        ("a photo of a train right of a dining table",
         Task("position", (Wanted("dining table"), Wanted("train", relation="right of")))),
        ("a photo of a white boat and an orange hot dog",
         Task("color_attr", (Wanted("boat", 1, "white"), Wanted("hot dog", 1, "orange")))),
        ("a photo of a red boat and a hot dog", None),
        ("a photo of a dragon", None),
        ("a large green star", None),
    ],
)  # fmt: skip
def test_what_a_prompt_asks_for(prompt: str, task: Task | None) -> None:
    assert task_of(prompt) == task


def box(*corners: float) -> Found:
    return Found(corners, NO_MASK, 1.0)  # type: ignore[arg-type]


def test_relations() -> None:
    middle = box(40, 40, 60, 60)
    assert relations(box(0, 40, 20, 60), middle) == {"left of"}
    assert relations(box(80, 45, 100, 65), middle) == {"right of"}
    assert relations(box(45, 0, 55, 10), middle) == {"above"}
    assert relations(box(80, 80, 100, 100), middle) == {"right of", "below"}
    assert relations(box(43, 41, 63, 61), middle) == set()  # within the slack
    assert relations(box(41, 40, 61, 60), middle) == set()
    assert relations(middle, middle) == set()


def test_the_slack_is_a_tenth_of_both_sizes_along_the_direction() -> None:
    one, other = box(40, 20, 60, 220), box(10, -10, 30, 190)  # 30 right and 30 below
    assert relations(one, other) == {"right of"}
    point = box(0, 0, 0, 0)
    assert relations(box(0.5, -16, 5.5, 24), point) == set()  # 2.5 of an offset of 5: half
    assert relations(box(5e-4, 0, 5e-4, 0), point) == set()  # nearly one place


def judged(prompt: str, colour: str = "red", **objects: list[Found]) -> bool:
    task = task_of(f"a photo of {prompt}")
    assert task is not None
    return fulfilled(task, objects, lambda found, name: [colour] * len(found))


def test_what_fulfils_a_task() -> None:
    one, left = box(40, 40, 60, 60), box(0, 40, 20, 60)
    assert judged("a cat", cat=[one, one])
    assert not judged("a cat", dog=[one])
    assert judged("a cat and a dog", cat=[one], dog=[one])
    assert not judged("a cat and a dog", cat=[one])
    assert judged("two cats", cat=[one, left])
    assert not judged("two cats", cat=[one])
    assert not judged("two cats", cat=[one] * 3)  # GenEval forbids one more
    assert judged("a red cat", cat=[one])
    assert not judged("a blue cat", cat=[one])
    assert judged("a cat left of a dog", cat=[left], dog=[one])
    assert not judged("a cat right of a dog", cat=[left], dog=[one])
    assert not judged("a cat left of a dog", cat=[one, left], dog=[one])  # only the surest counts


def test_geneval_is_the_mean_of_its_tasks() -> None:
    rows = [{"geneval_counting": 1.0, "geneval_colors": None}] * 3
    rows += [{"geneval_counting": None, "geneval_colors": 0.0}]
    metrics = quality(rows, Networks(), None, 20)
    assert (metrics["geneval"].value, metrics["geneval"].n) == (0.5, 4)
    assert (metrics["geneval_counting"].value, metrics["geneval_counting"].n) == (1.0, 3)
    assert "geneval_position" not in metrics


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_detector(tmp_path_factory.mktemp("detector"))


@pytest.mark.slow
def test_the_detector(detector: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, masks and boxes as MMDetection makes them of the network's output."""
    monkeypatch.setattr(detectors, "SHORT", 64)
    network = load_detector(detector / "config.json", detector / "model.safetensors")
    picture = torch.randint(0, 256, (3, 40, 60)).to(torch.uint8)
    with torch.inference_mode():
        found = detect(network, picture, 0.01)
        image = interpolate(picture[None].float(), (64, 96), mode="bilinear")
        mean, deviation = (
            torch.tensor([123.675, 116.28, 103.53]),
            torch.tensor([58.395, 57.12, 57.375]),
        )
        image = (image - mean[:, None, None]) / deviation[:, None, None]
        raw = network(pixel_values=image)
    shares = raw.class_queries_logits[0].softmax(-1)[:, :80]
    masks = interpolate(raw.masks_queries_logits, (64, 96), mode="bilinear")
    masks = interpolate(masks, (40, 60), mode="bilinear")[0]
    expected: dict[str, list[float]] = {}
    ranked = sorted((float(shares[q, c]), q, c) for q in range(5) for c in range(80))[::-1]
    for share, query, kind in ranked[:100]:
        inside = masks[query] > 0
        score = share * float(masks[query][inside].sigmoid().sum() / (inside.sum() + 1e-6))
        if score > 0.01:
            expected.setdefault(CLASSES[kind], []).append(score)
            rows, columns = torch.where(inside)
            corners = (int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max()))
            boxes = [(x, y, right - 1, low - 1) for one in found[CLASSES[kind]]
                     for x, y, right, low in [one.box]]  # fmt: skip
            assert corners in boxes
    assert expected
    assert {name: [one.score for one in group] for name, group in found.items()} == {
        name: pytest.approx(sorted(scores, reverse=True), abs=1e-5)
        for name, scores in expected.items()
    }


@pytest.mark.slow
def test_pictures_to_scores(
    detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detectors, "SHORT", 64)
    name = register(tmp_path, "tiny-geneval")
    save_file(random_state(name), tmp_path / "clip.safetensors")
    adapter = GenEval(str(detector), name, str(tmp_path / "clip.safetensors"), sure=0.0)
    pictures = torch.randint(0, 256, (3, 3, 32, 32)).to(torch.uint8)
    prompts = [Prompt(str(place), text) for place, text in enumerate(
        ["a photo of a red bench", "a photo of two cats", "anything else"])]  # fmt: skip
    (score,) = adapter.load(CPU).scores
    with torch.inference_mode():
        found = score(pictures, prompts)
    assert set(found) == {f"geneval_{task}" for task in TASKS}
    known = {key: (~values.isnan()).tolist() for key, values in found.items()}
    assert known["geneval_colors"] == [True, False, False]
    assert known["geneval_counting"] == [False, True, False]


@pytest.mark.slow
def test_colours(tmp_path: Path) -> None:
    """Cut out, on grey, against the mean of three sentences a colour."""
    name = register(tmp_path, "tiny-colours")
    state = random_state(name)
    save_file(state, tmp_path / "clip.safetensors")
    picture = torch.randint(0, 256, (3, 40, 40)).to(torch.uint8)
    mask = np.zeros((40, 40), bool)
    mask[10:20, 8:30] = True
    inner: Tensor = torch.where(torch.from_numpy(mask), picture, torch.tensor(153).byte())
    cut = inner[:, 4:20, 8:24]  # a box of the network's own size needs no resizing
    texts = []
    for colour in COLOURS:
        sentences = [f"a photo of a {colour} tv", f"a photo of a {colour}-colored tv",
                     f"a photo of a {colour} object"]  # fmt: skip
        texts.append(normalize(embed_texts(tokens(sentences), state), dim=-1).mean(0))
    image = embed_images(normalised(cut[None]), state)
    expected = torch.cosine_similarity(image, torch.stack(texts), dim=-1).argmax()
    namer = colour_namer(ClipModel(name, str(tmp_path / "clip.safetensors")), CPU)
    with torch.inference_mode():
        found = namer(picture, [Found((8.0, 4.0, 24.0, 20.0), mask, 1.0)], "tv")
    assert found == [COLOURS[int(expected)]]


@pytest.mark.slow
def test_another_detector_is_refused(detector: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((detector / "config.json").read_text())
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TemperaError, match="does not hold the weights of a Mask2Former"):
        GenEval(str(tmp_path)).network()


def test_a_detector_without_weights_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mask2former"}')
    with pytest.raises(TemperaError, match="does not hold the weights .*no file named"):
        load_detector(config, tmp_path / "model.safetensors")


def test_a_direction_takes_more_than_half_of_the_offset() -> None:
    middle = box(0, 0, 0, 0)
    assert relations(box(100, 55, 100, 55), middle) == {"right of"}  # its share below is 0.48
    assert relations(box(100, 60, 100, 60), middle) == {"right of", "below"}  # 0.51
    small, near = box(0, 0, 1, 1), box(-1, 0, 0, 1)
    assert relations(near, small) == {"left of"}  # an offset of 1, of which 0.2 is slack


def test_scores_of_objects_are_shares() -> None:
    for option in ("sure", "sure_counted"):
        assert getattr(GenEval(**{option: 0.0}), option) == 0
        for share in (1.0, -0.1):
            with pytest.raises(TemperaError, match=f"{option}={share} is no score of an object"):
                GenEval(**{option: share})


def test_objects_are_surer_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 by default, and 0.3 otherwise."""
    asked: list[float] = []

    def found(network: object, picture: Tensor, least: float) -> dict[str, list[Found]]:
        asked.append(least)
        return {"cat": [box(0, 0, 1, 1)] * 2}

    monkeypatch.setattr(geneval, "detect", found)
    monkeypatch.setattr(geneval, "colour_namer", lambda clip, device: None)
    monkeypatch.setattr(GenEval, "network", lambda self: torch.nn.Identity())
    (score,) = GenEval().load(CPU).scores
    texts = ["a photo of two cats", "a photo of a dog", "a ring"]
    prompts = [Prompt(str(place), text) for place, text in enumerate(texts)]
    scores = score(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), prompts)
    assert asked == [0.9, 0.3]
    counting, single = scores["geneval_counting"], scores["geneval_single_object"]
    assert counting[0] == 1 and counting[1:].isnan().all()
    assert single[1] == 0 and single[[0, 2]].isnan().all()
    assert set(scores) == {f"geneval_{task}" for task in TASKS}


class Queries(torch.nn.Module):
    """A detector whose masks and classes are known, [Q, H, W] and [Q, 81], as probabilities."""

    def __init__(self, masks: Tensor, classes: Tensor) -> None:
        super().__init__()
        self.masks = torch.nn.Parameter(masks.logit())
        self.classes = classes.log()

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        assert pixel_values.shape[-2:] == self.masks.shape[-2:]
        return SimpleNamespace(
            masks_queries_logits=self.masks[None], class_queries_logits=self.classes[None]
        )


def known_queries() -> Queries:
    """Two cats of which the second is surer, and a query that is nothing; 80 classes and none."""
    masks = torch.full((3, 32, 64), 0.1)  # the picture's 32 x 48, padded
    masks[0, 4:10, 8:20], masks[1, 0:2, 40:64], masks[2, 5, 5] = 0.9, 0.95, 0.7
    classes = torch.full((3, 81), 1e-3)
    classes[0, CLASSES.index("cat")], classes[1, CLASSES.index("cat")] = 0.6, 0.9
    classes[2, CLASSES.index("toothbrush")], classes[2, 80] = 0.5, 0.99
    return Queries(masks, classes / classes.sum(-1, keepdim=True))


def test_objects_are_the_surest_classes_of_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectors, "SHORT", 32)
    picture, network = torch.zeros(3, 32, 48, dtype=torch.uint8), known_queries()
    with torch.inference_mode():
        found = detect(network, picture, 0.3)
        every = detect(network, picture, 0.0)
    assert list(found) == ["cat"]
    first, second = found["cat"]
    shares = network.classes.exp()[:, CLASSES.index("cat")].tolist()
    assert first.box == (40, 0, 48, 2) and second.box == (8, 4, 20, 10)
    assert first.score == pytest.approx(shares[1] * 0.95, rel=1e-5)
    assert second.score == pytest.approx(shares[0] * 0.9, rel=1e-5)
    assert second.mask.sum() == 6 * 12 and second.mask.shape == (32, 48)
    assert every["toothbrush"][0].box == (5, 5, 6, 6)  # the last class
    assert sum(map(len, every.values())) == 100  # of the 240 pairs of a query and a class
    with torch.inference_mode():
        assert "cat" not in detect(network, picture, first.score)


def test_a_colour_is_that_of_the_nearest_mean_of_its_sentences() -> None:
    generator = torch.Generator().manual_seed(0)
    texts, images = (torch.randn(rows, 6, generator=generator) for rows in (30, 4))

    class Clip(torch.nn.Module):
        def encode_text(self, ids: Tensor) -> Tensor:
            return texts[ids]

        def encode_image(self, cuts: Tensor) -> Tensor:
            assert cuts.shape == (4, 3)
            return images

    def ids(sentences: list[str]) -> Tensor:
        assert sentences[3:6] == ["a photo of a orange cup", "a photo of a orange-colored cup",
                                  "a photo of a orange object"]  # fmt: skip
        return torch.arange(len(sentences))

    def pixel(image: Image.Image) -> Tensor:
        return torch.tensor(image.getpixel((0, 0)))

    tools = SimpleNamespace(tools=lambda: (Clip(), ids, pixel))
    named = colour_namer(tools, CPU)  # type: ignore[arg-type]
    one = Found((0, 0, 2, 2), np.ones((2, 2), bool), 1.0)
    found = named(torch.zeros(3, 2, 2, dtype=torch.uint8), [one] * 4, "cup")
    means = [normalize(texts[3 * place : 3 * place + 3], dim=-1).mean(0) for place in range(10)]
    for name, image in zip(found, images, strict=True):
        cosines = [float(torch.cosine_similarity(image, mean, dim=0)) for mean in means]
        assert name == COLOURS[cosines.index(max(cosines))]


def test_the_detector_is_read_from_its_own_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "open_clip_config.json"):
        (tmp_path / name).touch()
    monkeypatch.setattr(geneval, "load_detector", lambda *files: [file.name for file in files])
    adapter = GenEval(str(tmp_path), f"local-dir:{tmp_path}")
    assert adapter.network() == ["config.json", "model.safetensors"]
    assert len(adapter.files) == 4


@pytest.mark.parametrize(
    ("high", "wide", "inner"),
    [(100, 300, (444, 1333)), (100, 110, (800, 880)), (333, 500, (800, 1201))],
)
def test_the_detectors_input(high: int, wide: int, inner: tuple[int, int]) -> None:
    """The shorter side to 800, the longer to 1333 at most; padded by zeros to multiples of 32."""
    image, size = detectors._input(torch.full((3, high, wide), 200, dtype=torch.uint8))
    assert size == inner
    assert image.shape == (1, 3, *(-(-side // 32) * 32 for side in inner))
    mean, deviation = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]  # of ImageNet
    expected = (200 - torch.tensor(mean)) / torch.tensor(deviation)
    torch.testing.assert_close(image[0, :, inner[0] - 1, inner[1] - 1], expected)
    assert not image[:, :, inner[0] :].any() and not image[..., inner[1] :].any()


def test_an_object_is_cut_out_on_grey() -> None:
    mask = np.zeros((4, 6), bool)
    mask[1, 2] = True
    cut = np.asarray(
        _cut(torch.full((3, 4, 6), 7, dtype=torch.uint8), Found((1, 1, 5, 3), mask, 1))
    )
    assert cut.shape == (2, 4, 3)
    assert cut[0, 1].tolist() == [7] * 3
    cut = np.delete(cut.reshape(-1, 3), 1, 0)
    assert (cut == 0x99).all()
