"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, with the
target frozen. Head k = 0 … K − 1 predicts the token k + 1 places behind the root, from the hidden
state before the root, without knowing the root or the tokens drafted in between.

Shapes: B prompts, R rows (2B under guidance), S positions, K heads, H hidden size.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.trees import Tree
from tempera.drafters.draft_network import DraftDtype, DraftNetwork, torch_dtype
from tempera.drafters.parallel import SlotDraft
from tempera.drafters.parallel_network import LENGTH, SlotConfig
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.targets.cache import KVCache
from tempera.targets.transformer import TransformerTarget


class MedusaModel(DraftNetwork):
    """K heads, each a residual SiLU block and a linear layer: W·M_k·(h + SiLU(A_k·h + b_k)).

    The paper's linear layer to the vocabulary is V × H for every head and starts as the target's
    head W. Here it is W·M_k: W stays frozen, and M_k, H × H, is trained from the identity. A_k and
    b_k start at zero, as in the paper, so that every head starts as the target's own.
    """

    config: SlotConfig
    config_type = SlotConfig
    sizes: ClassVar[dict[str, int]] = {"length": LENGTH}
    drafter = "medusa"
    layers = ()

    def __init__(self, config: SlotConfig) -> None:
        super().__init__(config)
        self.slots, width = config.length, config.hidden_size
        block = nn.Linear(width, self.slots * width)
        for start in (block.weight, block.bias):
            nn.init.zeros_(start)
        self.fc, self.out = block, nn.Parameter(torch.eye(width).repeat(self.slots, 1, 1))

    def heads(self, hidden: Tensor) -> Tensor:
        """What the target's head reads for each of the K heads: [R, S, H] → [R, S, K, H]."""
        x = hidden.unsqueeze(-2) + nn.functional.silu(self.fc(hidden)).unflatten(
            -1, (self.slots, -1)
        )
        return torch.einsum("rski,koi->rsko", x, self.out)

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """For training, where `embeds` are K copies of the sequence: copy k at position t is head
        k of the hidden state k positions earlier. The hidden states alone are read.
        """
        heads, length = self.heads(hidden), hidden.shape[1]
        return torch.cat(
            [nn.functional.pad(heads[:, : length - k, k], (0, 0, k, 0)) for k in range(self.slots)],
            1,
        )


class MedusaDraft(SlotDraft):
    """The distributions of a `MedusaModel`; arguments and errors are those of `SlotDraft`."""

    network: MedusaModel

    @override
    def _first(self, nodes: int) -> Tensor:
        return self._heads(self._before_prefix(self.session.prompt.keep)[:, -1:])

    @override
    def _next(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        return self._heads(self.session.prompt.from_root(hidden, emitted))

    def _heads(self, hidden: Tensor) -> Tensor:
        """[R, 1, H] → [R, L, H]."""
        return self.network.heads(hidden.to(self.dtype))[:, 0, : self.depth]


def medusa_network(
    target: Any, model: str, start: str | None = None, length: int = LENGTH
) -> MedusaModel:
    """`draft=medusa`: see `DraftNetwork.for_training`; `length` is K."""
    return MedusaModel.for_training(target, model, start, (), length=length)


def build_medusa(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The drafter of trained Medusa heads; arguments and errors are those of
    `parallel.build_parallel`.
    """
    network = MedusaModel.for_target(path, target, length=max(2, tree.max_depth))
    return StaticTreeDrafter(MedusaDraft(network, target, tree.max_depth, torch_dtype(dtype)), tree)
