"""Plain autoregression: nothing is drafted, so every round draws one token from the target."""

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Drafter
from tempera.decoding.trees import Tree


class NoDraft(Drafter):
    """The drafter of `method=ar`."""

    nodes = 0
    depth = 0

    def propose(self, uniforms: Tensor) -> Draft:
        """The empty draft: tokens [B, 0], q [B, 0, 0]."""
        batch, device = uniforms.shape[0], uniforms.device
        return Draft(
            torch.empty(batch, 0, dtype=torch.int64, device=device),
            torch.empty(batch, 0, 0, device=device),
            Tree.empty().to(device),
        )
