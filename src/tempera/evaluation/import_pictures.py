"""Make a run directory of pictures that other code made, so that they are scored and reported as
runs are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt
from tqdm import tqdm

from tempera.data.gallery import Shown, gallery
from tempera.data.prompts import described
from tempera.errors import TemperaError
from tempera.evaluation.run_directory import RECORDS, claim, made_by, write_prompts
from tempera.runtime.files import directories_with, sha256_file
from tempera.runtime.image_files import is_whole, picture_path, write_picture
from tempera.runtime.row_store import Row, Store

COLUMNS = {"text": None, "file": None, "sha256": None}
BATCH = 64
"""Pictures that are recorded together."""


@dataclass(frozen=True)
class Folders:
    """How folders of pictures become runs: options of that name in conf/score.yaml.

    Attributes:
        outputs: the runs are `outputs`/scored/<name of the folder>.
        captions: where the captions are, if not among the pictures.
        grid: pictures in each row and column of a file.
        drawn_by: the model that drew them, if that is known.
        output: the run directory, instead.
    """

    outputs: str
    captions: str | None
    grid: PositiveInt
    drawn_by: str | None
    output: str | None = None

    def run_of(self, folder: Path) -> Path:
        """The run directory that is made of a folder of pictures.

        Raises:
            TemperaError: see `gallery` and `import_pictures`.
        """
        directory = Path(self.output or Path(self.outputs, "scored", folder.resolve().name))
        captions = None if self.captions is None else Path(self.captions)
        shown = gallery(folder, captions, self.grid)
        import_pictures(folder, shown, directory, self.drawn_by)
        return directory


def runs_at(directory: Path) -> list[Path]:
    """The run directories at or below a place; none for a folder of pictures.

    Raises:
        TemperaError: it is no directory.
    """
    if not directory.is_dir():
        raise TemperaError(
            f"{directory} is not a directory: give a run, or a folder of pictures.", option="runs"
        )
    return (
        [directory]
        if (directory / "run.json").is_file()
        else directories_with(directory, "run.json")
    )


def import_pictures(
    folder: Path, shown: Sequence[Shown], directory: Path, drawn_by: str | None = None
) -> None:
    """Copy pictures into a run directory that has the folder's name; those that are there already
    stay.

    Args:
        folder: where they lie.
        shown: the pictures with their captions.
        directory: of the run.
        drawn_by: the model that drew them, if that is known.

    Raises:
        TemperaError: the directory is of something else, or holds another picture or text under an
            id.
    """
    source = str(folder.resolve())
    identity = {"method": folder.resolve().name, "folder": source}
    prompts = [one.prompt for one in shown]
    about = {
        "name": identity["method"],
        "data": {"prompts": source, "preset": "folder", **described(prompts)},
        "changes": {},
        "drawn_by": drawn_by,
        "exact": False,
        "length": None,
        "vocab": None,
        "grid": [1, 1],
        "machine": "",
        "timed": [],
    }
    claim(directory, identity, about, prompts)
    run = made_by(identity)
    _record(folder, shown, directory, run)
    write_prompts(directory, prompts, run)


def _record(folder: Path, shown: Sequence[Shown], directory: Path, run: str) -> None:
    """Copy and record the pictures that the directory lacks."""
    store = Store(directory / RECORDS, run, COLUMNS)
    recorded = store.rows()
    hashes = {file: sha256_file(file) for file in dict.fromkeys(one.file for one in shown)}
    new: list[Row] = []
    for one in tqdm(shown, desc="reading pictures", unit="picture", leave=False):
        row = {
            "id": one.prompt.id,
            "text": one.prompt.text,
            "file": str(one.file.relative_to(folder)),
            "sha256": hashes[one.file],
        }
        known = recorded.get(row["id"])
        if known is not None and known != row:
            raise TemperaError(
                f"{one.file} or its caption changed since {directory} was made from it: delete "
                "that directory, or give another with output=DIR.",
                option="output",
            )
        path = picture_path(directory, row["id"])
        if known is None or not is_whole(path, run):
            write_picture(path, one.picture(), run)
        if known is None:
            new.append(row)
        if len(new) == BATCH:
            store.add(new)
            new = []
    if new:
        store.add(new)
