"""`layout=`: pictures as the scorers of benchmarks expect them, by the public code of each at the
commit that is named.

Ids of repeated prompts are <name>-<repetition>, as `tempera.data.benchmarks` makes them and
`tempera.data.gallery` reads them.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from typing_extensions import override

from tempera.data.benchmarks import DPG, GENEVAL, GENEVAL2, STYLES, hpsv2_texts
from tempera.data.entries import METADATA
from tempera.data.folder import NAME
from tempera.data.prompts import Prompt, field_of, rows_of, text_of
from tempera.errors import TemperaError
from tempera.runtime.files import read_text
from tempera.runtime.github import Pinned

Picture = NDArray[np.uint8]
Pictures = Callable[[Prompt], Picture]
"""The picture of a prompt, uint8 [3, h, w]."""
REPEATED = re.compile(r"(.+)-(\d+)")


class Layout(Protocol):
    """A folder of pictures, as a scorer reads it."""

    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        """Write the pictures of the prompts into an empty folder.

        Raises:
            TemperaError: the prompts are not the benchmark's, or the scorer would not take the
                pictures as they are.
        """

    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        """What scores the folder, to be run in a clone of the scorer."""


@dataclass(frozen=True)
class Flat(Layout):
    """`layout=folder`: <id>.png, with the captions in metadata.jsonl as of Hugging Face's
    imagefolder.
    """

    @override
    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        rows = [{NAME: f"{prompt.id}.png", "text": prompt.text} for prompt in prompts]
        for prompt in prompts:
            _save(picture(prompt), folder / f"{prompt.id}.png")
        _write_lines(folder / METADATA[0], rows)

    @override
    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        return []


@dataclass(frozen=True)
class GenEval(Layout):
    """`layout=geneval`: <prompt>/metadata.jsonl and <prompt>/samples/<repetition>.png, as
    evaluation/evaluate_images.py of djghosh13/geneval (af4902f) reads them.

    Args:
        path: evaluation_metadata.jsonl; None downloads it.
    """

    path: str | None

    @override
    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        file = _given_or(GENEVAL, self.path)
        rows = [row for _, row in rows_of(file)]
        for (name, number), prompt in self.by_sample(prompts).items():
            row = rows[int(name)] if int(name) < len(rows) else None
            _check_text(prompt, field_of(row), file)
            (folder / name / "samples").mkdir(parents=True, exist_ok=True)
            _write_lines(folder / name / METADATA[0], [row])
            _save(picture(prompt), folder / name / "samples" / f"{number:04d}.png")

    @override
    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        where, results = quote(str(folder)), quote(f"{folder}-results.jsonl")
        return [
            f"python evaluation/evaluate_images.py {where} --outfile {results} --model-path MODELS"
        ]

    @staticmethod
    def by_sample(prompts: Iterable[Prompt]) -> dict[tuple[str, int], Prompt]:
        """The prompts by the names of their folder and the numbers of their samples."""
        samples = {}
        for (name, number), prompt in by_name(prompts).items():
            if not (name.isascii() and name.isdigit()):
                raise _foreign(prompt, "one of GenEval, such as 00012-0003")
            samples[f"{int(name):05d}", number] = prompt
        return samples


@dataclass(frozen=True)
class Dpg(Layout):
    """`layout=dpg`: <name>.png with a prompt's four pictures as 2 × 2, or its only one, as
    dpg_bench/compute_dpg_bench.py of TencentQQGYLab/ELLA (3c228f1) cuts them. It crops squares of
    one resolution, without looking at the size of the file, and passes over files that fail.

    Args:
        path: dpg_bench/prompts; None downloads it.
    """

    path: str | None

    @override
    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        """See `Layout.write`; the pictures are squares of one size."""
        texts = _given_or(DPG, self.path)
        edge = self._edge(prompts, picture)
        for name, group in self.groups(prompts).items():
            file = texts / f"{name}.txt"
            _check_text(group[0], text_of(read_text(file)) if file.is_file() else None, texts)
            for prompt in group[1:]:
                _check_text(prompt, group[0].text, texts)
            rows = 1 if len(group) == 1 else 2
            grid = np.zeros((3, rows * edge, rows * edge), np.uint8)
            for index, prompt in enumerate(group):
                one = picture(prompt)
                if one.shape != (3, edge, edge):
                    raise TemperaError(
                        f"the picture of {prompt.id} has {one.shape[2]} × {one.shape[1]} pixels, "
                        f"the first one {edge} × {edge}, but DPG-Bench's scorer cuts squares of "
                        "one size: export square pictures of one size."
                    )
                top, left = (edge * number for number in divmod(index, 2))
                grid[:, top : top + edge, left : left + edge] = one
            _save(grid, folder / f"{name}.png")

    @override
    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        edge = self._edge(prompts, picture)
        number = len(next(iter(self.groups(prompts).values())))
        return [f"PIC_NUM={number} bash dpg_bench/dist_eval.sh {quote(str(folder))} {edge}"]

    @staticmethod
    def _edge(prompts: Sequence[Prompt], picture: Pictures) -> int:
        """Pixels of the first picture's edge."""
        edge: int = picture(prompts[0]).shape[-1]
        return edge

    @staticmethod
    def groups(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
        """Each name's prompts, in the order of their repetitions: all one, or all four.

        Raises:
            TemperaError: there are more or fewer, or the scorer would not find a name.
        """
        groups: dict[str, list[Prompt]] = {}
        for (name, _), prompt in sorted(by_name(prompts).items()):
            if "." in name:  # the scorer reads the name of a file up to its first dot
                raise _foreign(prompt, "one of DPG-Bench, which contain no dots")
            groups.setdefault(name, []).append(prompt)
        wanted = max(map(len, groups.values()), default=0)
        for name, group in groups.items():
            if len(group) != wanted or wanted not in (1, 4):
                raise TemperaError(
                    f"{name} has {len(group)} pictures, but DPG-Bench takes four per prompt, or "
                    "one: evaluate with a data.limit= that is a multiple of four, or with "
                    "data.per_prompt=1."
                )
        return groups


@dataclass(frozen=True)
class GenEval2(Layout):
    """`layout=geneval2`: images/, image_paths.json from prompts to pictures, and
    benchmark_data.jsonl with the lines of the run's prompts, as evaluation.py of
    facebookresearch/GenEval2 (a6e82d2) reads them. Its scores come in the order of that file, which
    is the run's.

    Args:
        path: geneval2_data.jsonl; None downloads it.
    """

    path: str | None

    @override
    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        """See `Layout.write`; each prompt has one picture."""
        file = _given_or(GENEVAL2, self.path)
        rows = [row for _, row in rows_of(file) if isinstance(row, dict) and "prompt" in row]
        by_text = {text_of(row["prompt"]): row for row in rows}
        paths: dict[str, str] = {}
        for prompt in prompts:
            row = by_text.get(prompt.text, {})
            _check_text(prompt, text_of(row.get("prompt")), file)
            if row["prompt"] in paths:
                raise TemperaError(
                    f"{prompt.id} is another picture of '{prompt.text}', but GenEval 2 takes one "
                    "per prompt: export a run with one picture per prompt."
                )
            path = folder / "images" / f"{prompt.id}.png"
            path.parent.mkdir(exist_ok=True)
            _save(picture(prompt), path)
            paths[row["prompt"]] = f"images/{prompt.id}.png"
        _write_lines(folder / "benchmark_data.jsonl", [by_text[one.text] for one in prompts])
        content = json.dumps(paths, ensure_ascii=False, indent=1)
        (folder / "image_paths.json").write_text(content + "\n", encoding="utf-8")

    @override
    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        return [
            f"cd {quote(str(folder))}",
            "python CLONE/evaluation.py --benchmark_data benchmark_data.jsonl --method soft_tifa_gm"
            " --image_filepath_data image_paths.json --output_file score_lists.json",
        ]


@dataclass(frozen=True)
class HpsV2(Layout):
    """`layout=hpsv2`: <style>/<number>.jpg, as `hpsv2.evaluate` of tgxs002/HPSv2 (866735e) reads
    them, in the JPEG that its example writes. A picture that it lacks is left out of the mean.

    Args:
        path: a directory with <style>.json; None takes the hub's copy.
    """

    path: str | None

    @override
    def write(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> None:
        texts: dict[str, list[str]] = {}
        for (style, number), prompt in by_name(prompts).items():
            if style not in STYLES:
                raise _foreign(prompt, "one of HPSv2, such as photo-00012")
            if style not in texts:
                texts[style] = hpsv2_texts(self.path, style)
                (folder / style).mkdir()
            own = texts[style][number] if number < len(texts[style]) else None
            _check_text(prompt, own, self.path or "HPSv2")
            _save(picture(prompt), folder / style / f"{number:05d}.jpg")

    @override
    def commands(self, prompts: Sequence[Prompt], picture: Pictures, folder: Path) -> list[str]:
        call = f"import hpsv2; hpsv2.evaluate({str(folder)!r}, hps_version='v2.1')"
        return [f"python -c {quote(call)}"]


def by_name(prompts: Iterable[Prompt]) -> dict[tuple[str, int], Prompt]:
    """Prompts by the names and numbers that their ids consist of, <name>-<number>.

    Raises:
        TemperaError: an id has another form, or two are one.
    """
    found: dict[tuple[str, int], Prompt] = {}
    for prompt in prompts:
        parts = REPEATED.fullmatch(prompt.id)
        if parts is None:
            raise _foreign(prompt, "of the form <name>-<number>")
        key = parts[1], int(parts[2])
        if key in found:
            raise TemperaError(
                f"{found[key].id} and {prompt.id} would have the same file name: rename one of "
                "them."
            )
        found[key] = prompt
    return found


def _foreign(prompt: Prompt, wanted: str) -> TemperaError:
    return TemperaError(
        f"the id '{prompt.id}' is not {wanted}: export a run of that benchmark's prompts (data=), "
        "or choose layout=folder."
    )


def _check_text(prompt: Prompt, text: str | None, file: Path | str) -> None:
    """Raise TemperaError unless a prompt has the benchmark's text."""
    if text != prompt.text:
        what = "has no such prompt" if text is None else f"has '{text}' there"
        raise TemperaError(
            f"the picture {prompt.id} shows '{prompt.text}', but {file} {what}: export a run of "
            "the benchmark's own prompts, or give its file with layout.path=.",
            option="layout.path",
        )


def _given_or(published: Pinned, path: str | None) -> Path:
    """The user's copy of a benchmark's prompts, or the published one."""
    return Path(path) if path else replace(published, option="layout.path").local()


def _save(picture: Picture, path: Path) -> None:
    Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(path)


def _write_lines(path: Path, rows: Iterable[Any]) -> None:
    """An object a line, as JSON."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
