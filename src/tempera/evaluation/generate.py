"""Generate the images that a run directory still lacks, batch by batch, in one or several
processes.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.replay import REPLAYS, DraftLog, replays
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Pipeline, records
from tempera.runtime.image_files import is_whole, picture_path, write_picture
from tempera.runtime.row_store import Row, Store


def todo(store: Store, prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """The prompts in batches, without those that already have records. Batches depend only on the
    whole list, so that a resumed run decodes the same ones.

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
    batches = (prompts[first : first + size] for first in range(0, len(prompts), size))
    left = ([prompt for prompt in batch if prompt.id not in known] for batch in batches)
    return list(filter(None, left))


def generate(
    pipeline: Pipeline,
    waiting: Sequence[Sequence[Prompt]],
    directory: Path,
    store: Store,
    diagnostics: bool,
    progress: Callable[[int], object] | None = None,
    replayed: Collection[str] = (),
) -> None:
    """Decode the batches. Each batch is written when it is complete: first its pictures, then the
    replays of the prompts whose ids are in `replayed`, then its records.

    `progress` is called after each round with the number of its tokens.
    """
    for batch in waiting:
        drafts = DraftLog() if any(prompt.id in replayed for prompt in batch) else None
        with pipeline.text_encoded(batch):
            start = pipeline.now()
            output = pipeline.tokens(
                batch, diagnostics=diagnostics, progress=progress, drafts=drafts
            )
        rows = records(batch, output, pipeline.now() - start)
        for prompt, picture in zip(batch, pipeline.pictures(output.tokens), strict=True):
            write_picture(picture_path(directory, prompt.id), picture)
        if drafts is not None:
            ids, grid = [prompt.id for prompt in batch], pipeline.target.grid
            Store(directory / REPLAYS).add(replays(ids, output, drafts, grid, replayed))
        store.add(rows)


def restore_pictures(pipeline: Pipeline, rows: Sequence[Row], directory: Path) -> None:
    """Decode deleted or damaged pictures again, from their tokens."""
    for row in rows:
        path = picture_path(directory, row["id"])
        if not is_whole(path):
            tokens = torch.tensor([np.asarray(row["tokens"]).tolist()])
            write_picture(path, pipeline.pictures(tokens)[0])
