"""Generate the images that a run directory still lacks, batch by batch, in one or several
processes.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Target, Watcher
from tempera.decoding.replay import REPLAYS, DraftLog, replays
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Decoded, Pipeline, records, watchers
from tempera.runtime.image_files import is_whole, picture_path, write_picture
from tempera.runtime.processor import forget_peak_memory, peak_memory
from tempera.runtime.row_store import Row, Store
from tempera.runtime.side_services import side_service


def todo(store: Store, prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """The prompts in batches, without those that already have records. Batches depend only on the
    whole list, so that a resumed run decodes the same ones.

    Raises:
        TemperaError: a prompt's id was already used for another text.
    """
    recorded = store.rows()
    for prompt in prompts:
        text = recorded[prompt.id]["text"] if prompt.id in recorded else prompt.text
        if text != prompt.text:
            raise TemperaError(
                f"{store.directory.parent} holds '{text}' under the id {prompt.id}, which is now "
                f"'{prompt.text}': choose another directory (hydra.run.dir=DIR)."
            )
    batches = []
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        waiting = [prompt for prompt in batch if prompt.id not in recorded]
        if waiting:
            batches.append(waiting)
    return batches


def generate(
    pipeline: Pipeline,
    waiting: Sequence[Sequence[Prompt]],
    directory: Path,
    store: Store,
    diagnostics: bool,
    progress: Callable[[int], object] | None = None,
    replayed: Collection[str] = (),
) -> None:
    """Decode the batches. Each batch is written when it is complete: first the replays of the
    prompts whose ids are in `replayed`, then its records, and then its pictures, unless they cannot
    be made; `restore_pictures` tries again.

    `progress` is called after each round with the number of its tokens.
    """
    has_ids = isinstance(pipeline.target, Target)
    bar = watchers(progress)
    drafts = DraftLog()
    filled = max(map(len, waiting), default=0)
    for prompts in waiting:
        shown = any(prompt.id in replayed for prompt in prompts)
        watch: list[Watcher] = [*bar, drafts] if shown and has_ids else bar
        forget_peak_memory(pipeline.device)
        batch = pipeline.decoded(prompts, diagnostics=diagnostics, watch=watch, filled=filled)
        if shown:
            _keep_replays(pipeline, batch, drafts, directory, store.identity, replayed)
        memory = peak_memory(pipeline.device)
        store.add([{**row, "memory": memory} for row in records(batch)])
        with suppress(Exception):
            texts = [prompt.text for prompt in batch.prompts]
            pictures = pipeline.pictures(batch.output.tokens, texts)
            for prompt, picture in zip(batch.prompts, pictures, strict=True):
                write_picture(picture_path(directory, prompt.id), picture, store.identity)


def _keep_replays(
    pipeline: Pipeline,
    batch: Decoded,
    drafts: DraftLog,
    directory: Path,
    made_by: str,
    replayed: Collection[str],
) -> None:
    """Write the replays that are not there, as they may be after an interruption."""
    kept = Store(directory / REPLAYS, made_by)
    ids = [prompt.id for prompt in batch.prompts]
    missing = kept.missing([name for name in ids if name in replayed])
    rows = replays(ids, batch.output, drafts, pipeline.target.grid, missing)
    if rows:
        kept.add(rows)


def restore_pictures(
    pipeline: Pipeline, rows: Sequence[Row], directory: Path, made_by: str
) -> bool:
    """Make missing and damaged pictures from their tokens, unless they cannot be made; return
    whether all are there.

    Raises:
        TemperaError: one is not a picture of this run.
    """
    paths = [picture_path(directory, row["id"]) for row in rows]
    lost = [place for place, path in enumerate(paths) if not is_whole(path, made_by)]
    with side_service(
        f"{len(lost)} pictures cannot be made ({{why}}): their tokens are in {directory}, and the "
        "same command tries again."
    ):
        for place in lost:
            tokens = torch.tensor([np.asarray(rows[place]["tokens"]).tolist()])
            (picture,) = pipeline.pictures(tokens, [rows[place]["text"]])
            write_picture(paths[place], picture, made_by)
        return True
    return False
