"""A faster forward pass of draft networks that read what EAGLE reads, with fused operations."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_network import DraftStep
from tempera.runtime.processor import arithmetic
from tempera.targets.cache import KVCache
from tempera.targets.merged_layer import merge
from tempera.targets.packed_linear import PackedLinear, joined


class FastEagle(DraftStep):
    """An `EagleModel` or `ParallelModel` for drafting: the same arithmetic with fewer and larger
    products (`merged_layer`). It has its own copies of the weights.

    Args:
        model: the draft network; later changes to its weights have no effect here.
        device, dtype: of the copies; see `processor.arithmetic`.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        fc, rotary, *layers = (
            _frozen(part, device, dtype) for part in (model.fc, model.rotary, *model.layers)
        )
        self._fc = joined(fc)
        self._fc_without: PackedLinear | None = None
        if model.features:  # drafted tokens have none
            self._fc_without = PackedLinear(fc.weight[:, : 2 * fc.out_features], fc.bias)
        for index, layer in enumerate(layers):
            layer.self_attn.layer_idx = index
            merge(layer)
        self._layers, self._rotary = nn.ModuleList(layers), rotary

    @override
    def rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(like, position_ids)
        return cos, sin

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> Tensor:
        """See `DraftStep.forward`."""
        fc = self._fc
        if self._fc_without is not None and hidden.shape == embeds.shape:
            fc = self._fc_without
        x: Tensor = fc(inputs(embeds, hidden))
        for layer in self._layers:
            x = layer(
                x,
                attention_mask=mask,
                position_embeddings=rotation,
                past_key_values=cache,
                use_cache=True,
            )
        return x


def _frozen(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """A copy for decoding."""
    module = copy.deepcopy(module).to(device, dtype).to(arithmetic(dtype, device))
    return module.eval().requires_grad_(False)


def inputs(embeds: Tensor, hidden: Tensor) -> Tensor:
    """What the draft's projection reads, from embeddings [R, S, H] and hidden states with the
    features of K layers or none, [R, S, (1 + K)·H]: [R, S, (2 + K)·H]. Features are normed, because
    layers differ in scale; zeros stay zeros.
    """
    width = embeds.shape[-1]
    last, features = hidden[..., :width], hidden[..., width:]
    if features.shape[-1]:
        by_layer = features.unflatten(-1, (-1, width))
        features = nn.functional.rms_norm(by_layer, (width,)).flatten(-2)
    return torch.cat([embeds, last, features], -1)
