"""The field's prompt sets: MS-COCO captions, PartiPrompts, DrawBench, HPSv2, GenEval, GenEval 2,
DPG-Bench and ImageNet's classes. Each is read from the hub or from GitHub, at a fixed commit, or
from a local copy.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from tempera.data.entries import Entry, Listed
from tempera.data.prompts import CAPTION_NAMES, Prompt, chosen, file_prompts, text_of
from tempera.errors import TemperaError
from tempera.runtime.files import read_json, read_text, sha256_file
from tempera.runtime.github import Pinned
from tempera.runtime.hub import Repository
from tempera.runtime.row_store import read_table

COCO = Repository("phiyodr/coco2017", "dataset", "036f3f8291db64d17faad9b09e59dd30bb65c4d7")
"""MS-COCO 2017's captions without images, 30 MB."""
COCO2014 = Repository(
    "lmms-lab/COCO-Caption", "dataset", "02151fb3da01a06268e022a9d58084fdbd8aa8e3"
)
"""MS-COCO 2014's 40,504 validation images and their captions, 6.6 GB."""
VAL2014 = "data/val-*.parquet"
PARTI = Pinned(
    "google-research/parti",
    "5a657978134374ce28973948331b319adef164bd",
    "PartiPrompts.tsv",
    "f96e7125a02e48976736179a667b080ba81539fb",
)
DRAWBENCH = Repository("Jialuo21/DrawBench", "dataset", "870c4ef7e6c67eafa7c6e26ba79b7c0d52c9cb16")
"""The 200 prompts as Parquet; shunk031/DrawBench is a script, which `datasets` runs no more."""
HPSV2 = Repository("zhwang/HPDv2", "dataset", "260dbde75ab1c68e86d32a8e7739f1b49b100578")
"""HPSv2's benchmark, `benchmark/<style>.json`, at the commit that added it. The package hpsv2 reads
the newest one; the hub's list of files shows no later change to these.
"""
STYLES = ("anime", "concept-art", "paintings", "photo")
GENEVAL = Pinned(
    "djghosh13/geneval",
    "af4902f24d3ca90ebbb446dd9891a59e0f82725f",
    "prompts/evaluation_metadata.jsonl",
    "efc21c7e639cd45554a1e44fac87157211f16d51",
)
GENEVAL2 = Pinned(
    "facebookresearch/GenEval2",
    "a6e82d2289e8d418f27f0adee77908b07060eea3",
    "geneval2_data.jsonl",
    "823f48414446157fe252f92e3c60c803c33c303c",
)
DPG = Pinned(
    "TencentQQGYLab/ELLA",
    "3c228f1dc6c4d3cad0a47493816151a419f14db3",
    "dpg_bench/prompts",
    "ac3ba27bf2e1c3ec189fe2e00681f75f4b78d683",
)
"""DPG-Bench: a text file for each prompt."""

Captions = dict[str, list[tuple[str, str]]]
"""Image id -> the ids and texts of its captions, in order."""
T = TypeVar("T")


def coco_prompts(
    path: str | None,
    limit: PositiveInt | None,
    offset: NonNegativeInt,
    per_image: NonNegativeInt,
    seed: NonNegativeInt,
    split: Literal["validation", "train", "val2014"] = "validation",
) -> list[Prompt]:
    """Captions of MS-COCO's images; ids are those of the annotations, or for the hub's copy of
    val2014, which lacks them, <image>-<number of the caption>.

    Args:
        path: captions_val2017.json, captions_train2017.json or captions_val2014.json; None takes
            the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
        per_image: number of captions to take per image, the first ones; 0 takes all.
        seed: seed of the images' order.
        split: which images, if there is no path: those of 2017, or `val2014`.

    Raises:
        TemperaError: the captions are unavailable or unreadable.
    """
    captions = _shuffled(_coco_images(path, split), per_image, seed)
    prompts = [Prompt(name, text) for _, name, text in captions]
    source = path or (COCO2014 if split == "val2014" else COCO).id
    return chosen(prompts, limit, offset, source)


def coco_training(path: str | None, per_image: NonNegativeInt, seed: NonNegativeInt) -> Listed:
    """`source=coco_captions`: captions of MS-COCO 2017's training images.

    Args:
        path: captions_train2017.json; None takes the hub's copy.
        per_image, seed: as for `coco_prompts`.

    Raises:
        TemperaError: the captions are unavailable or unreadable.
    """
    captions = _shuffled(_coco_images(path, "train"), per_image, seed)
    prompts = [Prompt(f"{image}#{name}", text) for image, name, text in captions]
    source = path or f"{COCO.id}@{COCO.revision}"
    return _listed(prompts, "coco", path, source=source, per_image=per_image, seed=seed)


