"""The text encoder's features of all training captions: computed once, kept in the run directory,
and then read from there in every epoch and after every restart.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
from tempera.runtime.files import replacing
from tempera.runtime.tensor_files import read_tensors
from tempera.targets.prompt_state import PromptConditioner
from tempera.targets.transformer import TransformerTarget

PART = 1024
"""Captions in a file."""


class StoredConditions:
    """A `Conditioner` of known captions, which reads their features from mapped files.

    Args:
        files: each file and its captions; it holds `features` [N, D] of all their real tokens, and
            `mask`, bool [captions, T].
        made_by: the identity of their target, which each file carries.

    Raises:
        TemperaError: a file is damaged, or of another target.
    """

    def __init__(self, files: Mapping[Path, Sequence[str]], made_by: str) -> None:
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}
        for path, captions in files.items():
            tensors = read_tensors(path)
            if _made_by(path) != made_by:
                raise TemperaError(
                    f"{path} was written by another text encoder: delete the file, and run the "
                    "command again."
                )
            mask = tensors["keep"]
            features = tensors["features"].split(mask.sum(1).tolist())
            rows = zip(features, mask, strict=True)
            self.rows |= zip(captions, rows, strict=True)

    def __call__(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Features [B, T, D], zero on padding, and keep, bool [B, T]; on the CPU."""
        rows = [self.rows[prompt] for prompt in prompts]
        real = torch.cat([features for features, _ in rows])  # of the real tokens of all prompts
        mask = torch.stack([row_mask for _, row_mask in rows])
        features = real.new_zeros(*mask.shape, real.shape[-1])
        features[mask] = real
        return features, mask


def store_conditions(
    target: TransformerTarget,
    captions: Sequence[str],
    directory: Path,
    processes: Processes,
    batch_size: int = 32,
) -> None:
    """Encode captions into files, unless they are there, and let the target read them. A file is
    named after its captions and depends on nothing else, so a resumed run reads the same features.
    A condition that is no features, but the numbers of tokens or a class, is not kept.

    Args:
        target: its conditioner encodes, and is replaced.
        captions: of all images.
        directory: of the files, which belong to one text encoder.
        processes: of n, each makes every n-th file.
        batch_size: captions encoded at a time.
    """
    distinct = sorted(set(captions))
    if not target.conditioner(distinct[:1])[0].is_floating_point():
        return
    parts = [distinct[start : start + PART] for start in range(0, len(distinct), PART)]
    files = {directory / f"{_name(part)}.safetensors": part for part in parts}
    share = list(files)[processes.rank :: processes.count]
    missing = [path for path in share if not path.is_file()]
    for path in tqdm(missing, desc="encode captions", disable=not processes.is_main):
        tensors = _encoded(target, files[path], batch_size)
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"made_by": target.identity})
    processes.wait()
    target.conditioner = PromptConditioner(StoredConditions(files, target.identity))


def _encoded(
    target: TransformerTarget, captions: Sequence[str], batch_size: int
) -> dict[str, Tensor]:
    """The tensors of a file of `StoredConditions`."""
    features = []
    masks = []
    for start in range(0, len(captions), batch_size):
        condition, mask = target.conditioner(list(captions[start : start + batch_size]))
        features.append(condition[mask].cpu())
        masks.append(mask.cpu())
    return {"features": torch.cat(features), "keep": torch.cat(masks)}


def _made_by(path: Path) -> str | None:
    """The identity that a file carries."""
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("made_by")


def _name(captions: Sequence[str]) -> str:
    """The name of the file of these captions."""
    return hashlib.sha256("\n".join(captions).encode()).hexdigest()[:16]
