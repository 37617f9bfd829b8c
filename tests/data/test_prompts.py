import json
from pathlib import Path
from typing import Any

import pytest

from tempera.data.prompts import Prompt, class_prompts, file_prompts, one_prompt
from tempera.errors import TemperaError
from tempera.shapes.scenes import world_prompts


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_world_prompts_are_seeded_and_sliced() -> None:
    prompts = world_prompts(limit=5, offset=121)
    assert [prompt.id for prompt in prompts] == [f"world-{index:06d}" for index in range(121, 126)]
    assert prompts == world_prompts(limit=10, offset=120)[1:6]
    assert prompts != world_prompts(limit=5, offset=121, seed=2)


def test_class_prompts_go_round() -> None:
    assert [(prompt.id, prompt.text) for prompt in class_prompts(3, 998)] == [
        ("class-0998-000", "998"),
        ("class-0999-000", "999"),
        ("class-0000-001", "0"),
    ]
    assert len(class_prompts(None)) == 1000


def test_one_prompt_has_an_id_of_its_text() -> None:
    first, second = one_prompt("a red ring")[0], one_prompt(" a blue ring ")[0]
    assert first.text == "a red ring" and second.text == "a blue ring" and first.id != second.id
    assert one_prompt("a red ring") == [first]
    with pytest.raises(TemperaError, match="prompt is empty"):
        one_prompt("  ")
    assert one_prompt(7)[0].text == "7"  # a class


@pytest.mark.parametrize("given", [["a red ring", "a blue ring"], {"deeper": 1}])
def test_one_prompt_is_one_text(given: Any) -> None:
    with pytest.raises(TemperaError, match=r"prompt=.* is not possible: give one text"):
        one_prompt(given)


def test_text_file(tmp_path: Path) -> None:
    path = write(tmp_path / "my prompts.txt", "\ufeffa cat\r\n  a “dog”\tasleep \n\n")
    assert file_prompts(path) == [
        Prompt("my-prompts-000001", "a cat"),
        Prompt("my-prompts-000002", "a “dog” asleep"),
    ]
    assert file_prompts(path, limit=5, offset=1) == [Prompt("my-prompts-000002", "a “dog” asleep")]


def test_parti_prompts_layout(tmp_path: Path) -> None:
    path = write(
        tmp_path / "Parti.tsv",
        'Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\tx\n the words "go" '
        "\tWorld\tBasic\t\n",
    )
    assert file_prompts(path) == [
        Prompt("Parti-000002", "bond"),
        Prompt("Parti-000003", 'the words "go"'),
    ]


def test_coco_layout(tmp_path: Path) -> None:
    annotations = [
        {"image_id": 1, "id": 401, "caption": "An office. "},
        {"image_id": 1, "id": 7, "caption": "A\ncat"},
    ]
    path = write(
        tmp_path / "captions.json",
        json.dumps({"info": {}, "images": [], "annotations": annotations}),
    )
    assert file_prompts(path) == [Prompt("401", "An office."), Prompt("7", "A cat")]


def coco(*annotations: object) -> str:
    return json.dumps({"annotations": annotations})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", r"a\.txt holds no prompts"),
        ("a.txt", " \n\n", r"a\.txt holds no prompts"),
        ("a.txt", "one\n\nthree\n", r"a\.txt:2 holds an empty prompt"),
        ("a.txt", b"one\ncaf\xe9\n", r"a\.txt:2 is not UTF-8 text \(byte 4\)"),
        ("a.txt", "one\ntwo\x00\n", r"a\.txt:2 is broken .*control character"),
        ("a.tsv", "", r"a\.tsv holds no prompts"),
        ("a.tsv", "Prompt\tCategory\n", r"a\.tsv holds no prompts"),
        ("a.tsv", "text\tCategory\nx\ty\n", r"a\.tsv:1 has no Prompt column"),
        (
            "a.tsv",
            "Prompt\tCategory\nx\ty\nx\ty\tz\n",
            r"a\.tsv:3 is broken \(3 fields where the header has 2\)",
        ),
        ("a.tsv", "Category\tPrompt\nx\ty\nx\n", r"a\.tsv:3 is broken \(1 fields"),
        ("a.tsv", "Prompt\tCategory\n \ty\n", r"a\.tsv:2 holds an empty prompt"),
        ("a.json", '{"annotations": [\n{"id": 1,,}]}', r"a\.json:2 is not valid JSON"),
        ("a.json", '{"annotations": [{"id": 1, "caption": "x"', r"a\.json:1 is not valid JSON"),
        ("a.json", "[1]", r"a\.json has no list of annotations"),
        ("a.json", coco({"id": 1, "caption": "x"}, {"id": 2}), r"a\.json, annotation 2 is broken"),
        ("a.json", coco({"id": 1, "caption": "x"}, 3), r"a\.json, annotation 2 is broken"),
        (
            "a.json",
            coco({"id": 1, "caption": " "}),
            r"a\.json, annotation 1 \(id 1\) holds an empty prompt",
        ),
        (
            "a.json",
            coco({"id": 1, "caption": "x"}, {"id": 1, "caption": "y"}),
            r"annotation 2 repeats the id 1 of annotation 1",
        ),
        ("a.json", coco({"id": "../x", "caption": "x"}), r"cannot name a file"),
        ("a.json", coco(), r"a\.json holds no prompts"),
        ("a.csv", "x", r"a\.csv does not end like a prompt file"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    with pytest.raises(TemperaError, match=sentence) as problem:
        file_prompts(write(tmp_path / name, content))
    assert "\n" not in str(problem.value)


def test_missing_file_and_bad_slices(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match=r"there is no file .*nowhere\.txt"):
        file_prompts(str(tmp_path / "nowhere.txt"))
    with pytest.raises(TemperaError, match="folder.txt is a directory"):
        (tmp_path / "folder.txt").mkdir()
        file_prompts(str(tmp_path / "folder.txt"))
    with pytest.raises(TemperaError, match="data=file needs a file"):
        file_prompts(None)
    path = write(tmp_path / "a.txt", "one\ntwo\n")
    with pytest.raises(TemperaError, match="holds 2 prompts, so offset=2 leaves none"):
        file_prompts(path, offset=2)
    with pytest.raises(TemperaError, match="limit=0"):
        file_prompts(path, limit=0)
    with pytest.raises(TemperaError, match="offset=-1"):
        world_prompts(limit=1, offset=-1)
