"""The images of a batch while they are decoded. Loops append to them, drafters read them."""

import torch
from torch import Tensor

from tempera.errors import TemperaError


class Images:
    """The images of a batch as far as they are decoded, in buffers that rounds write in place. Rows
    advance and finish independently.

    Args:
        ids: the names of the B prompts.
        length: T, tokens of an image.
        depth: L, most tokens that a round drafts in a row.
        device: of the buffers.
        channels: D of continuous tokens; None for tokens that are ids.

    Attributes:
        tokens: int64 [B, T + 1 + L], or float32 [B, T + 1 + L, D], in the order of decoding;
            undefined from each row's length on. The last 1 + L columns are for tokens past the
            image.
        lengths: number of tokens of each row, int64 [B].
        emitted: how many of them the last round emitted, int64 [B]; 0 before the first round.
        rounds: number of rounds so far.
    """

    def __init__(
        self,
        ids: list[str],
        length: int,
        depth: int,
        device: torch.device,
        channels: int | None = None,
    ) -> None:
        self.ids = ids
        self.length = length
        self.depth = depth
        self.device = device
        shape = len(ids), length + 1 + depth
        if channels is None:
            self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        else:
            self.tokens = torch.zeros(*shape, channels, device=device)
        self.lengths = torch.zeros(len(ids), dtype=torch.int64, device=device)
        self.emitted = torch.zeros_like(self.lengths)
        self.rounds = 0
        self._ahead = torch.arange(shape[1], device=device)
        self._counts = [0] * len(ids)
        self._slots = self.lengths.unsqueeze(1)
        self._report: Tensor | None = None  # of the last round, until the host reads it

    @property
    def counts(self) -> list[int]:
        """`lengths` on the host. The first to ask after a round reads them from the device: the
        round's only host read.

        Raises:
            TemperaError: target or draft gave NaN or infinity for a row that was not complete.
        """
        if self._report is not None:
            counts, *broken = self._report.tolist()
            self._report = None
            grown = [now > before for now, before in zip(counts, self._counts, strict=True)]
            self._counts = counts
            self._check(broken, grown)
        return self._counts

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.counts)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row."""
        return min(self.counts)

    @property
    def written(self) -> int:
        """Tokens of all rows together."""
        return sum(self.counts)

    @property
    def complete(self) -> bool:
        """Whether all images are."""
        return self.shortest >= self.length

    def slots(self, count: int) -> Tensor:
        """The first `count` columns of `tokens` that the last round wrote, int64 [B, count]; those
        from `emitted` on are written again by later rounds.
        """
        return self._slots[:, :count]

    def append(self, tokens: Tensor, counts: Tensor, broken: Tensor) -> None:
        """Add a round.

        Args:
            tokens: each row's new tokens, [B, M] or [B, M, D]; M ≤ 1 + L, or no row is so near its
                end.
            counts: how many of them a row gets, int64 [B], unless its image ends before.
            broken: in which rows the target and the draft gave NaN or infinity, bool [2, B].
        """
        self._slots = slots = self.lengths.unsqueeze(1) + self._ahead[: tokens.shape[1]]
        # later rounds overwrite what is not emitted
        along = slots if tokens.dim() == 2 else slots.unsqueeze(-1).expand_as(tokens)
        self.tokens.scatter_(1, along, tokens)
        torch.minimum(counts, self.length - self.lengths, out=self.emitted)
        self.lengths += self.emitted
        self._report = torch.cat([self.lengths.unsqueeze(0), broken])
        self.rounds += 1

    def _check(self, broken: list[list[int]], grown: list[bool]) -> None:
        """Raise TemperaError if target or draft broke a row that has grown."""
        for who, rows in zip(("target", "draft"), broken, strict=True):
            for name, fault, grew in zip(self.ids, rows, grown, strict=True):
                if fault and grew:
                    raise TemperaError(
                        f"the {who} gave NaN or infinity for prompt '{name}'; check its weights "
                        "and the guidance, and try dtype=float32"
                    )
