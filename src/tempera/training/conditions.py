"""The text encoder's features of all training captions: computed once, kept in the run directory,
and then read from there in every epoch and after every restart.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tempera.runtime.files import replacing
from tempera.runtime.tensor_files import read_tensors
from tempera.targets.prompt_state import PromptConditioner
from tempera.targets.transformer import TransformerTarget

PART = 1024
"""Captions in a file."""


class KeptConditions:
    """A `Conditioner` of known captions, which reads their features from mapped files.

    Args:
        parts: captions, sorted, as many as in one file.
        paths: for each of them, the file with `features` [N, D] of all its real tokens and `keep`,
            bool [captions, T].
    """

    def __init__(self, parts: Sequence[Sequence[str]], paths: Sequence[Path]) -> None:
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}
        for captions, path in zip(parts, paths, strict=True):
            part = read_tensors(path)
            features = part["features"].split(part["keep"].sum(1).tolist())
            self.rows |= zip(captions, zip(features, part["keep"], strict=True), strict=True)

    def __call__(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Features [B, T, D], zero on padding, and keep, bool [B, T]; on the CPU."""
        known, keep = zip(*(self.rows[prompt] for prompt in prompts), strict=True)
        kept = torch.stack(keep)
        features = known[0].new_zeros(*kept.shape, known[0].shape[-1])
        features[kept] = torch.cat(known)
        return features, kept


def keep_conditions(
    target: TransformerTarget,
    captions: Sequence[str],
    directory: Path,
    rank: int = 0,
    count: int = 1,
    wait: Callable[[], None] = lambda: None,
    batch_size: int = 32,
) -> None:
    """Encode captions into files, unless they are there, and let the target read them. A file is
    named after its captions and depends on nothing else, so a resumed run reads the same features.
    A condition that is no features, but the numbers of tokens or a class, is not kept.

    Args:
        target: its conditioner encodes, and is replaced.
        captions: of all images.
        directory: of the files, which belong to one text encoder.
        rank, count: this process, which takes every `count`-th file, and the number of processes.
        wait: waits for the other processes.
        batch_size: captions encoded at a time.
    """
    every = sorted(set(captions))
    if not target.conditioner(every[:1])[0].is_floating_point():
        return
    parts = [every[start : start + PART] for start in range(0, len(every), PART)]
    names = [hashlib.sha256("\n".join(part).encode()).hexdigest()[:16] for part in parts]
    paths = [directory / f"{name}.safetensors" for name in names]
    mine = [
        item for item in list(zip(parts, paths, strict=True))[rank::count] if not item[1].is_file()
    ]
    for part, path in tqdm(mine, desc="encode captions", unit=f"{PART} captions", disable=rank > 0):
        batches = [part[start : start + batch_size] for start in range(0, len(part), batch_size)]
        encoded = [target.conditioner(batch) for batch in batches]
        features = torch.cat([features[keep].cpu() for features, keep in encoded])
        keeps = torch.cat([keep.cpu() for _, keep in encoded])
        with replacing(path) as temporary:
            save_file({"features": features, "keep": keeps}, temporary)
    wait()
    target.conditioner = PromptConditioner(KeptConditions(parts, paths))
