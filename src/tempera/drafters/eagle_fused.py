"""A faster forward pass of the EAGLE draft with fused operations."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_network import DraftStep
from tempera.targets.fast_layer import FastLayer, turned
from tempera.targets.frozen_linear import freeze
from tempera.targets.kv_cache import RowCache


class FastEagle(DraftStep):
    """An `EagleModel` for drafting: the same arithmetic with fewer and larger operations, if
    `FastLayer` fits its layer. It has its own copies of the weights.

    Args:
        model: an `EagleModel`; later changes to its weights have no effect here.
        device, dtype: of the copies.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        fc, layer = (_frozen(part, device, dtype) for part in (model.fc, model.layer))
        self.joined = FastLayer.fits(layer)
        self._fc = freeze(fc.weight, fc.bias)
        self._layer = FastLayer(layer) if self.joined else layer
        self._rotary = _frozen(model.rotary, device, dtype)

    @override
    def rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(like, position_ids)
        return turned(cos, sin) if self.joined else (cos, sin)

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: RowCache,
    ) -> Tensor:
        x = self._fc(torch.cat([embeds, hidden], -1))
        if self.joined:
            predicted: Tensor = self._layer(x, mask, rotation, cache.layer(0))
            return predicted
        out: Tensor = self._layer(
            x,
            attention_mask=mask,
            position_embeddings=rotation,
            past_key_values=cache,
            use_cache=True,
        )
        return out


def _frozen(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """A copy for decoding."""
    return copy.deepcopy(module).to(device=device, dtype=dtype).eval().requires_grad_(False)