def _coco_images(path: str | None, split: str) -> Captions:
    images: Captions = {}
    if path is None and split == "val2014":
        images = _val2014()
    elif path is None:
        for file in sorted(COCO.snapshot([f"data/{split}-*"]).glob(f"data/{split}-*.parquet")):
            for row in read_table(file):
                texts = map(text_of, row["captions"])
                captions = zip(row["ids"], texts, strict=True)
                images[str(row["image_id"])] = [
                    (str(name), text) for name, text in captions if text
                ]
    else:
        for name, image, text in _annotations(Path(path)):
            if text:
                images.setdefault(image, []).append((name, text))
    for captions_of_image in images.values():
        captions_of_image.sort(key=lambda caption: _order(caption[0]))
    return images


def _val2014() -> Captions:
    """The captions of the hub's copy, whose `question_id` is COCO_val2014_<image id>.jpg."""
    import pyarrow.parquet as pq

    images: Captions = {}
    for file in sorted(COCO2014.snapshot([VAL2014]).glob(VAL2014)):
        for row in pq.read_table(file, columns=["question_id", "answer"]).to_pylist():
            image = row["question_id"].rpartition("_")[2].partition(".")[0].lstrip("0")
            texts = enumerate(map(text_of, row["answer"]))
            images[image] = [(f"{image}-{number}", text) for number, text in texts if text]
    return images


