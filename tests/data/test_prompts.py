import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from tempera.data.benchmarks import coco_prompts
from tempera.data.prompts import Prompt, check_unique, described, file_prompts, one_prompt
from tempera.errors import TemperaError
from tempera.shapes.scenes import world_prompts


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def coco(*annotations: object) -> str:
    return json.dumps({"annotations": annotations})


def test_world_prompts_are_seeded_and_sliced() -> None:
    prompts = world_prompts(limit=5, offset=121)
    assert [prompt.id for prompt in prompts] == [f"world-{index:06d}" for index in range(121, 126)]
    assert prompts == world_prompts(limit=10, offset=120)[1:6]
    assert prompts != world_prompts(limit=5, offset=121, seed=2)


def test_one_prompt_is_one_text_and_has_an_id_of_it() -> None:
    first, second = one_prompt("a red ring")[0], one_prompt(" a blue ring ")[0]
    assert first.text == "a red ring" and second.text == "a blue ring" and first.id != second.id
    assert one_prompt("a red ring") == [first]
    assert described([first]) != described([Prompt(first.id, second.text)])
    assert one_prompt(7)[0].text == "7"  # a class
    given: list[Any] = [["a red ring", "a blue ring"], {"deeper": 1}, "  ", None, b"x", "\ud800"]
    for wrong in given:
        with pytest.raises(TemperaError) as problem:
            one_prompt(wrong)
        assert problem.value.option == "prompt"


TEXTS = ["a cat", "a “dog” asleep"]
FILES = {
    "txt": "a cat\n  a “dog”\tasleep \n\n",
    "csv": "id, Prompt \n1,a cat\n2,a “dog” asleep\n",
    "tsv": "Prompt\tNote\na cat\tx\na “dog” asleep\n",
    "jsonl": '{"prompt": "a cat"}\n["a “dog” asleep", "another"]\n',
}  # fmt: skip


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("kind", FILES)
def test_every_format_with_every_line_end_and_a_byte_order_mark(
    kind: str, mark: str, ends: str, tmp_path: Path
) -> None:
    text = ends.join(mark + line for line in FILES[kind].split("\n"))  # of joined files, too
    path = write(tmp_path / f"my prompts.{kind.upper()}", text)
    prompts = file_prompts(path)
    assert [prompt.text for prompt in prompts] == TEXTS
    assert prompts[-1].id == f"my-prompts-{3 if kind in ('csv', 'tsv') else 2:06d}"
    assert file_prompts(path, limit=5, offset=1) == prompts[1:]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_named(kind: str, encoding: str, tmp_path: Path) -> None:
    text = FILES[kind].replace("“", "é").replace("”", "é")
    with pytest.raises(TemperaError, match=rf"\.{kind}:\d+ is not UTF-8 text"):
        file_prompts(write(tmp_path / f"a.{kind}", text.encode(encoding)))


def test_quotes_of_a_tsv_are_those_of_pandas_or_part_of_raw_prompts(tmp_path: Path) -> None:
    texts = ['the words "go"', '"G I G" painted', "plain"]
    raw = "Prompt\tNote\n" + "".join(f"{text}\tn\n" for text in texts)
    quoted = pandas.DataFrame({"Prompt": texts, "Note": "n"}).to_csv(sep="\t", index=False)
    for number, content in enumerate((raw, quoted)):
        path = write(tmp_path / f"{number}.tsv", content)
        assert [prompt.text for prompt in file_prompts(path)] == texts


@pytest.mark.parametrize(
    "name",
    ["../../../escaped/evil", "a\\b", "..", "", ".hidden", "a\nb", "é" * 51, "\ud800"],
)  # fmt: skip
def test_an_id_is_a_file_name(name: str) -> None:
    with pytest.raises(TemperaError, match="a prompt's id"):
        Prompt(name, "a cat")


def test_a_repeated_prompt_may_have_a_longer_id() -> None:
    for name in (f"{'x' * 100}-3", f"{'x' * 100}-again-12"):
        assert Prompt(name, "a cat").id == name
    with pytest.raises(TemperaError, match="a prompt's id"):
        Prompt("x" * 90 + "-" + "9" * 200, "a cat")


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A"), ("ß", "SS"), ("\xe9", "e\u0301")])
def test_ids_differ_on_any_file_system(names: tuple[str, str]) -> None:
    with pytest.raises(TemperaError, match=f"ids {names[0]} and {names[1]}"):
        check_unique([Prompt(name, "x") for name in names])


def test_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "0.PARQUET")
    pandas.DataFrame({"Prompts": ["a", "b"]}).to_parquet(path)
    assert file_prompts(path) == [Prompt("0-000001", "a"), Prompt("0-000002", "b")]
    wrong: list[list[Any]] = [
        ["a", None],
        ["a", float("nan")],
        [1, 2],
        [b"caf\xe9", b"y"],
        [{"en": "x"}],
    ]
    for texts in wrong:
        pandas.DataFrame({"Prompts": texts}).to_parquet(path)
        with pytest.raises(TemperaError, match="0.PARQUET:[12] "):
            file_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", r"a\.txt contains no prompts"),
        ("a.txt", "one\n\nthree\n", r"a\.txt:2 "),
        ("a.txt", "one\ntwo\x00\n", r"a\.txt:2 "),
        ("a.tsv", "words\tCategory\nx\ty\n", r"a\.tsv:1 "),
        ("a.tsv", "Prompt\tCategory\nx\ty\nx\ty\tz\n", r"a\.tsv:3 "),
        ("a.csv", "Prompt,Category\n ,y\n", r"a\.csv:2 "),
        ("a.csv", 'Prompt,Category\n"x,y\nx,y\n', r"a\.csv:3 is broken .unexpected end"),
        ("a.csv", 'Prompt,Category\n"x" y,y\n', r"a\.csv:2 is broken"),
        ("a.jsonl", '"x"\n{"prompt": null}\n', r"a\.jsonl:2 "),
        ("a.jsonl", '"x"\n{"prompt": 7}\n', r"a\.jsonl:2 "),
        ("a.jsonl", '"x"\n{oops\n', r"a\.jsonl:2 "),
        ("a.jsonl", '"x"\n"\\ud800"\n', r"a\.jsonl:2 "),
        ("a.md", "x", r"a\.md is not a prompt file"),
        ("a.json", "[1]", "contains no JSON object"),
        ("a.json", "{}", "is not an MS-COCO captions file"),
        ("a.json", coco({"id": 1, "image_id": 1, "caption": "x"}, 3), "annotation 2"),
        ("a.json", coco({"id": True, "image_id": 1, "caption": "x"}), "annotation 1"),
        ("a.json", coco({"id": 1, "image_id": 1, "caption": ""}), "contains no prompts"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(TemperaError, match=sentence) as problem:
        coco_prompts(path, 1, 0, 1, 0) if name == "a.json" else file_prompts(path)
    assert "\n" not in str(problem.value)


def test_missing_files_and_bad_slices(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    path = write(tmp_path / "a.txt", "one\ntwo\n")
    for given, told in (
        ((str(tmp_path / "nowhere.txt"),), "there is no file"),
        ((str(tmp_path / "folder.txt"),), "folder.txt is a directory"),
        ((None,), "give data.path=FILE"),
        ((path, None, 2), "contains only 2 prompts: give a smaller offset"),
    ):  # fmt: skip
        with pytest.raises(TemperaError, match=told):
            file_prompts(*given)  # type: ignore[arg-type]
