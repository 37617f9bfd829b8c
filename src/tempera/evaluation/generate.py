"""Generate the images that a run directory still lacks, batch by batch, in one or several
processes.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.replay import REPLAYS, DraftLog, replays
from tempera.errors import TemperaError, shortened
from tempera.evaluation.pipeline import Pipeline, records
from tempera.runtime.image_files import is_whole, picture_path, write_picture
from tempera.runtime.row_store import Row, Store

ProgressCallback = Callable[[int, int, int], None]
"""Called during decoding with the numbers of images, tokens and rounds (summed over images) since
the last call.
"""


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """The prompts in batches that depend only on the whole list, so that a resumed run decodes the
    same batches.
    """
    return [list(prompts[first : first + size]) for first in range(0, len(prompts), size)]


def todo(store: Store, prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """The batches without the prompts that already have records.

    Raises:
        TemperaError: a prompt's id was already used for another text.
    """
    known = store.rows()
    for prompt in prompts:
        if prompt.id in known and known[prompt.id]["text"] != prompt.text:
            raise TemperaError(
                f"{store.directory.parent} holds '{known[prompt.id]['text']}' under the id "
                f"{prompt.id}, which is now '{prompt.text}': "
                "choose another directory (hydra.run.dir=DIR)."
            )
    left = [
        [prompt for prompt in batch if prompt.id not in known] for batch in batches(prompts, size)
    ]
    return [batch for batch in left if batch]


def generate(
    pipeline: Pipeline,
    waiting: Sequence[Sequence[Prompt]],
    directory: Path,
    store: Store,
    diagnostics: bool,
    progress: ProgressCallback | None = None,
    replayed: Collection[str] = (),
) -> None:
    """Decode the batches. Each batch is written when it is complete: first its pictures, then the
    replays of the prompts whose ids are in `replayed`, then its records.

    Progress counts the images of a batch once they are written.
    """
    for batch in waiting:
        seen = _Increments(len(batch), progress)
        drafts = DraftLog() if any(prompt.id in replayed for prompt in batch) else None
        with pipeline.text_encoded(batch):
            start = pipeline.now()
            output = pipeline.tokens(batch, diagnostics=diagnostics, progress=seen, drafts=drafts)
        rows = records(batch, output, pipeline.now() - start)
        for prompt, picture in zip(batch, pipeline.pictures(output.tokens), strict=True):
            write_picture(picture_path(directory, prompt.id), picture)
        if drafts is not None:
            ids, grid = [prompt.id for prompt in batch], pipeline.target.grid
            Store(directory / REPLAYS).add(replays(ids, output, drafts, grid, replayed))
        store.add(rows)
        if progress is not None:
            progress(len(batch), 0, sum(row["rounds"] for row in rows) - seen.rounds)


def restore_pictures(pipeline: Pipeline, rows: Sequence[Row], directory: Path) -> None:
    """Decode deleted or damaged pictures again, from their tokens.

    Raises:
        TemperaError: the tokens do not belong to this model.
    """
    for row in rows:
        path = picture_path(directory, row["id"])
        if is_whole(path):
            continue
        try:
            picture = pipeline.pictures(torch.tensor([np.asarray(row["tokens"]).tolist()]))[0]
        except (RuntimeError, IndexError, TypeError, ValueError) as problem:
            raise TemperaError(
                f"the tokens of {row['id']} in {directory / 'records'} cannot be decoded "
                f"({shortened(str(problem))}): delete the records and run again."
            ) from None
        write_picture(path, picture)


class _Increments:
    """Turns `decode`'s running totals of a batch into increments."""

    def __init__(self, rows: int, progress: ProgressCallback | None) -> None:
        self.rows, self.progress, self.tokens, self.rounds = rows, progress, 0, 0

    def __call__(self, rounds: int, tokens: int) -> None:
        """Report the increments. `rounds` is that of the batch, which no row exceeds; the surplus
        is subtracted when the batch is complete.
        """
        if self.progress is not None:
            self.progress(0, tokens - self.tokens, self.rows)
        self.tokens, self.rounds = tokens, self.rounds + self.rows