def _annotations(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """Id, image id and caption of each annotation in an MS-COCO captions file."""
    annotations = read_json(path).get("annotations")
    if not isinstance(annotations, list):
        raise TemperaError(
            f"{path} is not an MS-COCO captions file: give one with a list of annotations."
        )
    for number, annotation in enumerate(annotations, start=1):
        fields = annotation if isinstance(annotation, dict) else {}
        ids = [fields.get("id"), fields.get("image_id")]
        if not all(type(name) in (int, str) for name in ids):
            raise TemperaError(
                f"annotation {number} of {path} has no id or image_id: repair or delete it."
            )
        yield str(ids[0]), str(ids[1]), text_of(fields.get("caption"))


def _order(name: str) -> tuple[int, int, str]:
    """Sorts numbers by value, before other ids."""
    number = name.isascii() and name.isdigit()
    return (0, len(name), name) if number else (1, 0, name)


def _shuffled(images: Captions, per_image: int, seed: int) -> list[tuple[str, str, str]]:
    """(image id, caption id, text), image by image. The order depends only on the image ids and the
    seed.
    """
    order = _permuted(sorted(images, key=_order), seed)
    shuffled = []
    for image in order:
        for name, text in images[image][: per_image or None]:
            shuffled.append((image, name, text))
    return shuffled


def _permuted(items: Sequence[T], seed: int) -> list[T]:
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def _listed(prompts: Sequence[Prompt], kind: str, file: str | None, **described: Any) -> Listed:
    """A source of captions without images."""
    entries = [Entry(f"{kind} {prompt.id}", prompt.id, prompt.text) for prompt in prompts]
    digest = {"sha256": sha256_file(Path(file))} if file else {}
    return Listed(entries, {"kind": kind, **described, **digest})


def prompt_file(path: str) -> Listed:
    """`source=prompts`: captions of a file that `tempera.data.prompts.file_prompts` reads."""
    prompts = file_prompts(path, names=CAPTION_NAMES)
    return _listed(prompts, "prompts", path, path=path)


def parti_prompts(
    path: str | None,
    limit: PositiveInt | None,
    offset: NonNegativeInt,
    seed: NonNegativeInt | None,
) -> list[Prompt]:
    """PartiPrompts; ids are PartiPrompts-<line>.

    Args:
        path: PartiPrompts.tsv; None takes the published one.
        limit, offset: number of prompts to take, and to skip first.
        seed: seed of their order; None keeps the file's order, which is by category.
    """
    file = path or str(PARTI.local())
    prompts = file_prompts(file)
    return chosen(prompts if seed is None else _permuted(prompts, seed), limit, offset, file)


def drawbench_prompts(
    path: str | None, limit: PositiveInt | None, offset: NonNegativeInt
) -> list[Prompt]:
    """DrawBench in its own order; ids are drawbench-<number>.

    Args:
        path: a prompt file; None takes the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
    """
    if path is not None:
        return file_prompts(path, limit, offset)
    files = sorted(DRAWBENCH.snapshot(["*.parquet"]).rglob("*test*.parquet"))
    prompts = [prompt for file in files for prompt in file_prompts(str(file))]
    named = [
        Prompt(f"drawbench-{number:03d}", prompt.text) for number, prompt in enumerate(prompts)
    ]
    return chosen(named, limit, offset, DRAWBENCH.id)


def geneval_prompts(
    path: str | None,
    limit: PositiveInt | None,
    offset: NonNegativeInt,
    per_prompt: PositiveInt,
) -> list[Prompt]:
    """GenEval's prompts; ids are <prompt>-<repetition>, like its sample files: 00012-0003.

    Args:
        path: evaluation_metadata.jsonl; None downloads it from djghosh13/geneval.
        limit, offset: number of images to take, and to skip first.
        per_prompt: images per prompt.

    Raises:
        TemperaError: here and below, the prompts are unavailable or unreadable.
    """
    file = path or str(GENEVAL.local())
    named = enumerate(file_prompts(file))
    texts = [(f"{index:05d}", prompt.text) for index, prompt in named]
    return chosen(_repeated(texts, per_prompt), limit, offset, file)


def geneval2_prompts(
    path: str | None, limit: PositiveInt | None, offset: NonNegativeInt
) -> list[Prompt]:
    """GenEval 2's 800 prompts; ids are geneval2_data-<line>.

    Args:
        path: geneval2_data.jsonl; None downloads it from facebookresearch/GenEval2.
        limit, offset: number of prompts to take, and to skip first.
    """
    return file_prompts(path or str(GENEVAL2.local()), limit, offset)


def dpg_prompts(
    path: str | None,
    limit: PositiveInt | None,
    offset: NonNegativeInt,
    per_prompt: PositiveInt,
) -> list[Prompt]:
    """DPG-Bench's 1,065 prompts in the order of their names; ids are <name>-<repetition>, where the
    benchmark's scorer knows a prompt by its name: partiprompts199-0003.

    Args:
        path: dpg_bench/prompts of a clone of TencentQQGYLab/ELLA; None downloads it.
        limit, offset: number of images to take, and to skip first.
        per_prompt: images per prompt.

    Raises:
        TemperaError: a file has no prompt, or the prompts cannot be downloaded.
    """
    folder = Path(path) if path else DPG.local()
    texts = []
    for file in sorted(folder.glob("*.txt")):
        if (text := text_of(read_text(file))) is None:
            raise TemperaError(f"{file} contains no prompt: repair or delete it.", option="path")
        texts.append((file.stem, text))
    return chosen(_repeated(texts, per_prompt), limit, offset, str(folder))


def _repeated(texts: Sequence[tuple[str, str]], times: int) -> list[Prompt]:
    """Prompts of named texts, each so many times, as ids <name>-<repetition>."""
    prompts = []
    for name, text in texts:
        prompts += [Prompt(f"{name}-{number:04d}", text) for number in range(times)]
    return prompts


def hpsv2_prompts(
    path: str | None, limit: PositiveInt | None, offset: NonNegativeInt, styles: Sequence[str]
) -> list[Prompt]:
    """HPSv2's prompts, 800 in each of four styles; ids are <style>-<number>, as its
    scorer names files: photo/00012.jpg is photo-00012.

    Args:
        path: a directory with <style>.json; None takes the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
        styles: among anime, concept-art, paintings and photo.

    Raises:
        TemperaError: there is no such style, or a file is not a JSON list of prompts.
    """
    for style in styles:
        if style not in STYLES:
            raise TemperaError(
                f"HPSv2 has no style '{style}': its styles are {', '.join(STYLES)}.",
                option="data.styles",
            )
    prompts = []
    for style in styles:
        for number, text in enumerate(hpsv2_texts(path, style)):
            prompts.append(Prompt(f"{style}-{number:05d}", text))
    return chosen(prompts, limit, offset, path or HPSV2.id)


def hpsv2_texts(path: str | None, style: str) -> list[str]:
    """The prompts of one of HPSv2's styles, in order.

    Raises:
        TemperaError: the file is not a JSON list of prompts.
    """
    file = Path(path, f"{style}.json") if path else HPSV2.file(f"benchmark/{style}.json")
    try:
        texts = json.loads(read_text(file))
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(map(text_of, texts)):
        raise TemperaError(
            f"{file} is not a JSON list of prompts: download it again.", option="path"
        )
    return [text_of(text) or "" for text in texts]


PerClass = Annotated[int, Field(ge=1, le=10**4)]
"""How often a class comes."""


def imagenet_prompts(
    limit: PositiveInt | None,
    offset: NonNegativeInt,
    per_class: PerClass,
    seed: NonNegativeInt,
) -> list[Prompt]:
    """ImageNet's 1,000 class numbers, each `per_class` times, in a seeded order; ids are
    class-<number>-<repetition>.
    """
    repeated = [(number, repetition) for repetition in range(per_class) for number in range(1000)]
    prompts = [
        Prompt(f"class-{number:04d}-{repetition:03d}", str(number))
        for number, repetition in _permuted(repeated, seed)
    ]
    return chosen(prompts, limit, offset, "ImageNet")


def imagenet_classes(per_class: PerClass, seed: NonNegativeInt) -> Listed:
    """`source=imagenet`: class numbers, from which the target generates its own images."""
    prompts = imagenet_prompts(None, 0, per_class, seed)
    return _listed(prompts, "imagenet", None, per_class=per_class, seed=seed)
