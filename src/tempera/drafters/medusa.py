"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, with the
target frozen. Head k = 0 … K − 1 predicts the token k + 1 places behind the root, from the hidden
state before the root, without knowing the root or the tokens drafted in between.

Shapes: B prompts, R rows (2B under guidance), S positions, K heads, H hidden size.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.compiled import kept
from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict, drafts
from tempera.decoding.trees import Frontier, Tree
from tempera.drafters.draft_files import (
    DraftDtype,
    draft_to_decode,
    draft_to_train,
    torch_dtype,
)
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.draft_pass import DraftPass
from tempera.drafters.parallel import at_depth, possible_depth
from tempera.drafters.parallel_network import LENGTH, check_length
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.targets.cache import KVCache
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class MedusaConfig(DraftConfig):
    """Configuration of Medusa heads.

    Attributes:
        length: K.

    Raises:
        TemperaError: there are too few or too many heads.
    """

    length: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)


class MedusaModel(DraftNetwork):
    """K heads, each a residual SiLU block and a linear layer: W·M_k·(h + SiLU(A_k·h + b_k)).

    The paper's linear layer to the vocabulary is V × H for every head and starts as the target's
    head W. Here it is W·M_k: W stays frozen, and M_k, H × H, is trained from the identity. A_k and
    b_k start at zero, as in the paper, so that every head starts as the target's own.
    """

    config: MedusaConfig
    config_type = MedusaConfig
    sizes: ClassVar[dict[str, int]] = {"length": LENGTH}
    drafter = "medusa"
    layers = ()

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.slots = config.length
        width = config.hidden_size
        block = nn.Linear(width, self.slots * width)
        nn.init.zeros_(block.weight)
        nn.init.zeros_(block.bias)
        self.fc = block
        self.out = nn.Parameter(torch.eye(width).repeat(self.slots, 1, 1))

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
        rotation: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """For training, where `embeds` are K copies of the sequence: copy k at position t is head
        k of the hidden state k positions earlier. The hidden states alone are read.
        """
        heads = self.heads(hidden)
        length = hidden.shape[1]
        return torch.cat(
            [nn.functional.pad(heads[:, : length - k, k], (0, 0, k, 0)) for k in range(self.slots)],
            1,
        )


class MedusaDraft(DraftModel):
    """The distributions of a `MedusaModel`, for chains and static trees; arguments and errors are
    those of `parallel.ParallelDraft`.
    """

    def __init__(
        self,
        model: MedusaModel,
        target: TransformerTarget,
        depth: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.run = DraftPass(model, target, dtype)
        self.identity = model.identity
        self.depth = possible_depth(model, depth)
        self._heads = torch.empty(0)  # what the target's head reads, [R, L, H]

    @override
    def for_depth(self, depth: int) -> Self:
        return at_depth(self, depth)

    @torch.no_grad()
    def begin(self, prompts: list[str], nodes: int, images: Images) -> None:
        """Run the heads on the target's state before the root."""
        self.greedy = self.run.head.sampling.greedy
        before = self.run.before_prefix(self.run.prompt.keep)
        self._heads = kept(self._heads, self._run_heads(before[:, -1:]))

    @torch.no_grad()
    def roots(self, images: Images) -> tuple[Tensor, Tensor]:
        """The first head's distribution, float32 [B, V], and the logits of all, [B, L, V]."""
        logits = self.run.logits(self._heads)
        return self.run.distribution(logits[:, :1], 0)[:, 0], logits

    @torch.no_grad()
    def expand(self, above: Tensor, tokens: Tensor, level: Frontier) -> tuple[Tensor, Tensor]:
        """The distribution of the level's head after every node, float32 [B, P, V], and the logits
        of all.
        """
        logits = above[:, level.depth : level.depth + 1].expand(-1, tokens.shape[1], -1)
        return self.run.distribution(logits, level.depth), above

    @torch.no_grad()
    def observe(self, images: Images, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Run the heads on the target's state before the new root."""
        before = self.run.before_emitted(draft, verdict, scores)
        self._heads.copy_(self._run_heads(self.run.prompt.from_root(before, images.emitted)))

    def _run_heads(self, hidden: Tensor) -> Tensor:
        """[R, 1, H] → [R, L, H]."""
        heads: Tensor = self.run.network.heads(hidden.to(self.run.dtype))  # type: ignore[operator]
        return heads[:, 0, : self.depth]


def medusa_network(
    target: Any, model: str, start: str | None = None, length: int = LENGTH
) -> MedusaModel:
    """`draft=medusa`: see `draft_to_train`; `length` is K."""
    return draft_to_train(MedusaModel, target, model, start, (), length=length)


@drafts(trained_by="medusa")
def build_medusa(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The drafter of trained Medusa heads; arguments and errors are those of
    `parallel.build_parallel`.
    """
    network = draft_to_decode(MedusaModel, path, target, length=max(2, tree.max_depth))
    return StaticTreeDrafter(MedusaDraft(network, target, tree.max_depth, torch_dtype(dtype)), tree)
