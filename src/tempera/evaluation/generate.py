"""Generate the images that a run directory still lacks, in one or several processes."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Target, Watcher
from tempera.decoding.replay import REPLAYS, DraftLog, replays
from tempera.evaluation.pipeline import Pipeline, records, watchers
from tempera.runtime.image_files import is_whole, picture_path, write_picture
from tempera.runtime.processor import forget_peak_memory, peak_memory
from tempera.runtime.row_store import Row, Store
from tempera.runtime.side_services import side_service


def todo(store: Store, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without those that already have records."""
    recorded = store.rows()
    return [prompt for prompt in prompts if prompt.id not in recorded]


def generate(
    pipeline: Pipeline,
    waiting: Sequence[Prompt],
    size: int,
    directory: Path,
    store: Store,
    diagnostics: bool,
    progress: Callable[[int], object] | None = None,
    replayed: Collection[str] = (),
) -> None:
    """Decode the prompts, `size` of them together. Of each image that is complete, first the replay
    is written, if its prompt's id is in `replayed`, then its record, and then its picture, unless
    it cannot be made; `restore_pictures` tries again.

    `progress` is called after each round with the number of its tokens.
    """
    if not waiting:
        return
    replay_store = Store(directory / REPLAYS, store.identity)
    drafts = DraftLog(replay_store.missing(replayed))
    watch: list[Watcher] = watchers(progress)
    if isinstance(pipeline.target, Target):
        watch.append(drafts)
    forget_peak_memory(pipeline.device)
    for done in pipeline.decoded(waiting, size, diagnostics=diagnostics, watch=watch):
        ids = [prompt.id for prompt in done.prompts]
        if shown := replays(ids, done.output, drafts, pipeline.target.grid):
            replay_store.add(shown)
        memory = peak_memory(pipeline.device)
        store.add([{**row, "memory": memory} for row in records(done)])
        with suppress(Exception):
            texts = [prompt.text for prompt in done.prompts]
            pictures = pipeline.pictures(done.output.tokens, texts)
            for name, picture in zip(ids, pictures, strict=True):
                write_picture(picture_path(directory, name), picture, store.identity)


def restore_pictures(
    pipeline: Pipeline, rows: Sequence[Row], directory: Path, made_by: str
) -> bool:
    """Make missing and damaged pictures from their tokens, unless they cannot be made; return
    whether all are there.

    Raises:
        TemperaError: one is not a picture of this run.
    """
    paths = [picture_path(directory, row["id"]) for row in rows]
    lost = [index for index, path in enumerate(paths) if not is_whole(path, made_by)]
    with side_service(
        f"{len(lost)} pictures could not be made ({{why}}): their tokens are in {directory}; run "
        "the command again to retry."
    ):
        for index in lost:
            tokens = torch.tensor([np.asarray(rows[index]["tokens"]).tolist()])
            (picture,) = pipeline.pictures(tokens, [rows[index]["text"]])
            write_picture(paths[index], picture, made_by)
        return True
    return False
