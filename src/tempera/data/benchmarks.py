"""The field's prompt sets: MS-COCO captions, PartiPrompts, DrawBench, GenEval and ImageNet's
classes. Each is read from the hub, at a fixed commit if one is known, or from a local file.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from tempera.data.prompts import (
    Prompt,
    chosen,
    coco_captions,
    field_of,
    file_prompts,
    json_lines,
    text_of,
)
from tempera.data.sources import Broken, Entry, Source
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import regular_file, sha256_file
from tempera.runtime.hub import Repository

COCO = Repository("phiyodr/coco2017", "dataset", "036f3f8291db64d17faad9b09e59dd30bb65c4d7")
"""MS-COCO 2017's captions without images, 30 MB."""
PARTI = Repository("nateraw/parti-prompts", "dataset")
DRAWBENCH = Repository("Jialuo21/DrawBench", "dataset")


def coco_prompts(
    path: str | None = None,
    limit: int | None = 64,
    offset: int = 0,
    per_image: int = 1,
    seed: int = 0,
) -> list[Prompt]:
    """Captions of MS-COCO 2017's validation images; ids are those of the annotations.

    Args:
        path: captions_val2017.json; by default the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
        per_image: number of captions to take per image, the first ones; 0 takes all.
        seed: seed of the images' order.

    Raises:
        TemperaError: the captions are unavailable or unreadable.
    """
    images = _coco_images(path, "validation")
    prompts = [Prompt(number, text) for _, number, text in _shuffled(images, per_image, seed)]
    return chosen(prompts, limit, offset, path or COCO.id)


Captions = dict[str, list[tuple[str, str]]]
"""Image id -> the ids and texts of its captions, in order."""


def _coco_images(path: str | None, split: str) -> Captions:
    images: Captions = {}
    if path is None:
        for file in sorted(COCO.snapshot([f"data/{split}-*"]).glob(f"data/{split}-*.parquet")):
            for row in _table(file, ["image_id", "ids", "captions"]).to_pylist():
                images[str(row["image_id"])] = [
                    (str(number), text)
                    for number, caption in zip(row["ids"], row["captions"], strict=True)
                    if (text := text_of(caption))
                ]
    else:
        for one in coco_captions(Path(path))[0]:
            if one.id is None or one.image is None:
                raise TemperaError(f"{one.where} holds no id or image_id: repair or delete it.")
            if one.text:
                images.setdefault(one.image, []).append((one.id, one.text))
    return {image: sorted(found, key=lambda one: _order(one[0])) for image, found in images.items()}


def _order(name: str) -> tuple[int, int, str]:
    """Sorts numbers by value, before other ids."""
    number = name.isascii() and name.isdigit()
    return (0, int(name), name) if number else (1, 0, name)


def _table(file: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(regular_file(file), columns=columns)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise TemperaError(
            f"{file} cannot be read ({shortened(str(problem))}): download it again."
        ) from None


def _shuffled(images: Captions, per_image: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """(image id, caption id, text), image by image. The order depends only on the image ids and the
    seed.
    """
    order = sorted(images, key=_order)
    for place in np.random.default_rng(seed).permutation(len(order)):
        for number, text in images[order[place]][: per_image or None]:
            yield order[place], number, text


class Listed(Source):
    """A list of captions without images."""

    def __init__(self, prompts: Sequence[Prompt], described: dict[str, Any]) -> None:
        self.prompts, self.described = prompts, described

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def count(self) -> int | None:
        return len(self.prompts)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for prompt in islice(self.prompts, start, None):
            yield Entry(f"{self.described['kind']} {prompt.id}", prompt.id, prompt.text)


class CocoTraining(Listed):
    """`source=coco_captions`: captions of MS-COCO 2017's training images, from which the target
    generates its own images.

    Args:
        captions: captions_train2017.json; by default the hub's copy.
        per_image, seed: as for `coco_prompts`.

    Raises:
        TemperaError: the captions are unavailable or unreadable.
    """

    def __init__(self, captions: str | None = None, per_image: int = 1, seed: int = 0) -> None:
        images = _coco_images(captions, "train")
        place = captions or f"{COCO.id}@{COCO.revision}"
        described = {"kind": "coco_captions", "place": place, "per_image": per_image, "seed": seed}
        if captions is not None:
            described["sha256"] = sha256_file(Path(captions))
        prompts = [
            Prompt(f"{image}#{number}", text)
            for image, number, text in _shuffled(images, per_image, seed)
        ]
        super().__init__(prompts, described)


class PromptFile(Listed):
    """`source=prompts`: captions of a file that `tempera.data.prompts.file_prompts` reads."""

    def __init__(self, path: str) -> None:
        prompts = file_prompts(path)
        super().__init__(
            prompts, {"kind": "prompts", "path": path, "sha256": sha256_file(Path(path))}
        )


def parti_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0, seed: int | None = 0
) -> list[Prompt]:
    """PartiPrompts; ids are PartiPrompts-<line>.

    Args:
        path: PartiPrompts.tsv; by default the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
        seed: seed of their order; None keeps the file's order, which is by category.
    """
    file = path or str(PARTI.file("PartiPrompts.tsv"))
    prompts = file_prompts(file)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(prompts))
        prompts = [prompts[place] for place in order]
    return chosen(prompts, limit, offset, file)


