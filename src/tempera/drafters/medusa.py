"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, with the
target frozen. Head k = 0 … K − 1 predicts the token k + 1 places behind the root, from the hidden
state before the root, without knowing the root or the tokens drafted in between. With `columns`, it
also reads the state one row above the token that it predicts: Hawk's second direction
(arXiv 2510.25739), in the same head instead of a sibling's.

Shapes: B prompts, R rows (2B under guidance), S positions, K heads, H hidden size, C columns of the
token grid.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes, take
from tempera.drafters.draft_files import builder_of, draft_to_train
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.draft_pass import DraftPass
from tempera.drafters.parallel_network import LENGTH, check_length
from tempera.errors import TemperaError
from tempera.targets.attention import SharedMask
from tempera.targets.cache import KVCache
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class MedusaConfig(DraftConfig):
    """Configuration of Medusa heads.

    Attributes:
        length: K.
        columns: C, if the heads also read the state above; 0 if they do not.

    Raises:
        TemperaError: there are too few or too many heads, or the state above the last drafted token
            is not there yet.
    """

    length: int = field(kw_only=True)
    columns: int = field(kw_only=True, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        if self.columns and self.length >= self.columns:
            raise TemperaError(
                f"above=true is not possible for length={self.length} in rows of {self.columns} "
                f"tokens: give length={self.columns - 1} or less, or above=false."
            )


class MedusaDraft(DraftModel):
    """The distributions of a `MedusaModel`, for chains and static trees; arguments and errors are
    those of `parallel.ParallelDraft`.
    """

    def __init__(
        self, model: "MedusaModel", target: TransformerTarget, dtype: torch.dtype | None = None
    ) -> None:
        self.run = DraftPass(model, target, dtype)
        self.identity = model.identity
        self.longest = model.slots
        self._reach = torch.arange(model.reach, device=target.device)
        self._states = torch.empty(0)  # the target's last ones, up to that before the root

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Take the target's states up to the one before the root."""
        prefix = self.run.started
        self.depth = sequences.depth
        self.greedy = self.run.head.sampling.greedy
        before = self.run.before_prefix(prefix.mask)
        count = len(self._reach)
        padded = nn.functional.pad(before, (0, 0, count, 0))
        self._states = persistent(self._states, padded[:, -count:], prefix.rows)

    def roots(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The first head's distribution, float32 [B, V], and the logits of all, [B, L, V]."""
        network = self.run.network
        states = self._states.to(self.run.dtype)
        above = states[:, None, : network.slots] if len(self._reach) > 1 else None
        heads: Tensor = network.heads(states[:, -1:], above)  # type: ignore[operator]
        logits = self.run.logits(heads[:, 0, : self.depth])
        return self.run.distribution(logits[:, :1], 0)[:, 0], logits

    def expand(self, above: Tensor, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, Tensor]:
        """The distribution of the level's head after every node, float32 [B, P, V], and the logits
        of all.
        """
        logits = above[:, level.depth : level.depth + 1].expand(-1, tokens.shape[1], -1)
        return self.run.distribution(logits, level.depth), above

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Move on by the states before the tokens of the round."""
        before = self.run.before_emitted(draft, verdict, scores)
        states = torch.cat([self._states, before], 1)
        moved = self.run.prompt.by_row(sequences.emitted)[:, None] + self._reach
        self._states.copy_(take(states, moved))


class MedusaModel(DraftNetwork):
    """K heads, each a residual SiLU block and a linear layer: W·M_k·(h + SiLU(A_k·h + b_k)).

    The paper's linear layer to the vocabulary is V × H for every head and starts as the target's
    head W. Here it is W·M_k: W stays frozen, and M_k, H × H, is trained from the identity. A_k and
    b_k start at zero, as in the paper, so that every head starts as the target's own.

    With the state g above, it is W·(M_k·(h + SiLU(A_k·h + B_k·g + b_k)) + N_k·g); B_k and N_k start
    at zero. In the first row, g is the state of as many tokens before, in the prefix, or zero.
    """

    config: MedusaConfig
    config_type = MedusaConfig
    sizes: ClassVar[dict[str, int]] = {"length": LENGTH}
    drafter = "medusa"
    draft_model = MedusaDraft
    layers = ()

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.slots = config.length
        width = config.layer_sizes.width
        block = nn.Linear(width, self.slots * width)
        nn.init.zeros_(block.weight)
        nn.init.zeros_(block.bias)
        self.fc = block
        self.out = nn.Parameter(torch.eye(width).repeat(self.slots, 1, 1))
        if config.columns:
            self.above_in = nn.Parameter(torch.zeros_like(self.out))
            self.above_out = nn.Parameter(torch.zeros_like(self.out))

    @property
    def reach(self) -> int:
        """How many of the target's last states the heads read: 1, or C − 1, of which the first K
        stand above the drafted tokens.
        """
        return max(1, self.config.columns - 1)

    def heads(self, hidden: Tensor, above: Tensor | None = None) -> Tensor:
        """What the target's head reads for each of the K heads, [R, S, K, H], from the states
        before the root [R, S, H] and, with `columns`, those above the tokens [R, S, K, H].
        """
        block = self.fc(hidden).unflatten(-1, (self.slots, -1))
        if above is not None:
            block = block + torch.einsum("rski,koi->rsko", above, self.above_in)
        x = hidden.unsqueeze(-2) + nn.functional.silu(block)
        x = torch.einsum("rski,koi->rsko", x, self.out)
        return x if above is None else x + torch.einsum("rski,koi->rsko", above, self.above_out)

    @override
    def visible(self, count: int) -> None:
        """No layer attends."""

    @override
    def forward(
        self,
        embeds: Tensor | None,
        hidden: Tensor,
        mask: Tensor | SharedMask | None,
        rotation: Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """For training, of K copies of the sequence: copy k at position t is head k of the hidden
        state k positions earlier. The hidden states alone are read.
        """
        above = None
        if self.config.columns:  # head k reads what is C - 2 - k positions before `hidden`
            back = self.config.columns - 2
            above = torch.stack([_later(hidden, back - k) for k in range(self.slots)], 2)
        heads = self.heads(hidden, above)
        return torch.cat([_later(heads[:, :, k], k) for k in range(self.slots)], 1)


def _later(x: Tensor, steps: int) -> Tensor:
    """[R, S, H] moved `steps` positions to the right, with zeros before."""
    return nn.functional.pad(x, (0, 0, steps, 0))[:, : x.shape[1]]


def medusa_network(
    target: Any, model: str, start: str | None = None, length: int = LENGTH, above: bool = False
) -> MedusaModel:
    """`draft=medusa`: see `draft_to_train`; `length` is K, `above` whether the heads read the
    states above.
    """
    columns = target.grid[1] if above else 0
    return draft_to_train(MedusaModel, target, model, start, (), length=length, columns=columns)


build_medusa = builder_of(MedusaModel)
"""The drafter of a trained draft: see `draft_files.builder_of`."""
