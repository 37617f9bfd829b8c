"""The field's prompt sets: MS-COCO captions, PartiPrompts, DrawBench, GenEval and ImageNet's
classes. Each is read from the hub, at a fixed commit if one is known, or from a local file.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from typing_extensions import override

from tempera.data.prompts import Prompt, check_slice, file_prompts
from tempera.data.sources import Broken, Entry, Source
from tempera.errors import TemperaError, misfit
from tempera.runtime.files import sha256_file
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
    check_slice(limit, offset)
    images = _coco_images(path, "validation")
    return _slice(
        [Prompt(str(number), text) for _, number, text in _chosen(images, per_image, seed)],
        limit,
        offset,
        path or COCO.id,
    )


Captions = dict[int, list[tuple[int, str]]]
"""Image id -> the ids and texts of its captions, in order."""


def _coco_images(path: str | None, split: str) -> Captions:
    if path is not None:
        return _coco_file(Path(path))
    images: Captions = {}
    for file in sorted(COCO.snapshot([f"data/{split}-*"]).glob(f"data/{split}-*.parquet")):
        for row in pq.read_table(file, columns=["image_id", "ids", "captions"]).to_pylist():
            images[row["image_id"]] = sorted(zip(row["ids"], row["captions"], strict=True))
    return images


def _coco_file(path: Path) -> Captions:
    try:
        annotations = json.loads(path.read_text(encoding="utf-8"))["annotations"]
        images: Captions = {}
        for row in annotations:
            images.setdefault(row["image_id"], []).append((row["id"], str(row["caption"])))
    except OSError as problem:
        raise TemperaError(
            f"{path} cannot be read ({problem.strerror}): give the path of an MS-COCO captions "
            "file, such as captions_val2017.json."
        ) from None
    except (ValueError, KeyError, TypeError) as problem:
        raise TemperaError(
            f"{path} is not an MS-COCO captions file ({misfit(problem)}): give one with "
            "annotations, each with id, image_id and caption."
        ) from None
    return {image: sorted(found) for image, found in images.items()}


def _chosen(images: Captions, per_image: int, seed: int) -> Iterator[tuple[int, int, str]]:
    """(image id, caption id, text) of the non-empty captions, image by image. The order depends
    only on the image ids and the seed.
    """
    order = sorted(images)
    for place in np.random.default_rng(seed).permutation(len(order)):
        found = [
            (order[place], number, text)
            for number, caption in images[order[place]]
            if (text := " ".join(caption.split()))
        ]
        yield from found[: per_image or None]


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
            for image, number, text in _chosen(images, per_image, seed)
        ]
        super().__init__(prompts, described)


def parti_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0, seed: int | None = 0
) -> list[Prompt]:
    """PartiPrompts; ids are PartiPrompts-<line>.

    Args:
        path: PartiPrompts.tsv; by default the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
        seed: seed of their order; None keeps the file's order, which is by category.
    """
    check_slice(limit, offset)
    file = path or str(PARTI.file("PartiPrompts.tsv"))
    prompts = file_prompts(file)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(prompts))
        prompts = [prompts[place] for place in order]
    return _slice(prompts, limit, offset, file)


def drawbench_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0
) -> list[Prompt]:
    """DrawBench in its own order; ids are drawbench-<number>.

    Args:
        path: .txt, .tsv with a Prompt column, or .parquet with a column prompts or prompt; by
            default the hub's copy.
        limit, offset: number of prompts to take, and to skip first.
    """
    check_slice(limit, offset)
    if path is not None and Path(path).suffix != ".parquet":
        return _slice(file_prompts(path), limit, offset, path)
    folder = DRAWBENCH.snapshot(["*.parquet"]) if path is None else None
    files = sorted(folder.rglob("*test*.parquet")) if folder else [Path(str(path))]
    texts: list[str] = []
    for file in files:
        try:
            table = pq.read_table(file)
        except (OSError, ValueError) as problem:
            raise TemperaError(f"{file} cannot be read ({problem}): download it again.") from None
        column = next((name for name in ("prompts", "prompt") if name in table.column_names), None)
        if column is None:
            raise TemperaError(
                f"{file} has no column prompts (it has {', '.join(table.column_names)}): give "
                "DrawBench as it was published."
            )
        texts += [" ".join(str(text).split()) for text in table[column].to_pylist()]
    prompts = [Prompt(f"drawbench-{number:03d}", text) for number, text in enumerate(texts)]
    return _slice(prompts, limit, offset, path or DRAWBENCH.id)


def geneval_prompts(
    path: str | None = None, limit: int | None = 64, offset: int = 0, per_prompt: int = 4
) -> list[Prompt]:
    """GenEval's prompts; ids are <prompt>-<repetition>, like its sample files: 00012-0003.

    Args:
        path: evaluation_metadata.jsonl.
        limit, offset: number of images to take, and to skip first.
        per_prompt: images per prompt.
    """
    check_slice(limit, offset)
    if not path:
        raise TemperaError(
            "data=geneval needs GenEval's metadata: give path=evaluation_metadata.jsonl, which is "
            "in prompts/ of https://github.com/djghosh13/geneval."
        )
    prompts = []
    for index, record in enumerate(geneval_records(Path(path))):
        prompts += [
            Prompt(f"{index:05d}-{repetition:04d}", record["prompt"])
            for repetition in range(per_prompt)
        ]
    return _slice(prompts, limit, offset, path)


def geneval_records(path: Path) -> list[dict[str, Any]]:
    """GenEval's metadata, one record per line: tag, include, exclude (optional) and prompt.

    Raises:
        TemperaError: the file is unreadable or broken; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise TemperaError(
            f"{path} cannot be read ({problem.strerror}): check the path of GenEval's metadata."
        ) from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append({**record, "prompt": " ".join(record["prompt"].split())})
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise TemperaError(
                f"{path}:{number} is not a record of GenEval ({misfit(problem)}): download the "
                "file again."
            ) from None
    return records


def imagenet_prompts(
    limit: int | None = 64, offset: int = 0, per_class: int = 50, seed: int = 0
) -> list[Prompt]:
    """ImageNet's 1,000 class numbers, each `per_class` times, in a seeded order; ids are
    class-<number>-<repetition>.
    """
    check_slice(limit, offset)
    every = [(number, again) for again in range(per_class) for number in range(1000)]
    order = np.random.default_rng(seed).permutation(len(every))
    prompts = [
        Prompt(f"class-{number:04d}-{again:03d}", str(number))
        for number, again in (every[place] for place in order)
    ]
    return _slice(prompts, limit, offset, "ImageNet")


class ImageNetClasses(Listed):
    """`source=imagenet`: class numbers, from which the target generates its own images."""

    def __init__(self, per_class: int = 50, seed: int = 1) -> None:
        prompts = imagenet_prompts(None, 0, per_class, seed)
        super().__init__(prompts, {"kind": "imagenet", "per_class": per_class, "seed": seed})


def _slice(prompts: list[Prompt], limit: int | None, offset: int, place: str) -> list[Prompt]:
    if offset >= len(prompts):
        raise TemperaError(
            f"{place} holds {len(prompts)} prompts, so offset={offset} leaves none: choose a "
            "smaller offset."
        )
    return prompts[offset:] if limit is None else prompts[offset : offset + limit]
