"""As a script: what one of several processes holds at its peak while it trains a draft under FSDP.
torchrun starts several of it, with a JSON file of options; each writes RANK.json beside it.
"""

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny_targets import composed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.training.estimate import BlankCodes
from tempera.training.fsdp import in_step, split_target
from tempera.training.recipe import Recipe
from tempera.training.trainer import TrainingRun
from tempera.training.validation import accepted_length, imitation

CAPTION = "two dogs on a red sofa"


class Held(TorchDispatchMode):
    """The bytes in storages that operations made; FSDP empties and fills some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.storages = 0, dict[int, Any]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            local = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(local, torch.Tensor):
                storage = local.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes at this moment."""
        alive = {name: storage for name, one in self.storages.items() if (storage := one())}
        self.storages = {name: weakref.ref(storage) for name, storage in alive.items()}
        return sum(storage.nbytes() for storage in alive.values())


def main(options: Path) -> None:
    given = json.loads(options.read_text())
    cfg = composed(*given["options"], config="train_draft")
    accelerator = Accelerator(cpu=True)
    recipe = Recipe(**given["recipe"])
    with Held() as held:
        target = build.build_target(cfg, split_target)
        draft = instantiate(cfg.draft, target=target, model="sized")
        gc.collect()
        held.peak = held.now()
        run = TrainingRun(
            target, draft, BlankCodes(CAPTION, target.length), instantiate(cfg.loss), recipe,
            options.parent, accelerator, quiet=True, sharded=True,
        )  # fmt: skip
        run.step(0)
        with in_step(target.network):
            imitation(run.kept(), target, run.held)
            accepted_length(run.kept(), target, run.captions, recipe.depth)
        run.step(1)
    place = options.parent / f"{accelerator.process_index}.json"
    place.write_text(json.dumps(held.peak))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.backends.mkldnn.is_available = lambda: False  # as on CUDA, weights are not packed
    main(Path(sys.argv[1]))
    os._exit(0)
