"""Prompt sets: from local files in the published formats, and from a hub on loopback."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, parquet

from tempera.data import benchmarks
from tempera.data.benchmarks import (
    HPSV2,
    coco_prompts,
    coco_training,
    dpg_prompts,
    drawbench_prompts,
    geneval_prompts,
    hpsv2_prompts,
    imagenet_classes,
    imagenet_prompts,
    parti_prompts,
    prompt_file,
)
from tempera.data.entries import Entry, Listed
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.runtime.hub import Repository

SOME: dict[str, Any] = {"path": None, "limit": 64, "offset": 0}
COCO: dict[str, Any] = SOME | {"per_image": 1, "seed": 0}
CAPTIONS: dict[str, Any] = {"path": None, "per_image": 1, "seed": 0}


def keys(source: Listed) -> list[str]:
    return [entry.key for entry in source.read(0) if isinstance(entry, Entry)]


def test_coco_has_one_caption_an_image_in_an_order_of_the_ids_and_the_seed(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"image_id": image, "id": 10 * image + again, "caption": f" caption {image} {again} "}
        for again in (1, 0)
        for image in (3, 1, 2, 0, 5, 4)
    ]
    rows = [row | ({"caption": " "} if row["id"] == 30 else {}) for row in rows]
    rows += [
        {"image_id": "0", "id": 60, "caption": "x"},
        {"image_id": "y", "id": 61, "caption": "y"},
    ]
    file = tmp_path / "captions.json"
    file.write_text(json.dumps({"annotations": rows}))
    here = COCO | {"path": str(file)}
    prompts = coco_prompts(**here)
    assert {prompt.text for prompt in prompts} == {
        *(f"caption {image} 0" for image in (0, 1, 2, 4, 5)), "caption 3 1", "y",
    }  # fmt: skip
    assert [int(one.id) for one in prompts] != sorted(int(one.id) for one in prompts)
    assert coco_prompts(**here | {"limit": 2, "offset": 3}) == prompts[3:5]
    assert coco_prompts(**here | {"seed": 1}) != prompts
    assert len(coco_prompts(**here | {"per_image": 0})) == 13
    source = coco_training(**CAPTIONS | {"path": str(file)})
    assert [key.split("#")[1] for key in keys(source)] == [prompt.id for prompt in prompts]
    assert list(source.read(4)) == list(source.read(0))[4:] and source.describe()["sha256"]
    file.write_text(json.dumps({"annotations": rows[::-1]}))
    assert coco_prompts(**here) == prompts


def test_every_class_equally_often() -> None:
    prompts = imagenet_prompts(None, 0, per_class=2, seed=0)
    texts = [prompt.text for prompt in prompts]
    assert len(prompts) == 2000 == len({prompt.id for prompt in prompts})
    assert sorted(texts, key=int) == [str(number // 2) for number in range(2000)]
    assert texts[:5] != ["0", "1", "2", "3", "4"]
    assert imagenet_prompts(3, 10, per_class=2, seed=0) == prompts[10:13]
    drawn = keys(imagenet_classes(2, seed=1))
    assert drawn != [prompt.id for prompt in prompts] and set(drawn) == {one.id for one in prompts}


def test_geneval_draws_each_prompt_four_times(tmp_path: Path) -> None:
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text('{"tag": "counting", "include": [], "prompt": "two cats"}\n' * 2)
    here: dict[str, Any] = SOME | {"path": str(file), "per_prompt": 4}
    prompts = geneval_prompts(**here | {"limit": None})
    assert [prompt.id for prompt in prompts][3:6] == ["00000-0003", "00001-0000", "00001-0001"]
    assert len(prompts) == 8
    file.write_text('{"tag": "counting"}\n')
    with pytest.raises(TemperaError, match=r"metadata\.jsonl:1 "):
        geneval_prompts(**here)


def test_dpg_and_hpsv2_are_named_as_their_scorers_name_them(tmp_path: Path) -> None:
    for name, text in {"partiprompts9": "a red\nfox", "0": "cabbages", "b": "x"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    here: dict[str, Any] = SOME | {"path": str(tmp_path)}
    prompts = dpg_prompts(**here, per_prompt=4)
    assert [prompt.id for prompt in prompts[3:5]] == ["0-0003", "b-0000"]
    assert prompts[8] == Prompt("partiprompts9-0000", "a red fox") and len(prompts) == 12
    (tmp_path / "b.txt").write_text(" ")
    with pytest.raises(TemperaError, match=r"b\.txt contains no prompt"):
        dpg_prompts(**here, per_prompt=1)

    for style in ("anime", "photo"):
        (tmp_path / f"{style}.json").write_text(json.dumps([f"{style} {n}" for n in range(3)]))
    chosen = hpsv2_prompts(**here, styles=["photo", "anime"])
    assert [prompt.id for prompt in chosen][2:4] == ["photo-00002", "anime-00000"]
    with pytest.raises(TemperaError, match="no style 'oil'"):
        hpsv2_prompts(**here, styles=["oil"])
    (tmp_path / "photo.json").write_text('{"a": 1}')
    with pytest.raises(TemperaError, match="not a JSON list"):
        hpsv2_prompts(**here, styles=["photo"])


def test_parti_is_shuffled_unless_its_order_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "PartiPrompts.tsv"
    file.write_text("Prompt\tCategory\n" + "".join(f"prompt {n}\tAbstract\n" for n in range(30)))
    here: dict[str, Any] = SOME | {"path": str(file)}
    plain = parti_prompts(**here, seed=None)
    assert [prompt.text for prompt in plain] == [f"prompt {n}" for n in range(30)]
    shuffled = parti_prompts(**here, seed=0)
    assert shuffled != plain and sorted(shuffled, key=lambda p: p.id) == plain
    assert keys(prompt_file(str(file))) == [prompt.id for prompt in plain]


def test_every_benchmark_of_the_hub_is_read_at_a_commit() -> None:
    of_the_hub = [one for one in vars(benchmarks).values() if isinstance(one, Repository)]
    assert len(of_the_hub) == 4
    assert all(re.fullmatch("[0-9a-f]{40}", str(one.revision)) for one in of_the_hub)


def test_the_newest_prompts_of_hpsv2_are_not_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(tmp_path / "cache") as hub:
        for text in ("a dog", "changed upstream"):
            commit = hub.add(HPSV2.id, {"benchmark/photo.json": json.dumps([text])}, "datasets")
            of_hpsv2 = hub.repositories["datasets", HPSV2.id]
            of_hpsv2.commits.setdefault(str(HPSV2.revision), of_hpsv2.commits[commit])
        hub.here(monkeypatch)
        assert hpsv2_prompts(**SOME, styles=["photo"]) == [Prompt("photo-00000", "a dog")]


@pytest.mark.slow
def test_from_the_hub_and_again_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = parquet(image_id=[7, 5], ids=[[71, 70], [50]], captions=[["b", "a"], ["c"]])
    files = {"data/validation-0.parquet": rows, "data/train-0.parquet": rows}
    with Hub(tmp_path / "cache") as hub:
        assert isinstance(hub, Hub)
        commit = hub.add("phiyodr/coco2017", files, kind="datasets")
        monkeypatch.setattr(benchmarks, "COCO", Repository("phiyodr/coco2017", "dataset", commit))
        drawn = {"data/test-0.parquet": parquet(prompts=["a  dog", "b"])}
        commit = hub.add("Jialuo21/DrawBench", drawn, kind="datasets")
        drawbench = Repository("Jialuo21/DrawBench", "dataset", commit)
        monkeypatch.setattr(benchmarks, "DRAWBENCH", drawbench)
        names = [f"COCO_val2014_0000000003{number}.jpg" for number in (90, 2)]
        rows = parquet(question_id=names, answer=[["b", "a"], ["c"]])
        commit = hub.add("lmms-lab/COCO-Caption", {"data/val-0.parquet": rows}, kind="datasets")
        coco2014 = Repository("lmms-lab/COCO-Caption", "dataset", commit)
        monkeypatch.setattr(benchmarks, "COCO2014", coco2014)
        for offline in (False, True):
            hub.here(monkeypatch, offline=offline)
            found = {(one.id, one.text) for one in coco_prompts(**COCO, split="val2014")}
            assert found == {("390-0", "b"), ("32-0", "c")}
            found = {(one.id, one.text) for one in coco_prompts(**COCO)}
            assert found == {("70", "a"), ("50", "c")}
            assert coco_training(**CAPTIONS).count() == 2
            assert len(coco_prompts(**COCO, split="train")) == 2
            drawn_prompts = drawbench_prompts(**SOME)
            assert [(one.id, one.text) for one in drawn_prompts] == [
                ("drawbench-000", "a dog"), ("drawbench-001", "b"),
            ]  # fmt: skip
        assert len(hub.downloads()) == len(set(hub.downloads()))
