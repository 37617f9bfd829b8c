"""Prompt sets: from local files in the published formats, and from a hub on loopback."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub

from tempera.data import benchmarks
from tempera.data.benchmarks import (
    coco_prompts,
    coco_training,
    drawbench_prompts,
    geneval_prompts,
    imagenet_classes,
    imagenet_prompts,
    parti_prompts,
    prompt_file,
)
from tempera.errors import TemperaError
from tempera.runtime.hub import Repository


def coco(path: Path, images: int = 6) -> str:
    """Two captions an image, images in no order; the first of one is empty."""
    rows = [
        {"image_id": image, "id": 10 * image + again, "caption": f" caption {image} {again} "}
        for again in (1, 0)
        for image in (3, 1, 2, 0, 5, 4)[:images]
    ]
    rows = [row | ({"caption": " "} if row["id"] == 30 else {}) for row in rows]
    path.write_text(json.dumps({"images": [], "annotations": rows}), encoding="utf-8")
    return str(path)


def test_one_caption_an_image_in_a_seeded_order(tmp_path: Path) -> None:
    file = coco(tmp_path / "captions.json")
    prompts = coco_prompts(file)
    assert len(prompts) == 6 == len({prompt.id for prompt in prompts})
    assert {prompt.text for prompt in prompts} == {
        *(f"caption {image} 0" for image in (0, 1, 2, 4, 5)), "caption 3 1",
    }  # fmt: skip
    assert [int(prompt.id) for prompt in prompts] != sorted(int(prompt.id) for prompt in prompts)
    assert coco_prompts(file, limit=2, offset=3) == prompts[3:5]
    assert coco_prompts(file, seed=1) != prompts
    assert len(coco_prompts(file, per_image=0)) == 11
    with pytest.raises(TemperaError, match="holds 6 prompts, so offset=6 leaves none"):
        coco_prompts(file, offset=6)


def test_the_order_does_not_depend_on_the_file(tmp_path: Path) -> None:
    file = Path(coco(tmp_path / "captions.json"))
    before = coco_prompts(str(file))
    content = json.loads(file.read_text())
    content["annotations"].reverse()
    file.write_text(json.dumps(content))
    assert coco_prompts(str(file)) == before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[1]", "holds no JSON object"),
        ("{", "not valid JSON"),
        ("{}", "is not an MS-COCO captions"),
    ],
)
def test_a_file_that_is_none(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(TemperaError, match=told):
        coco_prompts(str(tmp_path / "c.json"))
    with pytest.raises(TemperaError, match=r"there is no file absent\.json"):
        coco_prompts("absent.json")


def test_captions_to_draw_training_images_for(tmp_path: Path) -> None:
    source = coco_training(coco(tmp_path / "captions.json"))
    entries = list(source.read(0))
    assert source.count() == 6 == len(entries)
    assert all(entry.key == f"{int(entry.key.split('#')[1]) // 10}#" + entry.key.split("#")[1]
               for entry in entries)  # type: ignore[union-attr]  # fmt: skip
    assert list(source.read(4)) == entries[4:]
    assert source.describe()["sha256"]


def test_captions_of_a_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    source = prompt_file(str(tmp_path / "a.txt"))
    assert [entry.caption for entry in source.read(1)] == ["a dog"]  # type: ignore[union-attr]
    assert source.count() == 2 and source.describe()["path"]


def test_ids_of_images_may_be_numbers_and_text(tmp_path: Path) -> None:
    rows = [
        {"image_id": image, "id": number, "caption": text}
        for number, (image, text) in enumerate([("0", "a"), (1, "b"), (0, "c"), ("x", "d")])
    ]
    (tmp_path / "c.json").write_text(json.dumps({"annotations": rows}))
    found = coco_prompts(str(tmp_path / "c.json"))
    assert sorted(prompt.text for prompt in found) == ["a", "b", "d"]


def test_every_class_equally_often() -> None:
    prompts = imagenet_prompts(None, per_class=2)
    texts = [prompt.text for prompt in prompts]
    assert len(prompts) == 2000 == len({prompt.id for prompt in prompts})
    assert sorted(texts, key=int) == [str(number // 2) for number in range(2000)]
    assert texts[:5] != ["0", "1", "2", "3", "4"]
    assert imagenet_prompts(3, 10, per_class=2) == prompts[10:13]
    drawn = [entry.caption for entry in imagenet_classes(2).read(0)]  # type: ignore[union-attr]
    assert drawn != texts and sorted(drawn) == sorted(texts)


def test_geneval_draws_each_prompt_four_times(tmp_path: Path) -> None:
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text('{"tag": "counting", "include": [], "prompt": "two cats"}\n' * 2)
    prompts = geneval_prompts(str(file), limit=None)
    assert [prompt.id for prompt in prompts][3:6] == ["00000-0003", "00001-0000", "00001-0001"]
    assert len(prompts) == 8
    file.write_text('{"tag": "counting"}\n')
    with pytest.raises(TemperaError, match=r"metadata\.jsonl:1 holds no printable text"):
        geneval_prompts(str(file))
    with pytest.raises(TemperaError, match="give path=evaluation_metadata"):
        geneval_prompts(None)


def test_parti_is_shuffled_unless_its_order_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "PartiPrompts.tsv"
    lines = "".join(f"prompt {n}\tAbstract\n" for n in range(30))
    file.write_text(f"Prompt\tCategory\n{lines}")
    plain = parti_prompts(str(file), seed=None)
    assert [prompt.text for prompt in plain] == [f"prompt {n}" for n in range(30)]
    shuffled = parti_prompts(str(file))
    assert shuffled != plain and sorted(shuffled, key=lambda p: p.id) == plain


def parquet(**columns: list[object]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "cache") as started:
        assert isinstance(started, Hub)
        started.here(monkeypatch)
        yield started


@pytest.mark.slow
def test_from_the_hub_and_again_without_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = parquet(image_id=[7, 5], ids=[[71, 70], [50]], captions=[["b", "a"], ["c"]])
    commit = hub.add(
        "phiyodr/coco2017",
        {"data/validation-0.parquet": rows, "data/train-0.parquet": rows},
        kind="datasets",
    )
    monkeypatch.setattr(benchmarks, "COCO", Repository("phiyodr/coco2017", "dataset", commit))
    hub.add("nateraw/parti-prompts", {"PartiPrompts.tsv": "Prompt\na cat\n"}, kind="datasets")
    hub.add("Jialuo21/DrawBench", {"data/test-0.parquet": parquet(prompts=["a  dog", "b"])},
            kind="datasets")  # fmt: skip
    for offline in (False, True):
        hub.here(monkeypatch, offline=offline)
        assert {(prompt.id, prompt.text) for prompt in coco_prompts()} == {("70", "a"), ("50", "c")}
        assert coco_training().count() == 2
        assert [prompt.text for prompt in parti_prompts()] == ["a cat"]
        assert [prompt.text for prompt in drawbench_prompts()] == ["a dog", "b"]
    assert len(hub.downloads()) == len(set(hub.downloads()))