def drawbench_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0
) -> list[Prompt]:
    """DrawBench in its own order; ids are drawbench-<number>.

    Args:
        path: a prompt file, or Parquet with a column prompts; by default the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
    """
    if path is not None and Path(path).suffix.lower() != ".parquet":
        return chosen(file_prompts(path), limit, offset, path)
    folder = DRAWBENCH.snapshot(["*.parquet"]) if path is None else None
    files = sorted(folder.rglob("*test*.parquet")) if folder else [Path(str(path))]
    rows = [row for file in files for row in _table(file).to_pylist()]
    prompts = []
    for number, row in enumerate(rows):
        if (text := field_of(row)) is None:
            raise TemperaError(
                f"{path or DRAWBENCH.id}, row {number} holds no prompt in a column prompts: give "
                "DrawBench as it was published."
            )
        prompts.append(Prompt(f"drawbench-{number:03d}", text))
    return chosen(prompts, limit, offset, path or DRAWBENCH.id)


def geneval_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0, per_prompt: int = 4
) -> list[Prompt]:
    """GenEval's prompts; ids are <prompt>-<repetition>, like its sample files: 00012-0003.

    Args:
        path: evaluation_metadata.jsonl.
        limit, offset: number of images to take, and to skip first.
        per_prompt: images per prompt.
    """
    if not path:
        raise TemperaError(
            "data=geneval needs GenEval's metadata: give path=evaluation_metadata.jsonl, which is "
            "in prompts/ of https://github.com/djghosh13/geneval."
        )
    prompts = [
        Prompt(f"{index:05d}-{repetition:04d}", record["prompt"])
        for index, record in enumerate(geneval_records(Path(path)))
        for repetition in range(per_prompt)
    ]
    return chosen(prompts, limit, offset, path)


def geneval_records(path: Path) -> list[dict[str, Any]]:
    """GenEval's metadata, one record per line: tag, include, exclude (optional) and prompt.

    Raises:
        TemperaError: the file is unreadable or broken; names file and line.
    """
    records = []
    for number, record in json_lines(path):
        text = field_of(record, "prompt") if isinstance(record, dict) else None
        if text is None:
            raise TemperaError(
                f"{path}:{number} is not a record of GenEval with a prompt: download it again."
            )
        records.append({**record, "prompt": text})
    return records


def imagenet_prompts(
    limit: int | None = 64, offset: int = 0, per_class: int = 50, seed: int = 0
) -> list[Prompt]:
    """ImageNet's 1,000 class numbers, each `per_class` times, in a seeded order; ids are
    class-<number>-<repetition>.
    """
    every = [(number, again) for again in range(per_class) for number in range(1000)]
    order = np.random.default_rng(seed).permutation(len(every))
    prompts = [
        Prompt(f"class-{number:04d}-{again:03d}", str(number))
        for number, again in (every[place] for place in order)
    ]
    return chosen(prompts, limit, offset, "ImageNet")


class ImageNetClasses(Listed):
    """`source=imagenet`: class numbers, from which the target generates its own images."""

    def __init__(self, per_class: int = 50, seed: int = 1) -> None:
        prompts = imagenet_prompts(None, 0, per_class, seed)
        super().__init__(prompts, {"kind": "imagenet", "per_class": per_class, "seed": seed})
